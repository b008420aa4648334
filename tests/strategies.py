"""What the tests share: nets as rows, data, and hypothesis strategies for sizes.

Every net is float64 and made to remember: recurrent weights are orthogonal, gates nearly open,
inputs small, so that a gradient does not die within the lags tested
(`test_every_net_remembers_fifty_steps`).

Shapes: `T` steps, `B` lanes, `D` = 3 input features, `H` hidden, `C` outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.carry._laws import Law

FEATURES = 3
HIDDEN = 4


class Rotation(nn.Module):
    """`h' = h Q + x W` with an orthogonal Q: inputs never fade. Base of the other user modules."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.turn = nn.Parameter(nn.init.orthogonal_(torch.empty(HIDDEN, HIDDEN)))
        self.into = nn.Parameter(torch.randn(FEATURES, HIDDEN) * 0.3)
        self.read = nn.Linear(HIDDEN, outputs)

    def play(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        hidden: list[Tensor] = []
        for step in x.unbind(0):
            h = h @ self.turn + step @ self.into
            hidden.append(h)
        return self.read(torch.stack(hidden)), h

    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[1], HIDDEN)


class TensorState(Rotation):
    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.play(x, self.zeros(x) if state is None else state)


class DictState(Rotation):
    """Besides `h` it keeps the last input: a delay of one step."""

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        state = {"h": self.zeros(x), "last": torch.zeros_like(x[0])} if state is None else state
        delayed = torch.cat([state["last"].unsqueeze(0), x[:-1]])
        y, h = self.play(x + delayed, state["h"])
        return y, {"h": h, "last": x[-1]}


class Pair(NamedTuple):
    h: Tensor
    layers: Tensor


class NamedTupleState(Rotation):
    """One leaf has its lanes first, the other, a hidden GRU's, second."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(FEATURES, FEATURES, num_layers=2)

    def forward(self, x: Tensor, state: Pair | None = None) -> tuple[Tensor, Pair]:
        state = (
            Pair(self.zeros(x), x.new_zeros(2, x.shape[1], FEATURES)) if state is None else state
        )
        z, layers = self.gru(x, state.layers)
        y, h = self.play(x + z, state.h)
        return y, Pair(h, layers)


class LearntStart(Rotation):
    """Its recordings start from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(HIDDEN))

    def initial_state(self, lanes: int) -> Tensor:
        return self.start.expand(lanes, HIDDEN)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.play(x, state)


class HidesLayer(nn.Module):
    """An LSTM, then a linear layer; outputs only."""

    def __init__(
        self, *, batch_first: bool = False, outputs: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, batch_first=batch_first)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(HIDDEN, outputs)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(self.dropout(hidden))


class Noisy(HidesLayer):
    """Dropout draws random numbers, batch normalisation changes buffers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(self.dropout(self.norm(hidden.flatten(0, 1)).view(hidden.shape)))


class HidesTwoLayers(nn.Module):
    """Two layers, one of them deeper in the tree, one given zeros explicitly."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"gru": nn.GRU(FEATURES, HIDDEN)})
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        first, _ = self.block["gru"](x)
        zeros = x.new_zeros(2, x.shape[1], HIDDEN)
        second, _ = self.lstm(first, (zeros, zeros))
        return first + second


class HidesCell(nn.Module):
    """A cell in a Python loop, starting from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], HIDDEN)
        hidden: list[Tensor] = []
        for step in x.unbind(0):
            h, c = self.cell(step, (h, c))
            hidden.append(h)
        return self.head(torch.stack(hidden))


def remembering(module: nn.Module) -> nn.Module:
    """The module in float64, its recurrent weights orthogonal and its gates nearly open."""
    module = module.double()
    for layer in module.modules():
        if isinstance(layer, (nn.RNNBase, nn.RNNCellBase)):
            _remember(layer)
    return module


def _remember(layer: nn.RNNBase | nn.RNNCellBase) -> None:
    """Gate orders as in torch.nn: LSTM (input, forget, cell, output), GRU (reset, update, new)."""
    lstm, gru = isinstance(layer, (nn.LSTM, nn.LSTMCell)), isinstance(layer, (nn.GRU, nn.GRUCell))
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name.startswith(("weight_hh", "weight_hr")):
                for block in weight.split(min(weight.shape)):
                    nn.init.orthogonal_(block, gain=0.3 if lstm or gru else 1.0)
            elif name.startswith("weight_ih"):
                weight.mul_(1.0 if lstm or gru else 0.2)
            else:
                weight.mul_(0.1)
                if name.startswith("bias_ih") and (lstm or gru):
                    weight[layer.hidden_size : 2 * layer.hidden_size] += 5.0


@dataclass(frozen=True)
class Row:
    """An implementation under test: a seeded maker of modules, and what `tt.carry` must be told."""

    name: str
    make: Callable[[], nn.Module]
    batch_first: bool | None = None

    def module(self) -> nn.Module:
        with torch.random.fork_rng(range(torch.accelerator.device_count())):
            torch.manual_seed(7)
            return remembering(self.make())

    def net(self) -> Carried:
        return tt.carry(self.module(), batch_first=self.batch_first)


def _chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 5),
        nn.LSTM(5, HIDDEN, batch_first=True),
        nn.Tanh(),
        nn.GRUCell(HIDDEN, 5),
        nn.Linear(5, 2),
    )


NETS = (
    Row("lstm", lambda: nn.LSTM(FEATURES, HIDDEN)),
    Row(
        "lstm-2-batch-first-proj",
        lambda: nn.LSTM(FEATURES, 5, num_layers=2, batch_first=True, proj_size=2),
    ),
    Row("gru", lambda: nn.GRU(FEATURES, HIDDEN)),
    Row("rnn", lambda: nn.RNN(FEATURES, HIDDEN)),
    Row("lstm-cell", lambda: nn.LSTMCell(FEATURES, HIDDEN)),
    Row("gru-cell", lambda: nn.GRUCell(FEATURES, HIDDEN)),
    Row("rnn-cell", lambda: nn.RNNCell(FEATURES, HIDDEN)),
    Row("sequential", _chain),
    Row("hides-layer", HidesLayer),
    Row("hides-cell", HidesCell),
    Row("tensor-state", TensorState),
    Row("dict-state", DictState),
    Row("namedtuple-state", NamedTupleState),
    Row("learnt-start", LearntStart),
)
every_net = pytest.mark.parametrize("row", NETS, ids=lambda row: row.name)


def lawless(net: Carried, x: Tensor) -> Carried:
    """The net, prepared without measuring a law: for nets that break one on purpose."""
    training = net.training
    with mock.patch.object(Law, "holds", new=True):
        for mode in (True, False):
            net.train(mode).prepare(x)
    return net.train(training)


def named(name: str) -> Row:
    return next(row for row in NETS if row.name == name)


def some_nets(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", [named(name) for name in names], ids=lambda row: row.name)


def start(net: Carried, x: Tensor) -> Any:
    return net.initial_state(x.shape[1], like=x)


def inputs(steps: int, lanes: int, *, seed: int = 0, features: int = FEATURES) -> Tensor:
    return torch.randn(
        steps, lanes, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def in_chunks(
    net: Carried,
    x: Tensor,
    lengths: Sequence[int],
    state: Any = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Plays `x` in pieces of `lengths` with the state carried.

    What is left over is the last piece.
    """
    state = start(net, x) if state is None else state
    bounds = np.cumsum([0, *lengths])
    bounds = [*bounds[bounds < len(x)].tolist(), len(x)]
    outputs: list[Tensor] = []
    for begin, end in pairwise(bounds):
        y, state = net(x[begin:end], state, None if resets is None else resets[begin:end])
        outputs.append(y)
    return torch.cat(outputs), state


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in net.named_parameters()
    }


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The largest difference of two sets of tensors, relative to the second's largest entry."""
    assert a.keys() == b.keys()
    scale = max(1.0, *(t.abs().max().item() for t in b.values()))
    return max((a[name] - b[name]).abs().max().item() for name in b) / scale


def states_apart(a: Any, b: Any) -> float:
    return apart(dict(tt.state.leaves(a)), dict(tt.state.leaves(b)))


def recordings(
    lengths: Sequence[int], *, seed: int = 0, outputs: int = 2, features: int = FEATURES
) -> list[dict[str, Any]]:
    """Recordings of standard normal numbers: `inputs` (T, D), `targets` (T, C)."""
    random_numbers = np.random.default_rng(seed)
    return [
        {
            "name": f"r{i}",
            "inputs": random_numbers.normal(size=(n, features)),
            "targets": random_numbers.normal(size=(n, outputs)),
        }
        for i, n in enumerate(lengths)
    ]


# Sizes: one, primes, and more than there is.
lengths_of_recordings = st.lists(
    st.integers(1, 200) | st.sampled_from([1, 2, 97, 101]), min_size=1, max_size=8
)
few_short_recordings = st.lists(st.integers(1, 31), min_size=1, max_size=4)
chunk_lengths = st.sampled_from([1, 2, 3, 7, 13, 31, 64, 250])
seeds = st.integers(0, 2**16)


def draw_lanes(lengths: Sequence[int], wish: int) -> int:
    """A number of lanes that the recordings can fill."""
    return max(1, min(wish, sum(lengths)))


Weights = dict[str, Tensor]
