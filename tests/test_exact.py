"""What is particular to exact gradients: their segments run again, their memory and their settings.

That they equal plain autograd is tested by test_random_updates.py and test_policies.py.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, allocated
from quick import examples
from strategies import (
    HIDDEN,
    HidesLayer,
    Rotation,
    Weights,
    apart,
    gradients,
    in_chunks,
    inputs,
    lawless,
    named,
    remembering,
    start,
    states_apart,
)
from throughtime import _device
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ModelError
from throughtime.gradient import Update, segment
from throughtime.gradient.segment import MOST_BYTES, automatic_chunk

EXACT = 1e-10
chunks = st.sampled_from([1, 2, 3, 7, 13, 29, 50, None])  # None: automatic


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
    assert update.weight == update.steps
    assert states_apart(update.state, end) < EXACT
    whole = next(iter(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=500))))
    assert whole.outputs.shape == y.shape


class NoisyState(Rotation):
    """Noise on the state at every step, from torch's generator."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.play(x + 0.3 * torch.randn_like(x), self.zeros(x) if state is None else state)


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
    "dropout on outputs": lambda: HidesLayer(dropout=0.4),
    "noise on the state": NoisyState,
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

    def equals(self, other: "After") -> bool:
        return (
            apart(self.gradient, other.gradient) < EXACT
            and abs(self.loss - other.loss) < EXACT
            and all(torch.equal(self.buffers[name], other.buffers[name]) for name in self.buffers)
            and torch.equal(self.generator, other.generator)
        )


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


@examples(6)
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
    assert results.equals(held(changing(name), data, chunk, seed))


def together(data: PolicyData) -> PolicyData:
    """Without resets that fall into every lane at once: one update."""
    resets = data.resets & ~data.resets.all(dim=1, keepdim=True)
    return PolicyData(data.x, data.targets, resets, data.mask)


@pytest.mark.parametrize("name", list(CHANGING))
def test_measuring_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PolicyData.draw(29, 2, 0)
    expected = held(changing(name), data, 29)
    assert updated(changing(name), data, tt.Exact()).equals(expected)
    if name == "dropout on outputs":
        # the mutant: trials that draw from the training's numbers
        monkeypatch.setattr(segment, "preserve_rng_and_buffers", lambda *_: nullcontext())
        assert not updated(changing(name), data, tt.Exact()).equals(expected)


class CountsCalls(Rotation):
    """Counts in an object of another class: what a module itself holds is put back after a call."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = SimpleNamespace(calls=0)

    def size(self) -> float:
        self.counter.calls += 1
        return self.counter.calls

    def initial_state(self, lanes: int) -> Any:
        return torch.zeros(lanes, HIDDEN, dtype=self.turn.dtype)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.play(x * self.size(), state)


def exact_updates(net: Carried, data: PolicyData, policy: tt.Exact, **options: Any) -> list[Update]:
    return list(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=policy, **options))


def test_module_that_does_not_repeat_is_refused_where_it_runs_again() -> None:
    data = PolicyData.draw(23, 2, 0)
    net = lawless(tt.carry(CountsCalls().double()), data.x)
    assert len(exact_updates(net, data, tt.Exact(chunk=23))) == 1
    with pytest.raises(ModelError, match=r"does not repeat: .*steps 15 to 19 differ in"):
        exact_updates(net, data, tt.Exact(chunk=5))


def test_clipping_under_a_scaler_is_that_without_one() -> None:
    data, found = PolicyData.draw(23, 2, 0), list[Weights]()
    for limit, scale in ((0.005, 1.0), (0.005, 2.0**7), (None, 1.0)):
        net = named("hides-layer").net()
        policy = tt.Exact(chunk=4, clip_adjoint=limit)
        exact_updates(net, data, policy, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
        found.append({name: g / scale for name, g in gradients(net).items()})
    assert apart(found[1], found[0]) < EXACT
    assert apart(found[2], found[0]) > 1e-6


def test_autocast_gradient_is_that_of_chunks_held_in_the_same_autocast() -> None:
    """Each chunk with casts of its own; the backward pass outside, as torch recommends."""
    data = together(PolicyData.draw(29, 2, 0, 0.05, 0.3))
    data = PolicyData(data.x.float(), data.targets.float(), data.resets, data.mask)
    net, losses = changing("dropout on outputs", torch.float32), list[Tensor]()
    torch.manual_seed(11)
    state = start(net, data.x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for at in range(0, 29, 5):
            torch.clear_autocast_cache()
            rows, mask = slice(at, at + 5), data.mask[at : at + 5]
            y, state = net(data.x[rows], state, data.resets[rows])
            loss = nn.functional.mse_loss(y[mask], data.targets[rows][mask])
            losses.append(loss * (int(mask.sum()) / int(data.mask.sum())))
    torch.stack(losses).sum().backward()
    expected = gradients(net)
    for enabled in (True, False):
        net = changing("dropout on outputs", torch.float32)
        torch.manual_seed(11)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            (update,) = exact_updates(net, data, tt.Exact(chunk=5))
        deviation = apart(gradients(net), expected)
        assert deviation < 1e-7 if enabled else deviation > 1e-4
        assert {leaf.dtype for leaf in tt.state.tensors(update.state)} == {torch.float32}


@given(steps=st.integers(1, 10**8), size=st.floats(1, 1e9))
def test_automatic_length(steps: int, size: float) -> None:
    """A thousand steps or more, in even segments whose graphs fit."""
    length = automatic_chunk(steps, size)
    assert length == 1 or length * size <= MOST_BYTES
    count = math.ceil(steps / length)
    assert length == 1 or math.ceil(steps / (length - 1)) > count  # no shorter ones are as many
    fitting = max(1, int(MOST_BYTES / size))
    assert count <= math.ceil(steps / min(max(1000, math.isqrt(steps)), fitting))


def test_peak_stays_near_the_memory_of_one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the graph: the gradients of activations, and the outputs of two other segments."""
    net = tt.carry(nn.Sequential(nn.LSTM(3, 32), nn.Linear(32, 500)))
    chunk = Chunk.from_tensors(inputs(1000, 4).float(), torch.zeros(1000, 4, 500))

    def peak(most: float) -> int:
        monkeypatch.setattr(segment, "MOST_BYTES", most)

        def update() -> None:
            list(tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact()))

        update()  # gradients, and whatever torch sets up once
        return allocated(update).most

    assert 5e5 < peak(1e6) < 4e6
    assert peak(1e9) > 4e6  # the mutant: one graph of all steps
