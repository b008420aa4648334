"""Recurrent layers and cells of torch.nn, and layers of tt.nn.

Shapes: `T` steps, `B` lanes, `H` hidden, `L` layers.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import Adapter
from throughtime.carry._explain import state_shapes
from throughtime.nn.layers import Recurrent
from throughtime.state import State

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
RecurrentModule: TypeAlias = nn.RNNBase | nn.RNNCellBase


def swap_lane_dim(state: State) -> State:
    """`(L, B, H)` to `(B, L, H)`, or back."""
    if isinstance(state, Tensor):
        return state.transpose(0, 1)
    h, c = state
    return h.transpose(0, 1), c.transpose(0, 1)


def _hidden_names(state: State) -> list[str]:
    return ["h"] if isinstance(state, Tensor) else ["h", "c"]


def _layer_lines(adapter: Adapter, layer: RecurrentModule, called: str) -> str:
    """How a layer is called; its contract is known, so nothing is tried."""
    state = adapter.initial_state(1, None)
    shapes = state_shapes(adapter.leaf_names(state), state)
    return f"{type(layer).__name__}: {called}\n  state, lanes first: {shapes}\n  start: zeros"


@dataclass(frozen=True)
class LayerAdapter(Adapter):
    """nn.LSTM, nn.GRU, nn.RNN."""

    module: nn.RNNBase

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del like
        layer = self.module
        # registered by name, typed Tensor | Module
        weight: Tensor = layer.weight_ih_l0  # pyright: ignore[reportAssignmentType]
        h = weight.new_zeros(lanes, layer.num_layers, layer.proj_size or layer.hidden_size)
        if not isinstance(layer, nn.LSTM):
            return h
        return h, weight.new_zeros(lanes, layer.num_layers, layer.hidden_size)

    def takes_resets(self) -> bool:
        return isinstance(self.module, Recurrent)

    def leaf_names(self, state: State) -> list[str]:
        return _hidden_names(state)

    def explain(self) -> str:
        order = "(B, T, {})" if self.module.batch_first else "(T, B, {})"
        called = f"called with {order.format(self.module.input_size)}: one call for each chunk"
        return _layer_lines(self, self.module, called)

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        # as in `swap_lane_dim`, without a call: every chunk passes here
        is_single = isinstance(state, Tensor)
        entering = (
            state.transpose(0, 1)
            if is_single
            else (state[0].transpose(0, 1), state[1].transpose(0, 1))
        )
        if x.is_cuda:  # cuDNN refuses a strided state
            entering = trees.map_leaves(Tensor.contiguous, entering)
        batch_first = self.module.batch_first
        options = () if resets is None else (resets.transpose(0, 1) if batch_first else resets,)
        y, after = self.module(x.transpose(0, 1) if batch_first else x, entering, *options)
        after = (
            after.transpose(0, 1)
            if is_single
            else (after[0].transpose(0, 1), after[1].transpose(0, 1))
        )
        return y.transpose(0, 1) if batch_first else y, after


@dataclass(frozen=True)
class CellAdapter(Adapter):
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell, looped over time."""

    module: nn.RNNCellBase

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del like
        h = self.module.weight_hh.new_zeros(lanes, self.module.hidden_size)
        return (h, torch.zeros_like(h)) if isinstance(self.module, nn.LSTMCell) else h

    def leaf_names(self, state: State) -> list[str]:
        return _hidden_names(state)

    def explain(self) -> str:
        called = f"called with (B, {self.module.input_size}): one call for each step"
        return _layer_lines(self, self.module, called)

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        outputs: list[Tensor] = []
        for step in x.unbind(0):
            state = self.module(step, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs), state


def layer_adapter(layer: RecurrentModule) -> "LayerAdapter | CellAdapter":
    """The adapter of a recurrent layer or cell."""
    return LayerAdapter(layer) if isinstance(layer, nn.RNNBase) else CellAdapter(layer)
