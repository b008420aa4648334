"""The length of segments, and the memory that their graphs and their steps take.

Shapes: `T` steps, `B` lanes.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import allocated
from quick import examples
from strategies import Rotation, inputs, named, recordings
from throughtime.carry import Carried
from throughtime.chunk import Chunk, join
from throughtime.gradient import Objective, Window, executor, segment
from throughtime.gradient.executor import Executor, StepReader
from throughtime.gradient.segment import MOST_BYTES, TRIAL_STEPS, automatic_chunk, graph_bytes
from throughtime.stream._queue import ChunkQueue


@given(steps=st.integers(1, 10**8), size=st.floats(1, 1e9))
def test_automatic_length(steps: int, size: float) -> None:
    """A thousand steps or more, in even segments whose graphs fit."""
    length = automatic_chunk(steps, size)
    assert length == 1 or length * size <= MOST_BYTES
    count = math.ceil(steps / length)
    assert length == 1 or math.ceil(steps / (length - 1)) > count  # no shorter ones are as many
    fitting = max(1, int(MOST_BYTES / size))
    assert count <= math.ceil(steps / min(max(1000, math.isqrt(steps)), fitting))


def test_length_is_that_of_the_policy_or_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "graph_bytes", lambda *_: 1e5)
    source = tt.Stream(recordings([50], outputs=4), 1, 8)
    source._start()
    run = Executor(named("lstm").net(), source, Objective(nn.MSELoss()), tt.Exact())
    window = Window(0, 0, 0, 10**8, 10**8)
    assert run._length(window._replace(chunk="auto")) == automatic_chunk(10**8, 1e5) > 1000
    assert run._length(window._replace(chunk=3)) == 3


def big(make: Callable[[], nn.Module], steps: int, lanes: int = 4) -> tuple[Carried, Chunk]:
    """A net whose activations outweigh what Python and torch need, in float32."""
    net, x = tt.carry(make()), inputs(steps, lanes).float()
    with torch.no_grad():
        y, _ = net(x, net.initial_state(lanes, like=x))
    return net, Chunk.from_tensors(x, torch.zeros_like(y))


class Turning(Rotation):
    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.play(x, self.zeros(x) if state is None else state)


MEASURED: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 32),
    "lstm of two layers": lambda: nn.LSTM(3, 32, num_layers=2),
    "gru": lambda: nn.GRU(3, 32),
    "cell": lambda: nn.LSTMCell(3, 32),
    "chain": lambda: nn.Sequential(
        nn.LSTM(3, 32), nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 5)
    ),
    "more weights than activations": lambda: nn.Sequential(nn.RNN(3, 200), nn.Linear(200, 2)),
    "many outputs": lambda: nn.Sequential(nn.LSTM(3, 8), nn.Linear(8, 500)),
    "rotation": Turning,
}


def graph(net: Carried, chunk: Chunk) -> Callable[[], object]:
    """What builds the graph of a chunk's loss."""

    def run() -> object:
        y, state = net(chunk.inputs, net.initial_state(chunk.lanes, like=chunk.inputs))
        assert chunk.targets is not None
        return nn.functional.mse_loss(y, chunk.targets), y, state

    return run


@pytest.mark.parametrize("make", list(MEASURED.values()), ids=list(MEASURED))
def test_bytes_counted_are_those_that_a_graph_grows_by(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, chunk = big(make, 400)
    few = chunk[:TRIAL_STEPS]
    monkeypatch.setattr(segment, "NODE_BYTES", 0)  # tensors alone
    counted = graph_bytes(net, few, graph(net, few))
    kept = [allocated(graph(net, chunk[:steps])).kept for steps in (200, 400)]
    growth = (kept[1] - kept[0]) / 200
    assert growth / 2 < counted < growth * 2


@pytest.mark.parametrize(("outputs", "most", "times"), [(2, 1e6, 2), (500, 1e6, 4), (500, 4e6, 4)])
def test_peak_stays_near_the_memory_of_one_segment(
    outputs: int, most: float, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides the graph: the gradients of activations, and the outputs of two other segments."""
    net, chunk = big(lambda: nn.Sequential(nn.LSTM(3, 32), nn.Linear(32, outputs)), 1000)

    def peak(most: float) -> int:
        monkeypatch.setattr(segment, "MOST_BYTES", most)

        def update() -> None:
            list(tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact()))

        update()  # gradients, and whatever torch sets up once
        return allocated(update).most

    assert most / 2 < peak(most) < times * most
    assert peak(1e9) > times * most  # the mutant: one graph of all steps


def test_a_trial_is_made_once() -> None:
    net = named("lstm").net()
    stream = tt.Stream(recordings([40, 30, 50], outputs=4), 1, 8)
    net.prepare(torch.zeros(1, 1, 3, dtype=torch.float64))
    calls = list[int]()
    net.module.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    assert len(list(tt.updates(net, stream, nn.MSELoss(), gradient=tt.Exact()))) == 3
    assert sorted(calls) == sorted([TRIAL_STEPS, 30, 40, 50])


@examples(20)
@given(
    chunk=st.sampled_from([1, 5, 8, 30]),
    lanes=st.sampled_from([1, 3]),
    kept=st.sampled_from([1, 30, 100]),
    once=st.booleans(),
)
def test_steps_are_taken_once_and_forgotten_where_they_can_be_read_again(
    chunk: int, lanes: int, kept: int, once: bool
) -> None:
    """Forward and then back, segment by segment; of an iterator all steps are kept."""
    stream, again = (tt.Stream(recordings([90, 80, 75]), lanes, 8) for _ in range(2))
    whole = join(list(again))
    source = ChunkQueue(iter(stream)) if once else stream
    stream._start()
    reader, held = StepReader(source, 0), list[int]()
    bounds = [*pairwise([*range(0, whole.steps, chunk), whole.steps])]
    with mock.patch.object(executor, "KEPT_LANE_STEPS", kept):
        for start, stop in (*bounds, *reversed(bounds)):
            part = reader.read(start, stop)
            assert torch.equal(part.inputs, whole.inputs[start:stop])
            assert torch.equal(part.resets, whole.resets[start:stop])
            held.append(sum(part.steps for part in reader._chunks))
            if len(held) <= len(bounds):
                assert source.position == stop
                reader.forget()
    assert max(held) <= kept // lanes + 2 * chunk or once
    assert max(held) == whole.steps or not once
