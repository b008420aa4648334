"""The recurrent layers and cells of torch.nn, and the layers of tt.nn.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `L` layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import Contract
from throughtime.nn.layers import Recurrent
from throughtime.state import State

RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def turned(state: State) -> State:
    """`(L, B, H)` to `(B, L, H)`, or back."""
    if isinstance(state, Tensor):
        return state.transpose(0, 1)
    return tuple(leaf.transpose(0, 1) for leaf in state)


@dataclass(frozen=True)
class Layer:
    """nn.LSTM, nn.GRU, nn.RNN."""

    module: nn.RNNBase

    def initial(self, lanes: int, like: Tensor | None) -> State:
        del like
        layer = self.module
        # registered by name, typed Tensor | Module
        weight: Tensor = layer.weight_ih_l0  # pyright: ignore[reportAssignmentType]
        h = weight.new_zeros(lanes, layer.num_layers, layer.proj_size or layer.hidden_size)
        return (
            (h, weight.new_zeros(lanes, layer.num_layers, layer.hidden_size))
            if isinstance(layer, nn.LSTM)
            else h
        )

    def needs_trial(self) -> bool:
        return False

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return isinstance(self.module, Recurrent)

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        entering = turned(state)
        if x.is_cuda:  # cuDNN refuses a strided state
            entering = trees.map_leaves(Tensor.contiguous, entering)
        first = self.module.batch_first
        given = () if resets is None else (resets.transpose(0, 1) if first else resets,)
        y, after = self.module(x.transpose(0, 1) if first else x, entering, *given)
        return y.transpose(0, 1) if first else y, turned(after)


@dataclass(frozen=True)
class Cell:
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell, looped over time."""

    module: nn.RNNCellBase

    def initial(self, lanes: int, like: Tensor | None) -> State:
        del like
        h = self.module.weight_hh.new_zeros(lanes, self.module.hidden_size)
        return (h, torch.zeros_like(h)) if isinstance(self.module, nn.LSTMCell) else h

    def needs_trial(self) -> bool:
        return False

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return False

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        outputs: list[Tensor] = []
        for step in x.unbind(0):
            state = self.module(step, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs), state


def plain(layer: nn.Module) -> Contract:
    """The contract of a layer or cell by itself."""
    # layers are RECURRENT
    return Layer(layer) if isinstance(layer, nn.RNNBase) else Cell(layer)  # pyright: ignore[reportArgumentType]
