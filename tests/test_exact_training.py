"""Exact gradients of nets as people train them: drawing random numbers, changing buffers, under
autocast, with hooks and scalers.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import math
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, allocated
from quick import examples
from strategies import (
    FEATURES,
    HIDDEN,
    HidesLayer,
    Rotation,
    TensorState,
    Weights,
    apart,
    gradients,
    in_chunks,
    inputs,
    lawless,
    named,
    recordings,
    remembering,
    start,
    states_apart,
)
from throughtime import _device
from throughtime.carry import Carried
from throughtime.chunk import Chunk, join
from throughtime.errors import ModelError
from throughtime.gradient import Objective, Update, Window, executor, segment
from throughtime.gradient.executor import Executor, StepReader
from throughtime.gradient.segment import MOST_BYTES, TRIAL_STEPS, automatic_chunk, graph_bytes
from throughtime.stream._queue import ChunkQueue
from throughtime.stream.recording import StepArrays

EXACT = 1e-10


class DropsInside(nn.Module):
    """Dropout before, between and after its layers: the state depends on what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Dropout(0.2)
        self.lstm = nn.LSTM(FEATURES, HIDDEN, num_layers=2, dropout=0.5)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.before(x))
        return self.head(nn.functional.dropout(hidden, 0.3, self.training))


class NoisyState(Rotation):
    """Noise on the state at every step, from torch's generator."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.play(x + 0.3 * torch.randn_like(x), self.zeros(x) if state is None else state)


class Normalised(nn.Module):
    """Normalises what enters by the statistics of the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.gru = nn.GRU(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.gru(self.norm(x.flatten(0, 1)).view_as(x))
        return self.head(hidden)


class Spectral(nn.Module):
    """Every forward pass makes a step of power iteration: it changes a buffer and the outputs."""

    def __init__(self) -> None:
        super().__init__()
        into = nn.Linear(FEATURES, FEATURES)
        with torch.no_grad():
            into.weight.copy_(torch.diag(torch.tensor([1.0, 0.99, 0.98])))  # slow to converge
        self.into = nn.utils.parametrizations.spectral_norm(into)
        self.rnn = nn.RNN(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.into(x))
        return self.head(hidden)


class Counted(Rotation):
    """Each forward pass reads and changes a buffer: what enters grows from chunk to chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self.training:
            self.calls += 1
        return self.play(x * self.calls.clone(), self.zeros(x) if state is None else state)


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "dropout between layers": DropsInside,
    "dropout on outputs": lambda: HidesLayer(dropout=0.4),
    "noise on the state": NoisyState,
    "batch norm": Normalised,
    "spectral norm": Spectral,
    "counter in a buffer": Counted,
}


def changing(name: str, dtype: torch.dtype = torch.float64) -> Carried:
    torch.manual_seed(3)
    net = tt.carry(remembering(CHANGING[name]()).to(dtype)).train()
    return lawless(net, inputs(3, 2).to(dtype))


@dataclass(frozen=True)
class After:
    """What an update leaves behind: gradient, loss, buffers, and the generators in use."""

    gradient: Weights
    loss: float
    buffers: Weights
    generator: Tensor

    @classmethod
    def of(cls, net: Carried, loss: Tensor) -> "After":
        return cls(
            gradients(net),
            loss.item(),
            {name: b.detach().double().clone() for name, b in net.named_buffers()},
            torch.cat([*_device.generators(loss.device).values()]),
        )

    def equals(self, other: "After") -> dict[str, bool]:
        return {
            "gradient": (
                apart(self.gradient, other.gradient) < EXACT and abs(self.loss - other.loss) < EXACT
            ),
            "buffers": all(
                torch.equal(self.buffers[name], other.buffers[name]) for name in self.buffers
            ),
            "generator": torch.equal(self.generator, other.generator),
        }


ALL = {"gradient": True, "buffers": True, "generator": True}


def updated(net: Carried, data: PolicyData, policy: tt.Exact, seed: int = 11) -> After:
    torch.manual_seed(seed)
    (update,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=policy)
    return After.of(net, update.loss)


def held(net: Carried, data: PolicyData, chunk: int, seed: int = 11) -> After:
    """The oracle: the same chunks, one after another, in one graph that is held."""
    torch.manual_seed(seed)
    y, _ = in_chunks(net, data.x, [chunk] * (len(data.x) // chunk), resets=data.resets)
    loss = nn.functional.mse_loss(y[data.mask], data.targets[data.mask])
    loss.backward()
    return After.of(net, loss)


@examples(10)
@given(
    chunk=st.sampled_from([2, 3, 7, 30]),
    lanes=st.sampled_from([2, 3]),  # of one value batch norm has no statistics
    resets=st.sampled_from([0.0, 0.05]),
    masked=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 100),
)
@pytest.mark.parametrize("name", list(CHANGING))
def test_what_is_drawn_or_changed_is_so_once(
    name: str, chunk: int, lanes: int, resets: float, masked: float, seed: int
) -> None:
    """Gradient, loss, buffers and later random numbers equal those of one forward pass."""
    data = together(PolicyData.draw(29, lanes, seed, resets, masked))
    results = updated(changing(name), data, tt.Exact(chunk=chunk), seed)
    assert results.equals(held(changing(name), data, chunk, seed)) == ALL


def together(data: PolicyData) -> PolicyData:
    """Without resets that fall into every lane at once: one update."""
    resets = data.resets & ~data.resets.all(dim=1, keepdim=True)
    return PolicyData(data.x, data.targets, resets, data.mask)


@contextmanager
def unprotected(*_: Any) -> Generator[None]:
    yield


@pytest.mark.parametrize("name", list(CHANGING))
def test_measuring_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PolicyData.draw(29, 2, 0)
    expected = held(changing(name), data, 29)
    assert updated(changing(name), data, tt.Exact()).equals(expected) == ALL
    if name == "dropout on outputs":
        monkeypatch.setattr(
            segment, "preserve_rng_and_buffers", unprotected
        )  # the mutant: trials that draw from the training's numbers
        assert updated(changing(name), data, tt.Exact()).equals(expected) != ALL


@pytest.mark.parametrize("name", [name for name in CHANGING if name != "noise on the state"])
def test_nets_in_evaluation_draw_and_change_nothing(name: str) -> None:
    net, data = changing(name), PolicyData.draw(29, 2, 0, resets=0.05)
    held(net, data, 29)
    before = After.of(net.eval(), torch.zeros(()))
    net.zero_grad()
    results = updated(net, data, tt.Exact(chunk=5))
    net.zero_grad()
    assert results.equals(held(net, data, 29)) == ALL
    assert all(torch.equal(results.buffers[b], before.buffers[b]) for b in before.buffers)


class Restless(Rotation):
    """It has an initial state of its own: a trial would notice the size."""

    def initial_state(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, HIDDEN, dtype=self.turn.dtype)

    def size(self) -> float:
        raise NotImplementedError

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.play(x * self.size(), state)


class PythonRandom(Restless):
    def size(self) -> float:
        return random.uniform(0.5, 1.5)


class NumpyRandom(Restless):
    def size(self) -> float:
        return np.random.default_rng().uniform(0.5, 1.5)


class CountsCalls(Restless):
    """Counts in an object of another class: what a module itself holds is put back after a call."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = SimpleNamespace(calls=0)

    def size(self) -> float:
        self.counter.calls += 1
        return self.counter.calls


class WarmsUp(Restless):
    """Another function on its first call, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(warm=False)

    def size(self) -> float:
        warm, self.kept.warm = self.kept.warm, True
        return 1.0 if warm else 2.0


UNREPEATABLE = pytest.mark.parametrize("make", [PythonRandom, NumpyRandom, CountsCalls])


def judged(make: Callable[[], nn.Module], policy: tt.Exact) -> list[Update]:
    data = PolicyData.draw(23, 2, 0)
    net = lawless(tt.carry(make().double()), data.chunk.inputs)
    return list(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=policy))


NOT_REPEATED = "the forward pass does not repeat: run again, steps {} differ in"


@UNREPEATABLE
def test_module_that_does_not_repeat_is_refused_with_what_to_do(
    make: Callable[[], nn.Module],
) -> None:
    advice = "draw them from torch.*keep it in the state or in a buffer"
    with pytest.raises(ModelError, match=rf"{NOT_REPEATED.format('15 to 19')} .*{advice}"):
        judged(make, tt.Exact(chunk=5))


@UNREPEATABLE
def test_module_that_does_not_repeat_passes_where_nothing_is_run_again(
    make: Callable[[], nn.Module],
) -> None:
    assert len(judged(make, tt.Exact(chunk=23))) == 1


class RestlessReadout(HidesLayer):
    """Its state repeats, its outputs do not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.uniform(0.5, 1.5)


class RestlessMemory(Restless):
    """Its outputs repeat, one leaf of its state does not."""

    def initial_state(self, lanes: int) -> Any:
        return {"h": super().initial_state(lanes), "mood": torch.zeros(lanes, 1)}

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, h = self.play(x, state["h"])
        return y, {"h": h, "mood": torch.full_like(state["mood"], random.random())}


class RestlessPart(Restless):
    """Its outputs or a small leaf of its state do not repeat, a large leaf does."""

    def __init__(self, *, state: bool) -> None:
        super().__init__()
        self.state = state

    def initial_state(self, lanes: int) -> Any:
        h = torch.zeros(lanes, HIDDEN)
        return {"h": h, "mood": torch.zeros(lanes, 1), "large": torch.ones(lanes, 5000)}

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, h = self.play(x, state["h"])
        moods = (random.uniform(0.5, 1.5), 0.0) if not self.state else (1.0, random.random())
        mood = torch.full_like(state["mood"], moods[1])
        return y * moods[0], {"h": h, "mood": mood, "large": state["large"].clone()}


class WarmsUpReadout(HidesLayer):
    """Other outputs on its first call, and only then."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = SimpleNamespace(warm=False)

    def forward(self, x: Tensor) -> Tensor:
        warm, self.kept.warm = self.kept.warm, True
        return super().forward(x) * (1.0 if warm else 2.0)


@pytest.mark.parametrize(
    ("make", "part"), [(RestlessReadout, "the loss"), (RestlessMemory, "leaf 1 of the state")]
)
def test_losses_and_states_are_compared(make: Callable[[], nn.Module], part: str) -> None:
    random.seed(0)  # two numbers that happen to be close count as equal
    reason = NOT_REPEATED.format("15 to 19") + f" {part}"
    with pytest.raises(ModelError, match=reason):
        judged(make, tt.Exact(chunk=5))


@pytest.mark.parametrize("state", [False, True], ids=["outputs", "state"])
def test_a_large_state_hides_no_difference(state: bool) -> None:
    """In single precision, rounding may change the sum of a large leaf by more than that."""
    random.seed(0)
    data = PolicyData.draw(23, 64, 0)
    chunk = Chunk.from_tensors(data.x.float(), data.targets.float())
    net = lawless(tt.carry(RestlessPart(state=state)), chunk.inputs)
    with pytest.raises(ModelError, match="the forward pass does not repeat"):
        list(tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5)))


@pytest.mark.parametrize("make", [WarmsUp, WarmsUpReadout])
@pytest.mark.parametrize(("chunk", "steps"), [(5, "0 to 4"), (12, "0 to 11")])
def test_every_segment_is_compared(make: Callable[[], nn.Module], chunk: int, steps: str) -> None:
    with pytest.raises(ModelError, match=NOT_REPEATED.format(steps)):
        judged(make, tt.Exact(chunk=chunk))


def test_sound_modules_pass_every_comparison() -> None:
    for make in (TensorState, HidesLayer, NoisyState):
        assert len(judged(make, tt.Exact(chunk=5))) == 1


def test_refusal_leaves_gradients_alone() -> None:
    data = PolicyData.draw(23, 2, 0)
    net = lawless(tt.carry(CountsCalls().double()), data.chunk.inputs)
    with pytest.raises(ModelError, match="does not repeat"):
        next(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5)))
    assert all(p.grad is None for p in net.parameters())


class Grows(Restless):
    """One leaf of its state is all that it has read."""

    def initial_state(self, lanes: int) -> Any:
        return {"h": super().initial_state(lanes), "read": torch.zeros(lanes, 0).double()}

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        read = torch.cat([state["read"], x[:, :, 0].T], dim=1)
        y, h = self.play(x, state["h"])
        return y + read.mean(), {"h": h, "read": read}


class Widens(Restless):
    """One leaf of its state begins in single precision."""

    def initial_state(self, lanes: int) -> Any:
        return {"h": super().initial_state(lanes), "sum": torch.zeros(lanes, 1)}

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, h = self.play(x, state["h"])
        return y, {"h": h, "sum": state["sum"].double() + x[:, :, :1].sum(0)}


def loss_of(net: Carried, chunk: Chunk, *, roll: bool) -> None:
    """The gradient of the net's own outputs, or of those of a rollout, in the same calls."""
    state, outputs = net.initial_state(chunk.lanes, like=chunk.inputs), list[Tensor]()
    if roll:
        outputs = [tt.rollout(net, chunk.inputs, chunk=5)[0]]
    else:
        for x in chunk.inputs.split(5):
            y, state = net(x, state)
            outputs.append(y)
    assert chunk.targets is not None
    nn.functional.mse_loss(torch.cat(outputs), chunk.targets).backward()


@pytest.mark.parametrize("make", [Grows, Widens])
def test_states_that_change_their_form_are_carried_between_segments(
    make: Callable[[], nn.Module],
) -> None:
    data, results = PolicyData.draw(23, 2, 0), list[Weights]()
    for kind in ("plain", "exact", "rollout"):
        torch.manual_seed(5)
        net = lawless(tt.carry(make().double()), data.x)
        if kind == "exact":
            list(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5)))
        else:
            loss_of(net, data.chunk, roll=kind == "rollout")
        results.append(gradients(net))
    assert all(apart(result, results[0]) < EXACT for result in results[1:])


@dataclass
class Drifting:
    """A recording that reads differently each time."""

    name: str = "drifting"

    def __len__(self) -> int:
        return 40

    def read(self, start: int, stop: int) -> StepArrays:
        return StepArrays(
            np.random.default_rng().normal(size=(stop - start, FEATURES)),
            np.zeros((stop - start, 2)),
        )


def test_data_that_read_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read again where they are too many to be kept."""
    monkeypatch.setattr(executor, "KEPT_LANE_STEPS", 8)
    with pytest.raises(ModelError, match=r"does not repeat.*data that read differently"):
        next(
            tt.updates(
                tt.carry(TensorState().double()),
                tt.Stream(Drifting(), 1, 8),
                nn.MSELoss(),
                gradient=tt.Exact(chunk=8),
            )
        )


def held_in_autocast(net: Carried, data: PolicyData, chunk: int) -> tuple[Weights, Any]:
    """Forward pass and losses under autocast, each chunk with casts of its own.

    The backward pass outside, as torch recommends.
    """
    torch.manual_seed(11)
    state, losses = start(net, data.x), list[Tensor]()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for x, resets, targets, mask in zip(
            *(part.split(chunk) for part in (data.x, data.resets, data.targets, data.mask)),
            strict=True,
        ):
            torch.clear_autocast_cache()
            y, state = net(x, state, resets)
            losses.append(
                nn.functional.mse_loss(y[mask], targets[mask])
                * (int(mask.sum()) / int(data.mask.sum()))
            )
    torch.stack(losses).sum().backward()
    return gradients(net), state


def in_autocast(
    net: Carried, data: PolicyData, dtype: torch.dtype | None = torch.bfloat16
) -> tuple[Weights, Update]:
    torch.manual_seed(11)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        (update,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    return gradients(net), update


@pytest.mark.parametrize(
    "name", ["dropout on outputs", "noise on the state", "batch norm", "spectral norm"]
)
def test_autocast_gradient_is_that_of_chunks_held_in_the_same_autocast(name: str) -> None:
    data = together(PolicyData.draw(29, 2, 0, 0.05, 0.3))
    data = PolicyData(data.x.float(), data.targets.float(), data.resets, data.mask)
    expected, state = held_in_autocast(changing(name, torch.float32), data, 5)
    results, update = in_autocast(changing(name, torch.float32), data)
    assert apart(results, expected) < 1e-7
    assert states_apart(update.state, state) == 0
    assert {leaf.dtype for leaf in tt.state.tensors(update.state)} == {torch.float32}
    assert update.outputs.dtype == torch.bfloat16
    assert (
        apart(in_autocast(changing(name, torch.float32), data, None)[0], expected) > 1e-4
    )  # the same without autocast


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
