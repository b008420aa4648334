"""What is particular to exact gradients: their segments run again, their memory and their settings.

That they equal plain autograd is tested by test_random_updates.py and test_policies.py.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import math
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
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
from policy_data import (
    CreditRecorder,
    PolicyData,
    UpdateGrads,
    allocated,
    deviation,
    exact_updates,
    plain,
    policy_gradients,
)
from quick import examples
from strategies import (
    FEATURES,
    HIDDEN,
    HidesLayer,
    Rotation,
    Row,
    TensorState,
    Weights,
    apart,
    few_short_recordings,
    gradients,
    in_chunks,
    inputs,
    lawless,
    named,
    recordings,
    remembering,
    some_nets,
    start,
    states_apart,
)
from throughtime import _device
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, ModelError
from throughtime.gradient import Update, executor, segment
from throughtime.gradient.segment import MOST_BYTES, TRIAL_STEPS, automatic_chunk, graph_bytes
from throughtime.stream.recording import StepArrays

EXACT = 1e-10
chunks = st.sampled_from([1, 2, 3, 7, 13, 29, 50, None])  # None: automatic
kept_lane_steps = st.sampled_from([1, 10, 100, 10_000])  # those before are read again


class EmptyLeaf(Rotation):
    """One leaf of its state has no entries, as a buffer of zero delays has."""

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        state = (
            {"h": self.zeros(x), "delays": x.new_zeros(x.shape[1], 0)} if state is None else state
        )
        y, h = self.play(x, state["h"])
        return y, {"h": h, "delays": state["delays"]}


def test_leaves_without_entries_are_carried() -> None:
    net, data = tt.carry(EmptyLeaf().double()), PolicyData.draw(29, 2, 0)
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=7))
    assert deviation(results, plain(net, data)) < EXACT


def test_update_says_what_was_run() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(23, 2, 0, masked=0.3)
    (update,) = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=5))
    y, end = net(data.x, start(net, data.x), data.resets)
    assert (update.steps, update.chunk.steps, update.chunk.valid_steps) == (
        int(data.mask.sum()),
        3,
        int(data.mask[20:].sum()),
    )
    assert (update.outputs - y[20:]).abs().max() < EXACT
    assert not update.outputs.requires_grad
    assert not update.loss.requires_grad
    assert update.weight == update.steps
    assert states_apart(update.state, end) < EXACT
    whole = next(iter(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=500))))
    assert whole.outputs.shape == y.shape


def test_chunk_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic one, which depends on the memory of a step, does not."""
    net = named("hides-layer").net()
    data = PolicyData.draw(97, 1, 5, masked=0.2)
    ((_, _, expected),) = plain(net, data)
    calls, lengths = list[int](), set[int]()
    net.module.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    for most in (1, 30_000, 100_000, 10**9):
        monkeypatch.setattr(segment, "MOST_BYTES", most)
        exact_updates(net, data, tt.Exact())
        lengths.add(calls[-1])  # the first segment runs again last
        assert apart(gradients(net), expected) < EXACT
        net.zero_grad()
    assert len(lengths) == 4
    assert {1, 97} < lengths


@examples(15)
@given(
    lengths=few_short_recordings,
    reads=st.lists(st.sampled_from([1, 3, 7, 500]), min_size=2, max_size=2, unique=True),
    chunk=chunks,
    lanes=st.sampled_from([1, 2]),
    kept=kept_lane_steps,
)
@some_nets("hides-layer", "learnt-start")
def test_chunk_of_the_stream_changes_no_bit(
    row: Row, lengths: list[int], reads: list[int], chunk: int | None, lanes: int, kept: int
) -> None:
    lanes, policy, net = min(lanes, sum(lengths)), tt.Exact(chunk=chunk), row.net()
    results = list[UpdateGrads]()
    for read, most in zip(reads, (kept, 10_000), strict=True):
        stream = tt.Stream(recordings(lengths), lanes, read, warm_up=1)
        with mock.patch.object(executor, "KEPT_LANE_STEPS", most):
            results.append(policy_gradients(net, stream, policy))
    first, second = results
    assert deviation(first, second) == 0
    queue = list(tt.Stream(recordings(lengths), lanes, reads[0], warm_up=1))
    assert deviation(policy_gradients(net, queue, policy), first) < EXACT


def test_settings_are_described() -> None:
    assert (
        tt.Exact().describe()
        == "an update for every recording (with several lanes, where all of them start one),"
        " gradients flow back through all of it"
    )
    assert (
        tt.Exact(cut_every=500).describe()
        == "an update every 500 steps, gradients cut there: they flow back at most 500 steps"
    )


def test_clipping_under_a_scaler_is_that_without_one() -> None:
    data, policy = PolicyData.draw(23, 2, 0), tt.Exact(chunk=4, clip_adjoint=0.005)
    usual, scaled = named("hides-layer").net(), named("hides-layer").net()
    plain, recorder = CreditRecorder(policy), CreditRecorder(policy)
    exact_updates(usual, data, plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    exact_updates(scaled, data, recorder, scaler=scaler)
    for step, norms in plain.arriving.items():
        assert torch.allclose(recorder.arriving[step], norms, rtol=1e-9)
    assert any((norms > 0.005).any() for norms in plain.arriving.values())
    grads = {name: g / 2.0**7 for name, g in gradients(scaled).items()}
    assert apart(grads, gradients(usual)) < EXACT


def labelled(steps: int, lanes: int, seed: int, masked: float) -> PolicyData:
    data = PolicyData.draw(steps, lanes, seed, masked=masked)
    return PolicyData(data.x, (data.targets[:, :, 0] > 0.6).long(), data.resets, data.mask)


def test_class_of_no_weight_does_not_count() -> None:
    """Some segments have no other class, so no mean of their own."""
    net, data = named("hides-layer").net(), labelled(29, 1, 0, 0.0)
    loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert any(not part.any() for part in data.targets.split(3))
    results = policy_gradients(net, [data.chunk], tt.Exact(chunk=3), loss_fn)
    assert deviation(results, plain(net, data, loss_fn=loss_fn)) < EXACT


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"chunk": 0}, "chunk=0: expected a whole number of at least 1"),
        ({"chunk": 10.0}, r"chunk=10\.0: expected a whole number"),
        ({"chunk": "all"}, "chunk='all': expected a whole number"),
        ({"cut_every": 0}, "cut_every=0: expected a whole number of at least 1"),
        ({"cut_every": True}, "cut_every=True: expected a whole number"),
        ({"clip_adjoint": 0.0, "chunk": 5}, r"clip_adjoint=0\.0: expected a norm above 0"),
        ({"clip_adjoint": float("nan"), "chunk": 5}, "clip_adjoint=nan: expected a norm above 0"),
        (
            {"clip_adjoint": 1.0},
            r"their length becomes part of the gradient: give chunk=\.\.\. too",
        ),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tt.Exact(**setting)


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


@pytest.mark.parametrize(
    ("make", "part"), [(RestlessReadout, "the loss"), (RestlessMemory, "leaf 1 of the state")]
)
def test_losses_and_states_are_compared(make: Callable[[], nn.Module], part: str) -> None:
    random.seed(0)  # two numbers that happen to be close count as equal
    reason = NOT_REPEATED.format("15 to 19") + f" {part}"
    with pytest.raises(ModelError, match=reason):
        judged(make, tt.Exact(chunk=5))


def test_sound_modules_pass_every_comparison() -> None:
    for make in (TensorState, HidesLayer, NoisyState):
        assert len(judged(make, tt.Exact(chunk=5))) == 1


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
