"""Weights spread over ranks by `fully_shard`: real processes give the weights of one process that
has them whole.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import throughtime as tt
from plain_loop import plain_loop
from processes import example, in_processes
from strategies import apart, recordings
from throughtime.carry import Carried
from throughtime.errors import ModelError
from throughtime.gradient import Policy

LENGTHS = (40, 25, 53, 8, 3, 29, 15)
LANES, COUNT = 2, 12
LOSS = nn.MSELoss()
SEGMENTS, GAPS = tt.Exact(cut_every=20, chunk=7), tt.Truncated(7)
RESUMED = tt.Truncated(3, 8)
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


def stream_of(lanes: int = LANES, data: list[dict[str, Any]] | None = None) -> tt.Stream:
    return tt.Stream(data or recordings(LENGTHS, outputs=1), lanes, 10)


def trained(
    net: Carried,
    lanes: int = LANES,
    policy: Policy = SEGMENTS,
    data: list[dict[str, Any]] | None = None,
    stop: int | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses after so many updates; after `stop` of them with a new stream."""
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    resume = (stop, lambda: stream_of(lanes, data)) if stop else None
    options: dict[str, Any] = {"stop": COUNT, "clip": 0.3, "resume": resume}
    records = plain_loop(net, stream_of(lanes, data), optimizer, policy, **options)
    return whole(net), [loss for loss, _ in records]


def gaps() -> list[dict[str, Any]]:
    """Four recordings of one length with gaps: ranks have equal chunks, but other valid steps."""
    result = recordings((70, 70, 70, 70), outputs=1)
    for i, one in enumerate(result):
        one["targets"][: 10 * i] = np.nan
    return result


def refused() -> str:
    net = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    try:
        tt.updates(net, stream_of(), LOSS, gradient=GAPS)
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
    yield "trained", trained(sharded(parts=True))
    yield "evaluated", tt.evaluate(sharded(parts=True), stream_of(), LOSS).loss
    yield "gaps", trained(sharded(), policy=GAPS, data=gaps())
    yield "refused", refused()
    yield "whole", trained(sharded(), policy=RESUMED)
    yield "resumed", trained(sharded(), policy=RESUMED, stop=3)


@cache
def found() -> list[dict[str, Any]]:
    return in_processes(2, nothing_before, works)


def test_spread_weights_become_those_of_one_process() -> None:
    expected, losses = trained(plain(), 2 * LANES)
    for told in found():
        assert apart(told["trained"][0], expected) < 1e-10
        assert told["trained"][1] == pytest.approx(losses, rel=1e-8)


def test_ranks_weigh_by_their_valid_steps_where_fully_shard_counts_each_the_same() -> None:
    expected, _ = trained(plain(), 2 * LANES, GAPS, gaps())
    for told in found():
        assert apart(told["gaps"][0], expected) < 1e-12


def test_evaluation_of_spread_weights_is_that_of_one_process() -> None:
    expected = tt.evaluate(plain(), stream_of(2 * LANES), LOSS).loss
    for told in found():
        assert told["evaluated"] == pytest.approx(expected, rel=1e-12)


def test_spread_weights_resume_to_the_bit() -> None:
    assert all(apart(told["resumed"][0], told["whole"][0]) == 0 for told in found())


def test_a_precision_of_its_own_is_refused_with_the_line_to_write() -> None:
    for told in found():
        assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16" in told["refused"]


@pytest.mark.slow
def test_the_example_stopped_and_resumed_on_two_ranks_gives_the_weights_of_one(
    tmp_path: Path,
) -> None:
    def launched(updates: int, ranks: int, checkpoint: Path) -> dict[str, Tensor]:
        example(EXAMPLE, ranks, "--updates", str(updates), "--checkpoint", checkpoint)
        return torch.load(checkpoint)["net"]

    one, two = launched(50, 1, tmp_path / "one.pt"), launched(50, 2, tmp_path / "two.pt")
    assert apart(two, one) < 1e-6
    stopped = launched(23, 2, tmp_path / "stopped.pt")
    assert apart(stopped, two) > 1e-4
    assert apart(launched(50, 2, tmp_path / "stopped.pt"), two) == 0
