"""Three kinds of nets: a module for the library, and plain torch.nn that takes one step of it."""

import copy

import torch
from torch import Tensor, nn

import throughtime as tt
from brute_force import State

KINDS = ("lstm", "fused", "rotation")
FEATURES, UNITS = 3, 4


class Chain(nn.Sequential):
    """A chain of layers that the oracle runs step by step."""

    def start(self, lanes: int) -> State:
        return tuple(
            torch.zeros(layer.num_layers, lanes, UNITS, dtype=torch.float64)
            for layer in self
            if isinstance(layer, nn.RNNBase)
            for _ in range(1 + isinstance(layer, nn.LSTM))
        )

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        leaves, x, after = list(state), x.unsqueeze(0), list[Tensor]()
        for layer in self:
            if isinstance(layer, nn.LSTM):
                x, pair = layer(x, (leaves.pop(0), leaves.pop(0)))
                after += pair
            elif isinstance(layer, nn.RNNBase):
                x, h = layer(x, leaves.pop(0))
                after.append(h)
            else:
                x = layer(x)
        return x.squeeze(0), tuple(after)


class Rotation(nn.Module):
    """Rotates its state, which starts from a parameter: gradients last for over 100 steps."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(UNITS))
        self.turn = nn.Linear(UNITS, UNITS, bias=False)
        self.inside, self.head = nn.Linear(FEATURES, UNITS), nn.Linear(UNITS, classes)

    def start(self, lanes: int) -> State:
        return (self.first.expand(lanes, UNITS),)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h = self.turn(state[0]) + self.inside(x)
        return self.head(h), (h,)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = list[Tensor]()
        for step in self.inside(x).unbind(0):
            state = self.turn(state) + step
            outputs.append(state)
        return self.head(torch.stack(outputs)), state

    def initial_state(self, lanes: int) -> Tensor:
        return self.start(lanes)[0]


def fused_layers(classes: int, variant: int) -> tuple[nn.Module, nn.Module]:
    name, layers = ("LSTM", "GRU", "RNN")[variant], 1 + variant % 2
    ours, torchs = (
        getattr(library, name)(FEATURES, UNITS, num_layers=layers) for library in (tt.nn, nn)
    )
    head = nn.Linear(UNITS, classes)
    return nn.Sequential(ours, head), Chain(torchs, copy.deepcopy(head))


def build(kind: str, classes: int, variant: int) -> tuple[nn.Module, nn.Module]:
    """A module for the library, and one that the oracle runs, with the same names of weights."""
    match kind:
        case "lstm":
            layers = nn.LSTM(FEATURES, UNITS), nn.Linear(UNITS, classes)
            return nn.Sequential(*layers), Chain(*copy.deepcopy(layers))
        case "fused":
            return fused_layers(classes, variant)
        case _:
            module = Rotation(classes)
    return module, copy.deepcopy(module)
