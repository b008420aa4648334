"""Weights spread over ranks by `fully_shard`: real processes give the weights of one process that
has them whole.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import subprocess
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import throughtime as tt
from processes import LOOPBACK, Work, in_processes, torchrun
from strategies import apart, recordings
from throughtime.carry import Carried
from throughtime.errors import ModelError
from throughtime.gradient import Policy

LENGTHS = (40, 25, 53, 8, 3, 29, 15)
LANES, COUNT = 2, 50
LOSS = nn.MSELoss()
POLICIES: dict[str, Callable[[], Policy]] = {
    "stride": lambda: tt.Truncated(7),
    "horizon": lambda: tt.Truncated(7, 15),
    "exact": lambda: tt.Exact(cut_every=20, chunk=7),
    "randomized": lambda: tt.Randomized(20),
    "adaptive": lambda: tt.Adaptive(0.2, 10, 40, every=2),
}
FEW = ("exact",)  # tested every time
EXAMPLE = Path(__file__).parent.parent / "examples" / "fsdp2.py"


def plain() -> Carried:
    torch.manual_seed(3)
    return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1))).double()


def sharded(*, parts: bool = False, **options: Any) -> Carried:
    """The net spread over all ranks, as a whole or the layer and the rest apart."""
    net, mesh = plain(), init_device_mesh("cpu", (distributed.get_world_size(),))
    if parts:
        fully_shard(net.get_submodule("module.0"), mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def whole(net: nn.Module) -> dict[str, Tensor]:
    weights = cast(
        "dict[str, Tensor]",
        get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)),
    )
    return {name: weight.detach().clone() for name, weight in weights.items()}


def trained(
    net: Carried,
    lanes: int,
    policy: Policy,
    accumulate: int = 1,
    every: int = 1,
    *,
    looks: bool = False,
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses after so many updates.

    The net may be looked at between gradient and step.
    """
    stream, optimizer, losses = (
        tt.Stream(recordings(LENGTHS, outputs=1), lanes, 10),
        torch.optim.Adam(net.parameters(), 0.01),
        list[float](),
    )
    torch.manual_seed(11)
    while len(losses) < COUNT:
        for update in tt.updates(net, stream, LOSS, gradient=policy, accumulate=accumulate):
            losses.append(update.loss.item())
            if len(losses) % every == 0:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
                if looks:
                    tt.predict(net, recordings((9,), outputs=1)[0])
                optimizer.step()
                optimizer.zero_grad()
            if len(losses) == COUNT:
                break
    return whole(net), losses


def gaps() -> list[dict[str, Any]]:
    """Four recordings of one length with gaps: ranks have equal chunks, but other valid steps."""
    result = recordings((70, 70, 70, 70), outputs=1)
    for i, one in enumerate(result):
        one["targets"][: 10 * i] = np.nan
    return result


def by_hand(net: Carried, lanes: int) -> dict[str, Tensor]:
    """Mean losses of chunks and their backward passes, as people write it for FSDP."""
    stream, optimizer = (
        tt.Stream(gaps(), lanes, 7, seed=None),
        torch.optim.SGD(net.parameters(), 0.1),
    )
    state = plain().initial_state(lanes)
    for chunk in stream:
        y, state = net(chunk.inputs, tt.state.detach(state))
        if chunk.valid_steps:
            LOSS(*chunk.valid_pairs(y)).backward()
        else:
            (y.sum() * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(net)


def by_updates(net: Carried, lanes: int) -> dict[str, Tensor]:
    stream, optimizer = (
        tt.Stream(gaps(), lanes, 7, seed=None),
        torch.optim.SGD(net.parameters(), 0.1),
    )
    for _ in tt.updates(net, stream, LOSS, gradient=tt.Truncated(7)):
        optimizer.step()
        optimizer.zero_grad()
    return whole(net)


def placed() -> tuple[bool, bool, float]:
    """Whether weights and gradients are sharded between updates, and the steps in Adam's state."""
    net = sharded(parts=True)
    optimizer = torch.optim.Adam(net.parameters())
    next(
        tt.updates(
            net,
            tt.Stream(recordings(LENGTHS, outputs=1), LANES, 10),
            LOSS,
            gradient=tt.Truncated(7),
        )
    )
    spread = [
        isinstance(w, DTensor) and isinstance(w.grad, DTensor) and w.grad.placements == w.placements
        for w in net.parameters()
    ]
    optimizer.step()
    held = sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())
    return (
        all(spread),
        all(isinstance(m, FSDPModule) for m in (net, net.get_submodule("module.0"))),
        held / sum(w.numel() for w in net.parameters()),
    )


def resumed(stop: int) -> bool:
    """Whether a training that is stopped and goes on in new objects ends with the same bits."""
    ends: list[dict[str, Tensor]] = []
    for at in (None, stop):
        net, stream = sharded(), tt.Stream(recordings(LENGTHS, outputs=1), LANES, 10)
        run = tt.updates(net, stream, LOSS, gradient=tt.Truncated(3, 8))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for done in range(1, 11):
            next(run)
            optimizer.step()
            optimizer.zero_grad()
            if done == at:
                position, stream = (
                    run.state_dict(),
                    tt.Stream(recordings(LENGTHS, outputs=1), LANES, 10),
                )
                run = tt.updates(net, stream, LOSS, gradient=tt.Truncated(3, 8))
                run.load_state_dict(position)
        ends.append(whole(net))
    return apart(ends[0], ends[1]) == 0


def refused() -> str:
    net = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    try:
        tt.updates(
            net,
            tt.Stream(recordings(LENGTHS, outputs=1), LANES, 10),
            LOSS,
            gradient=tt.Truncated(7),
        )
    except ModelError as error:
        return str(error)
    return "nothing was refused"


def nothing_before() -> None:
    """Streams are made where the group is up."""


def quiet() -> None:
    """Torch warns of what in-place operations on outputs would do; there are none."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)


def few_works(rank: int, before: None) -> Iterator[tuple[str, Any]]:
    del rank, before
    quiet()
    for name in FEW:
        yield name, trained(sharded(), LANES, POLICIES[name]())
    yield (
        "evaluated",
        tt.evaluate(
            sharded(parts=True), tt.Stream(recordings(LENGTHS, outputs=1), LANES, 10), LOSS
        ).loss,
    )
    yield "gaps", by_updates(sharded(), LANES)
    yield "mutant", by_hand(sharded(), LANES)
    yield "placed", placed()
    yield "refused", refused()


def all_works(rank: int, before: None) -> Iterator[tuple[str, Any]]:
    del rank, before
    quiet()
    for name, policy in POLICIES.items():
        yield name, trained(sharded(), LANES, policy())
    yield "parts", trained(sharded(parts=True), LANES, tt.Truncated(7, 15))
    yield "looked at", trained(sharded(parts=True), LANES, tt.Truncated(7, 15), looks=True)
    yield "accumulate", trained(sharded(parts=True), LANES, tt.Truncated(7), 3)
    yield "every third", trained(sharded(parts=True), LANES, tt.Truncated(7), every=3)
    yield "resumed", [resumed(stop) for stop in (3, 7)]


@cache
def found(works: Work) -> list[dict[str, Any]]:
    return in_processes(2, nothing_before, works)


@pytest.mark.parametrize(
    "name",
    [
        *FEW,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in [*POLICIES, "parts", "looked at"]
            if name not in FEW
        ),
    ],
)
def test_spread_weights_become_those_of_one_process(name: str) -> None:
    expected, losses = trained(plain(), 2 * LANES, POLICIES.get(name, POLICIES["horizon"])())
    for told in found(few_works if name in FEW else all_works):
        assert apart(told[name][0], expected) < 1e-10
        assert told[name][1] == pytest.approx(losses, rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("accumulate", (3, 1)), ("every third", (1, 3))])
def test_gradients_of_several_updates_add_up_as_on_one_process(
    name: str, options: tuple[int, int]
) -> None:
    expected, _ = trained(plain(), 2 * LANES, tt.Truncated(7), *options)
    for told in found(all_works):
        assert apart(told[name][0], expected) < 1e-10
    assert (
        apart(expected, trained(plain(), 2 * LANES, tt.Truncated(7))[0]) > 1e-4
    )  # another training than without


def test_ranks_weigh_by_their_valid_steps_where_fully_shard_counts_each_the_same() -> None:
    expected = by_updates(plain(), 2 * LANES)
    for told in found(few_works):
        assert apart(told["gaps"], expected) < 1e-12
        assert apart(told["mutant"], expected) > 1e-3


def test_between_updates_weights_gradients_and_optimizer_are_spread() -> None:
    for told in found(few_works):
        spread, kept, share = told["placed"]
        assert spread
        assert kept
        assert 0.4 < share < 0.6


def test_evaluation_of_spread_weights_is_that_of_one_process() -> None:
    expected = tt.evaluate(
        plain(), tt.Stream(recordings(LENGTHS, outputs=1), 2 * LANES, 10), LOSS
    ).loss
    for told in found(few_works):
        assert told["evaluated"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_spread_weights_resume_to_the_bit() -> None:
    for told in found(all_works):
        assert told["resumed"] == [True, True]


def test_a_precision_of_its_own_is_refused_with_the_line_to_write() -> None:
    for told in found(few_works):
        assert (
            "the net is sharded with MixedPrecisionPolicy(param_dtype=torch.bfloat16"
            in told["refused"]
        )
        assert "put the loop under torch.autocast(...)" in told["refused"]


@pytest.mark.slow
def test_the_example_stopped_and_resumed_on_two_ranks_gives_the_weights_of_one(
    tmp_path: Path,
) -> None:
    def launched(updates: int, ranks: int, checkpoint: Path) -> dict[str, Tensor]:
        command = [
            *torchrun(ranks),
            str(EXAMPLE),
            "--updates",
            str(updates),
            "--checkpoint",
            str(checkpoint),
        ]
        done = subprocess.run(
            command, env=LOOPBACK, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return torch.load(checkpoint)["net"]

    one, two = launched(50, 1, tmp_path / "one.pt"), launched(50, 2, tmp_path / "two.pt")
    assert apart(two, one) < 1e-6
    stopped = launched(23, 2, tmp_path / "stopped.pt")
    assert apart(stopped, two) > 1e-4
    assert apart(launched(50, 2, tmp_path / "stopped.pt"), two) == 0
