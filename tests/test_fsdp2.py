"""Weights spread over ranks by `fully_shard`: real processes give the weights of one process that
has them whole.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import subprocess
import warnings
from collections.abc import Iterator
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
from processes import LOOPBACK, in_processes, torchrun
from strategies import apart, recordings
from throughtime.carry import Carried
from throughtime.errors import ModelError

LENGTHS = (40, 25, 53, 8, 3, 29, 15)
LANES, COUNT = 2, 20
LOSS = nn.MSELoss()
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


def trained(net: Carried, lanes: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses after so many updates."""
    stream, losses = tt.Stream(recordings(LENGTHS, outputs=1), lanes, 10), list[float]()
    optimizer, policy = torch.optim.Adam(net.parameters(), 0.01), tt.Exact(cut_every=20, chunk=7)
    while len(losses) < COUNT:
        for update in tt.updates(net, stream, LOSS, gradient=policy):
            losses.append(update.loss.item())
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return whole(net), losses


def gaps() -> list[dict[str, Any]]:
    """Four recordings of one length with gaps: ranks have equal chunks, but other valid steps."""
    result = recordings((70, 70, 70, 70), outputs=1)
    for i, one in enumerate(result):
        one["targets"][: 10 * i] = np.nan
    return result


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


def works(rank: int, before: None) -> Iterator[tuple[str, Any]]:
    del rank, before
    quiet()
    yield "trained", trained(sharded(parts=True), LANES)
    yield (
        "evaluated",
        tt.evaluate(
            sharded(parts=True), tt.Stream(recordings(LENGTHS, outputs=1), LANES, 10), LOSS
        ).loss,
    )
    yield "gaps", by_updates(sharded(), LANES)
    yield "placed", placed()
    yield "refused", refused()
    yield "resumed", resumed(3)


@cache
def found() -> list[dict[str, Any]]:
    return in_processes(2, nothing_before, works)


def test_spread_weights_become_those_of_one_process() -> None:
    expected, losses = trained(plain(), 2 * LANES)
    for told in found():
        assert apart(told["trained"][0], expected) < 1e-10
        assert told["trained"][1] == pytest.approx(losses, rel=1e-8)


def test_ranks_weigh_by_their_valid_steps_where_fully_shard_counts_each_the_same() -> None:
    expected = by_updates(plain(), 2 * LANES)
    for told in found():
        assert apart(told["gaps"], expected) < 1e-12


def test_between_updates_weights_gradients_and_optimizer_are_spread() -> None:
    for told in found():
        spread, kept, share = told["placed"]
        assert spread
        assert kept
        assert 0.4 < share < 0.6


def test_evaluation_of_spread_weights_is_that_of_one_process() -> None:
    expected = tt.evaluate(
        plain(), tt.Stream(recordings(LENGTHS, outputs=1), 2 * LANES, 10), LOSS
    ).loss
    for told in found():
        assert told["evaluated"] == pytest.approx(expected, rel=1e-12)


def test_spread_weights_resume_to_the_bit() -> None:
    assert all(told["resumed"] for told in found())


def test_a_precision_of_its_own_is_refused_with_the_line_to_write() -> None:
    for told in found():
        assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16" in told["refused"]


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
