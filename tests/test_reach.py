"""Reach: norms of the credit of single losses, against one backward pass for each of them.

Shapes: `T` steps, `B` lanes, `H` numbers in the state.
"""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from quick import examples
from strategies import (
    HIDDEN,
    Row,
    inputs,
    named,
    seeds,
    some_nets,
    start,
)
from test_audit import stream_of, width
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.diagnose._slice import StreamSlice
from throughtime.errors import ConfigError, DataError, ModelError

reach: Any = import_module("throughtime.diagnose.reach")  # not the function of this name
CLOSE = 1e-9


class Anchor(NamedTuple):
    """A sampled loss: its lane, its step in the epoch, and the first step of its window."""

    lane: int
    step: int
    first: int


def record_anchors(patch: pytest.MonkeyPatch) -> list[Anchor]:
    """A list to which every anchor that `tt.reach` draws is added."""
    drawn: list[Anchor] = []
    read, draw, begin = StreamSlice.read, reach._draw, [0]

    def read_noted(section: StreamSlice, start: int, stop: int) -> Chunk:
        begin[0] = start
        return read(section, start, stop)

    def draw_noted(*args: Any) -> Any:
        anchors = draw(*args)
        drawn.extend(
            Anchor(lane, begin[0] + step, begin[0]) for lane, step, _ in anchors.T.tolist()
        )
        return anchors

    patch.setattr(StreamSlice, "read", read_noted)
    patch.setattr(reach, "_draw", draw_noted)
    return drawn


class Brute(NamedTuple):
    """For every lag: the mean norm of the state and of each leaf."""

    norms: dict[int, float]
    leaves: list[dict[int, float]]
    loss: float


def brute(net: Carried, chunk: Chunk, anchors: Sequence[Anchor]) -> Brute:
    """Step by step, and one backward pass for each anchor to every state before it."""
    state = tt.state.detach(start(net, chunk.inputs))
    entering: list[list[Tensor]] = []
    outputs: list[Tensor] = []
    for step in range(chunk.steps):
        state = tt.state.map_leaves(lambda leaf: leaf.clone().requires_grad_(), state)
        entering.append(tt.state.tensors(state))
        y, state = net(chunk.inputs[step : step + 1], state, chunk.resets[step : step + 1])
        outputs.append(y)
    by_lag: dict[int, list[list[float]]] = {}
    losses: list[float] = []
    for lane, step, first in anchors:
        assert chunk.targets is not None
        assert chunk.mask[step, lane]
        loss = nn.functional.mse_loss(outputs[step][0, lane], chunk.targets[step, lane])
        losses.append(loss.item())
        starts = chunk.resets[: step + 1, lane].nonzero().flatten().tolist()
        oldest = max(first, starts[-1] + 1 if starts else 0)
        for place in range(oldest, step + 1):
            parts = torch.autograd.grad(
                loss, entering[place], retain_graph=True, materialize_grads=True
            )
            by_lag.setdefault(step - place + 1, []).append(
                [part[lane].norm().item() for part in parts]
            )
    means = {
        lag: sum(math.hypot(*leaf) for leaf in rows) / len(rows) for lag, rows in by_lag.items()
    }
    leaves = [
        {lag: sum(row[i] for row in rows) / len(rows) for lag, rows in by_lag.items()}
        for i in range(len(entering[0]))
    ]
    return Brute(means, leaves, sum(losses) / len(losses))


@examples(6)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    lanes=st.sampled_from([1, 2, 3]),
    warm_up=st.sampled_from([0, 2]),
    max_lag=st.sampled_from([1, 5, 9, 100]),
    anchors=st.sampled_from([1, 4]),
    piece=st.sampled_from([1, 3, 50, None]),
    seed=seeds,
)
@some_nets("lstm", "namedtuple-state", "learnt-start")
def test_norms_are_those_of_one_backward_pass_per_loss(
    row: Row,
    lengths: list[int],
    lanes: int,
    warm_up: int,
    max_lag: int,
    anchors: int,
    piece: int | None,
    seed: int,
) -> None:
    """Of the whole state and of every leaf, whatever the pieces.

    Credit ends at the start of a recording.
    """
    net = row.net()
    source = stream_of(lengths, lanes, warm_up, width(net))
    assume(bool(source.read(0, source.steps).mask.any()))
    with pytest.MonkeyPatch.context() as patch:
        chosen = record_anchors(patch)
        try:
            result = tt.reach(
                net, source, nn.MSELoss(), max_lag=max_lag, anchors=anchors, chunk=piece, seed=seed
            )
        except DataError:
            assert all(
                bool(source.read(a.step, a.step + 1).resets[0, a.lane]) for a in chosen
            )  # nothing to look back on
            assume(False)
            raise
    assert result.anchors == len(chosen)
    assert result.lags == tuple(range(1, len(result.lags) + 1))
    expected = brute(net, source.read(0, source.steps), chosen)
    assert result.norms == pytest.approx(
        [expected.norms[lag] for lag in result.lags], rel=CLOSE, abs=1e-12
    )
    assert list(result.lags) == sorted(expected.norms)[: len(result.lags)]
    assert len(result.by_leaf) == len(expected.leaves)
    for norms, leaf in zip(result.by_leaf.values(), expected.leaves, strict=True):
        assert norms == pytest.approx([leaf[lag] for lag in result.lags], rel=CLOSE, abs=1e-12)
    assert result.loss == pytest.approx(expected.loss, rel=CLOSE)


def test_contexts_start_from_the_initial_state_so_many_steps_before_the_loss() -> None:
    net, source = named("hides-layer").net(), stream_of([120, 101], 2)
    with pytest.MonkeyPatch.context() as patch:
        chosen = record_anchors(patch)
        result = tt.reach(net, source, nn.MSELoss(), max_lag=20, anchors=6)
    whole = source.read(0, source.steps)
    assert whole.targets is not None
    for steps, loss in result.contexts.items():
        losses: list[float] = []
        for lane, step, _ in chosen:
            rows = slice(step - steps + 1, step + 1)
            y, _ = net(
                whole.inputs[rows, lane : lane + 1],
                net.initial_state(1),
                whole.resets[rows, lane : lane + 1],
            )
            losses.append(nn.functional.mse_loss(y[-1, 0], whole.targets[step, lane]).item())
        assert loss == pytest.approx(sum(losses) / len(losses), rel=CLOSE)
    assert list(result.contexts) == [1, 2, 4, 8, 16]


def of_valid_pairs(outputs: Tensor, chunk: Chunk) -> Tensor:
    return nn.functional.mse_loss(*chunk.valid_pairs(outputs))


def contrast(outputs: Tensor, _: Chunk) -> Tensor:
    """A sum over steps, but each lane depends on the others."""
    return (outputs - outputs.mean(1, keepdim=True)).square().mean()


def test_what_cannot_be_looked_at_is_refused() -> None:
    net, apart = named("hides-layer").net(), tt.SequenceLoss(contrast, additive=True)
    refused: list[tuple[type[Exception], dict[str, Any]]] = [
        (ConfigError, {"max_lag": 0}),
        (ConfigError, {"anchors": 0}),
        (DataError, {"stream": stream_of([1] * 30, 2)}),  # nothing to look back on
        (DataError, {"stream": tt.Stream({"inputs": inputs(9, 1)[:, 0]}, 1, 4)}),  # no targets
        (ConfigError, {"loss_fn": tt.SequenceLoss(of_valid_pairs)}),
        (ModelError, {"stream": stream_of([40, 41], 2), "loss_fn": apart}),
    ]
    for kind, options in refused:
        given: dict[str, Any] = {"stream": stream_of([20]), "loss_fn": nn.MSELoss()} | options
        with pytest.raises(kind):
            tt.reach(net, **given)


def test_an_additive_loss_over_sequences_is_that_of_its_steps() -> None:
    """As the same mean of rows."""
    net, source = named("lstm").net(), stream_of([40, 40, 40], 3, outputs=HIDDEN)
    loss_fn = tt.SequenceLoss(of_valid_pairs, over="recording", additive=True)
    ours, theirs = (
        tt.reach(net, source, fn, max_lag=20, anchors=9, chunk=7) for fn in (loss_fn, nn.MSELoss())
    )
    assert ours.norms == pytest.approx(theirs.norms, rel=CLOSE)
    assert ours.contexts == pytest.approx(theirs.contexts, rel=CLOSE)
    assert ours.loss == pytest.approx(theirs.loss, rel=CLOSE)
