"""Recurrent layers and cells of torch.nn, layers of tt.nn, and nn.Sequential of any modules.

Shapes: `T` steps, `B` lanes, `H` hidden, `L` layers.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import cudnn_rules
from throughtime.carry._adapter import Adapter
from throughtime.carry._explain import state_shapes
from throughtime.carry._laws import Laboratory
from throughtime.carry._ports import has_layers
from throughtime.carry._refusal import broken_error, culprit
from throughtime.carry._trial import (
    LANES,
    STEPS,
    is_sharded,
    long_steps,
    modes_of,
    quiet,
    trial_inputs,
    trial_of,
)
from throughtime.carry.module import ModuleAdapter
from throughtime.errors import ModelError
from throughtime.nn.layers import Recurrent
from throughtime.state import State

RecurrentModule: TypeAlias = nn.RNNBase | nn.RNNCellBase


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
        # (L, B, H) to (B, L, H) and back, without a call: every chunk passes here
        is_single = isinstance(state, Tensor)
        entering = (
            state.transpose(0, 1)
            if is_single
            else (state[0].transpose(0, 1), state[1].transpose(0, 1))
        )
        if not x.is_cpu and cudnn_rules(x):  # which refuses a strided state
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


# Its layers and children are known to obey these, however little of it is visible.
KNOWN = ("inputs", "memory", "credit")


@dataclass(frozen=True)
class StatelessAdapter(Adapter):
    """A child of a chain that carries nothing: it runs on all steps at once."""

    module: nn.Module

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del lanes, like
        return ()

    def takes_resets(self) -> bool:
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
    links: dict[str, "Link"]
    _tried: set[Hashable] = field(default_factory=set[Hashable], init=False, repr=False)

    def prepare(self, x: Tensor) -> None:
        kind = (x.is_floating_point(), x.dim(), x.shape[2:], self.module.training)
        if kind in self._tried or not x.numel() or torch.compiler.is_compiling():
            return
        if is_sharded(self.module):
            return  # its layers are known; what stands between them is taken as it is
        with quiet(x.device):
            self._prepare_links(x)
            modes = modes_of(self.module)
            with trial_of(self) as twin:
                inputs = trial_inputs(x, twin.module, LANES)
                laboratory = Laboratory(twin, twin.module, inputs)
                for training in (None, modes) if self.module.training else (None,):
                    for law in laboratory.measure(training):
                        if not law.holds and law.plain not in KNOWN:
                            part = culprit(laboratory, law.plain, training)
                            raise broken_error(type(self.module).__name__, law, part)
                steps = long_steps(x, twin.module)
                if steps > STEPS and not all(map(_is_stepwise, self.children)):
                    law = laboratory.measure_long(trial_inputs(x, twin.module, LANES, steps))
                    if not law.holds:
                        raise broken_error(type(self.module).__name__, law, None)
        self._tried.add(kind)

    def _prepare_links(self, x: Tensor) -> None:
        """Prepare each child with the inputs that reach it."""
        inputs = trial_inputs(x, self.module, LANES)
        for name, link in self.links.items():
            try:
                link.prepare(inputs)
            except ModelError:
                if has_layers(link.module):
                    raise
                # its names suggest a state; as a child without one, the laws of the chain judge it
                link = self.links[name] = StatelessAdapter(link.module)  # noqa: PLW2901
            with trial_of(link) as twin, torch.no_grad():
                twin.module.eval()
                inputs, _ = twin.run(inputs, twin.initial_state(LANES, None))

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        if like is not None:
            self.prepare(like)
        return {name: link.initial_state(lanes, None) for name, link in self.links.items()}

    def leaf_names(self, state: State) -> list[str]:
        return [f"{k}.{leaf}" for k, v in self.links.items() for leaf in v.leaf_names(state[k])]

    def explain(self) -> str:
        lines = ["Sequential: each module gets the outputs (T, B, ...) of the one before"]
        for name, link in self.links.items():
            if not isinstance(link, StatelessAdapter):
                first, *others = link.explain().split("\n")
                lines += [f"'{name}', {first}", *others]
        stateless = [n for n, link in self.links.items() if isinstance(link, StatelessAdapter)]
        if stateless:
            lines.append(f"no state, one call for each chunk: {', '.join(map(repr, stateless))}")
        return "\n  ".join(lines)

    def takes_resets(self) -> bool:
        return all(link.takes_resets() for link in self.links.values())

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        if (*self.module._modules.values(),) != self.children:
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


Link: TypeAlias = LayerAdapter | CellAdapter | StatelessAdapter | ModuleAdapter | ChainAdapter


def _is_stepwise(part: nn.Module) -> bool:
    """Whether a layer of torch.nn computes each step alone, or is recurrent over all of them."""
    return isinstance(part, (nn.Linear, nn.Embedding, nn.Dropout, nn.Tanh, nn.ReLU, nn.RNNBase))
