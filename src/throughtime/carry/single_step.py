"""One step at a time of a net of fused layers: the call is prepared once, in memory of its own.

Around the few microseconds that a kernel takes for a step of a small layer, an ordinary call of a
net spends twenty times as many on modules, adapters, state trees and checks. Here the structure of
the net is read once. A step then makes sure that the net is what it was, and runs the operations in
order: layers by calls of the kernels, whose memory holds the state, everything else as the net
does. The results are the same bits.

Shapes: `B` lanes, `D` input features, `P` the features of a leaf of the state, `C` outputs, `L`
layers.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry.carried import MISFIT_ERRORS, Carried, EvaluationMode
from throughtime.carry.guards import ModuleGuards
from throughtime.carry.layers import ChainAdapter, LayerAdapter
from throughtime.carry.structure import (
    Structure,
    TensorCall,
    is_foreign,
    layer_states,
    structure_of,
)
from throughtime.errors import StateError
from throughtime.kernels.cells import BY_MODE, Weights
from throughtime.kernels.dispatch import PLAIN
from throughtime.kernels.recurrent import TYPES, Call, check, core
from throughtime.nn.layers import Recurrent, backend, layer_weights
from throughtime.state import State

_address, _form = Tensor.data_ptr, attrgetter("shape", "dtype")
_TOLERANCE = 1e-6  # of a trial of a net whose structure was read from its code


class SingleStep:
    """The prepared call of a net for one step of a number of lanes.

    Made by `prepare`. The state is in the memory of the calls: `load` puts it there, `read` copies
    it. It is called by one thread at a time, in evaluation mode and without a graph.

    Attributes:
        mode: in which it runs, that of the net.
        is_loaded: whether the state is here. The caller sets it to False where the state is
            elsewhere.
    """

    def __init__(
        self, net: Carried, structure: Structure, x: Tensor, state: State, y: Tensor
    ) -> None:
        self._adapter, self._module = net.adapter, net.module
        self._guards = ModuleGuards(net.module, structure.guards)
        self.mode, self.is_loaded = EvaluationMode(self._guards.modules), False
        called = not isinstance(net.adapter, (ChainAdapter, LayerAdapter))  # by a forward
        with torch.inference_mode(False):  # tensors that may be written to outside of it as well
            self._x = torch.zeros_like(x)
            self._turn = [0, 1]  # the first is that of the state that enters the next step
            calls = {
                layer: _LayerCalls(
                    layer, x.shape[1], self._turn, batch_first=called and layer.batch_first
                )
                for layer in structure.layers
            }
            self._like = trees.map_leaves(lambda leaf: leaf.detach().clone(), state)
        self._row, self._array = self._x[0], self._x[0].numpy()
        self._is_index = not x.is_floating_point()
        self._kinds = "biu" if self._is_index else "f"  # of NumPy's types
        self._zeros = np.zeros_like(self._array)
        arguments = net.adapter.forward_arguments(self._x, ()) if called else None
        self._entering: Tensor = arguments[0] if arguments else self._x
        self._layers, targets = (*calls.values(),), [op.target for op in structure.operations]
        self._operations = [calls.get(op.target) or _forward(op) for op in structure.operations]
        for before, layer in zip([None, *targets], targets, strict=False):
            if layer in calls and (before is None or before in calls):
                calls[layer].set_inputs(self._entering if before is None else calls[before].outputs)
        self._no_outputs, self._is_new = np.zeros_like(y.numpy()), type(targets[-1]) is nn.Linear
        # of each leaf of the net's state the calls that have it, and its number there
        positions = {
            id(leaf): (own, k)
            for own, part in zip(
                self._layers, layer_states(net, structure, self._like), strict=True
            )
            for k, leaf in enumerate(trees.tensors(part))
        }
        self._leaves = [positions[id(leaf)] for leaf in trees.tensors(self._like)]

    @classmethod
    def prepare(
        cls, net: Carried, x: Tensor, state: State, y: Tensor, after: State
    ) -> "SingleStep | None":
        """The prepared call; None for a net of other parts, or one that something observes.

        Args:
            net: made by `tt.carry`.
            x: inputs of a step, `(1, B, D)` or `(1, B)` indices.
            state: entering it.
            y: what the net made of it, `(1, B, C)`.
            after: the state after it.
        """
        if type(net) is not Carried or not ModuleGuards(net.module).hold(net):
            return None
        structure = structure_of(net, x) if x.is_cpu else None
        if structure is None or not all(_is_fused(layer, x) for layer in structure.layers):
            return None
        try:
            step = cls(net, structure, x, state, y)
        except (KeyError, TypeError):  # leaves that no layer has, outputs of a type NumPy lacks
            return None
        if not step.holds(net) or not step.load(state):
            return None
        if not isinstance(net.adapter, ChainAdapter) and not step._gives(x, y, after):
            return None
        step.is_loaded = False
        return step

    def _gives(self, x: Tensor, y: Tensor, after: State) -> bool:
        """Whether a step gives the outputs and the state that the net gave."""
        got = self.run(x[0])
        if got is None or got.shape != y[0].shape:
            return False
        pairs = zip([y[0], *trees.tensors(after)], [got, *trees.tensors(self.read())], strict=True)
        return all(torch.allclose(a, b, atol=_TOLERANCE) for a, b in pairs)

    def holds(self, net: Carried) -> bool:
        """Whether the net is what it was, its weights are where they were, and nobody observes."""
        return (
            net.adapter is self._adapter
            and net._modules["module"] is self._module
            and self._guards.hold(net)
            and all(map(_LayerCalls.holds, self._layers))
        )

    def load(self, state: State) -> bool:
        """Copy a state into the memory of the calls; False if it does not fit."""
        try:
            leaves = trees.tensors(trees.arranged(state, self._like))
        except StateError:
            return False
        for leaf, like in zip(leaves, trees.tensors(self._like), strict=True):
            if type(leaf) not in PLAIN or _form(leaf) != _form(like) or not leaf.is_cpu:
                return False
        for leaf, (layer, k) in zip(leaves, self._leaves, strict=True):
            layer.state[k].copy_(leaf.transpose(0, 1))
        self.is_loaded = True
        return True

    def read(self) -> State:
        """A copy of the state."""
        copies = iter([layer.state[k].clone().transpose(0, 1) for layer, k in self._leaves])
        return trees.map_leaves(lambda _: next(copies), self._like)

    def run(self, inputs: Any) -> Tensor | None:
        """The outputs `(B, C)` for the inputs `(B, D)` of a step, of NumPy or torch.

        None for inputs that do not fit, and where an input, an output or a number of the state is
        not finite. The state is then as it was, and an ordinary call does or says what is due.
        """
        if not self._take(inputs):
            return None
        y = self._entering
        try:
            for operation in self._operations:
                y = operation(y)
            finite = is_finite(y.numpy(), self._no_outputs)
        except MISFIT_ERRORS:
            return None
        if not finite or not all(map(_LayerCalls.is_finite, self._layers)):
            return None
        self._turn.reverse()  # of all layers at once, even if an interrupt comes before or after
        y = y.flatten(0, 1)
        return y if self._is_new else y.clone()  # it may be memory of ours

    def _take(self, inputs: Any) -> bool:
        """Copy the inputs of a step; False if they do not fit or are not finite."""
        if isinstance(inputs, np.ndarray):  # memory-mapped ones as well
            if inputs.shape != self._array.shape or inputs.dtype.kind not in self._kinds:
                return False
            self._array[...] = inputs
        elif type(inputs) in PLAIN and inputs.shape == self._row.shape and inputs.is_cpu:
            own = inputs.dtype is self._row.dtype
            if not own and (self._is_index or not inputs.is_floating_point()):
                return False
            self._row.copy_(inputs)
        else:
            return False
        return self._is_index or is_finite(self._array, self._zeros)


def _forward(operation: TensorCall) -> Callable[[Tensor], Tensor]:
    """The forward of a module of torch.nn, which has no hooks; other operations as they are."""
    module = operation.target
    if isinstance(module, nn.Module) and not is_foreign(module):
        return module.forward
    return module if isinstance(module, nn.Module) else operation


def is_finite(values: Any, zeros: Any) -> bool:
    """Whether all numbers of an array are; `zeros` are as many.

    Cost: half a microsecond, a fifth of `np.isfinite(values).all()`.
    """
    return bool(np.vdot(values, zeros) == 0)  # NaN; np.dot warns of infinity


def _is_fused(layer: nn.RNNBase, x: Tensor) -> bool:
    """Whether the compiled kernel runs a layer for as many lanes as `x` `(1, B, ...)` has."""
    if not isinstance(layer, Recurrent):
        return False
    like = layer_weights(layer)[0].ih.new_empty(*x.shape[:2], layer.input_size)
    return backend(layer, like.transpose(0, 1) if layer.batch_first else like).name == "fused"


class _Turn(NamedTuple):
    """The calls of a layer that lead from one of its two states to the other.

    Attributes:
        calls: one for each layer of the stack.
        entering: the leaves of the state, `(L, B, P)`.
        leaving: all numbers of the other state.
    """

    calls: list[Call]
    entering: list[Tensor]
    leaving: Any


class _LayerCalls:
    """The calls of a layer for one step, and its state: two of them, which take turns."""

    def __init__(
        self, layer: nn.RNNBase, lanes: int, turn: list[int], *, batch_first: bool
    ) -> None:
        weights = layer_weights(layer)
        self._own, self._turn, self._threads = layer._parameters, turn, torch.get_num_threads()
        self._get = itemgetter(*(name for names in layer._all_weights for name in names))
        own: tuple[Tensor, ...] = self._get(self._own)
        self._addresses, self._forms = [*map(_address, own)], [*map(_form, own)]
        dtype = weights[0].ih.dtype
        widths = BY_MODE[layer.mode].widths(layer.hidden_size, layer.proj_size)
        rows = layer.num_layers, lanes
        memory = [weights[0].ih.new_zeros(rows[0] * lanes * sum(widths)) for _ in range(2)]
        states = [
            [leaf.view(*rows, -1) for leaf in flat.split([rows[0] * lanes * n for n in widths])]
            for flat in memory
        ]
        self._outputs = weights[0].ih.new_zeros(*rows, widths[0])
        dims = (lanes, 1) if batch_first else (1, lanes)
        self._x, self._inputs = ((*dims, layer.input_size), dtype), None
        self.outputs = self._outputs[-1].view(*dims, -1)
        self._turns = [
            _Turn(_calls(layer, weights, self._outputs, *pair), pair[0], after.numpy())
            for pair, after in zip((states, states[::-1]), memory[::-1], strict=True)
        ]
        self._zeros = np.zeros_like(self._turns[0].leaving)
        self._run = core().tt_forward

    @property
    def state(self) -> list[Tensor]:
        """The leaves `(L, B, P)` of the state that enters the next step."""
        return self._turns[self._turn[0]].entering

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs for the inputs of a step; the next call overwrites them.

        Raises:
            ValueError: the inputs are of another shape or type.
        """
        calls = self._turns[self._turn[0]].calls
        if x is not self._inputs:
            if _form(x) != self._x:
                raise ValueError
            x = x.contiguous()
            calls[0].x = x.data_ptr()
        for call in calls:
            check(self._run(call))
        return self.outputs

    def set_inputs(self, x: Tensor) -> None:
        """Set the inputs that every call will have, in memory of ours, if they fit."""
        if _form(x) == self._x and x.is_contiguous():
            self._inputs = x
            for turn in self._turns:
                turn.calls[0].x = x.data_ptr()

    def is_finite(self) -> bool:
        """Whether all numbers of the state after the step are."""
        return is_finite(self._turns[self._turn[0]].leaving, self._zeros)

    def holds(self) -> bool:
        """Whether the weights are in the same memory, their values being others or not."""
        try:
            weights = self._get(self._own)
        except KeyError:
            return False
        return (
            [*map(_address, weights)] == self._addresses
            and [*map(_form, weights)] == self._forms
            and all(map(Tensor.is_contiguous, weights))
            and torch.get_num_threads() == self._threads
        )


def _calls(
    layer: nn.RNNBase,
    weights: Sequence[Weights],
    outputs: Tensor,
    before: Sequence[Tensor],
    after: Sequence[Tensor],
) -> list[Call]:
    """The calls of a stack of layers for one step, each with the outputs of the one before it."""
    calls: list[Call] = []
    for k, own in enumerate(weights):
        sizes = outputs.shape[1], own.ih.shape[1], own.hidden, outputs.shape[2]
        kind = BY_MODE[layer.mode].code, TYPES[outputs.dtype]
        call = Call(*kind, 1, *sizes, torch.get_num_threads(), y=outputs[k].data_ptr())
        call.x = outputs[k - 1].data_ptr() if k else None
        for name, weight in zip(("w_ih", "w_hh", "b_ih", "b_hh", "w_hr"), own, strict=True):
            setattr(call, name, None if weight is None else weight.data_ptr())
        for name, entering, leaving in zip(("h", "c"), before, after, strict=False):
            setattr(call, f"{name}0", entering[k].data_ptr())
            setattr(call, f"{name}_end", leaving[k].data_ptr())
        calls.append(call)
    return calls
