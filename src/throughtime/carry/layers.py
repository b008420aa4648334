"""Recurrent layers and cells of torch.nn, layers of tt.nn, and nn.Sequential of these.

Shapes: `T` steps, `B` lanes, `H` hidden, `L` layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import Adapter, trial_call
from throughtime.errors import ModelError
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

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return isinstance(self.module, Recurrent)

    def leaf_names(self, state: State) -> list[str]:
        return _hidden_names(state)

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

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        outputs: list[Tensor] = []
        for step in x.unbind(0):
            state = self.module(step, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs), state


def layer_adapter(layer: RecurrentModule) -> Adapter:
    """The adapter of a recurrent layer or cell."""
    return LayerAdapter(layer) if isinstance(layer, nn.RNNBase) else CellAdapter(layer)


@dataclass(frozen=True)
class StatelessAdapter(Adapter):
    """A child of a chain that carries nothing: it runs on all steps at once."""

    module: nn.Module

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del lanes, like
        return ()

    def takes_resets(self, x: Tensor | None) -> bool | None:
        del x
        return True

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        return self.module(x), state


@dataclass(frozen=True)
class ChainAdapter(Adapter):
    """nn.Sequential: the outputs of each child are the inputs of the next.

    The state is a dict by the child's name.
    """

    module: nn.Sequential
    children: tuple[nn.Module, ...]
    links: Mapping[str, Adapter]

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        if like is not None and self.needs_trial():
            step = like[:1, :1].expand(1, lanes, *like.shape[2:])
            for link in self.links.values():
                call = partial(link.run, step, link.initial_state(lanes, step))
                step, _ = trial_call(self.module, call)
        return {name: link.initial_state(lanes, like) for name, link in self.links.items()}

    def needs_trial(self) -> bool:
        return any(link.needs_trial() for link in self.links.values())

    def leaf_names(self, state: State) -> list[str]:
        return [f"{k}.{leaf}" for k, v in self.links.items() for leaf in v.leaf_names(state[k])]

    def takes_resets(self, x: Tensor | None) -> bool | None:
        answers = [link.takes_resets(None) for link in self.links.values()]
        if False in answers or None not in answers:
            return all(answers)
        return None if x is None else trial_call(self.module, partial(self._trial, x[:1]))[0]

    def _trial(self, step: Tensor) -> tuple[bool, State]:
        """Ask each child, with the inputs that reach it."""
        for link in self.links.values():
            if not link.takes_resets(step):
                return False, ()
            step, _ = link.run(step, link.initial_state(step.shape[1], step))
        return True, ()

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        if tuple(self.module) != self.children:
            raise ModelError(
                "a module of this nn.Sequential was replaced after tt.carry; carry it again: net ="
                " tt.carry(module)"
            )
        after: dict[str, State] = {}
        for name, link in self.links.items():
            y, after[name] = link.run(x, state[name], resets)
            if y.shape[:2] != x.shape[:2]:
                raise ModelError(
                    f"module '{name}' of this nn.Sequential turns {tuple(x.shape)} into"
                    f" {tuple(y.shape)}, expected one output per step and lane. A carried recurrent"
                    " layer returns its outputs only: drop a module that picks them out of a tuple,"
                    " or the last step."
                )
            x = y
        return x, after
