"""One step at a time of a net of fused layers: the call is prepared once, in memory of its own.

Around the few microseconds that a kernel takes for a step of a small layer, an ordinary call of a
net spends twenty times as many on modules, adapters, state trees and checks. Here the structure of
the net is read once. A step then makes sure that the net is what it was, and runs the operations in
order: layers by calls of the kernels, from and to memory for the state, everything else as the net
does. The results are the same bits.

Shapes: `B` lanes, `D` input features, `P` the features of a leaf of the state, `C` outputs, `L`
layers.
"""

import math
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry.carried import MISFIT_ERRORS, Carried, EvaluationMode
from throughtime.carry.guards import ModuleGuards
from throughtime.carry.structure import (
    Structure,
    is_foreign,
    layer_states,
    require_structure,
)
from throughtime.errors import StateError
from throughtime.kernels.cells import BY_MODE
from throughtime.kernels.dispatch import PLAIN
from throughtime.kernels.recurrent import Call, LayerInputs, check, core
from throughtime.nn.layers import backend, layer_weights
from throughtime.state import State

_address, _form = Tensor.data_ptr, attrgetter("shape", "dtype")


class SingleStep:
    """The prepared call of a net for one step of a number of lanes.

    Made by `prepare`. The state is in memory of its own: `load` puts it there, `read` copies it. It
    is called by one thread at a time, in evaluation mode and without a graph.

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
        self._slots = [
            (layer._parameters, itemgetter(*chain.from_iterable(layer._all_weights)))
            for layer in structure.layers
        ]
        self._placement = *self._weights_placement()[:-1], True
        self._operations = list[Callable[[Tensor], Tensor]]()
        with torch.inference_mode(False):  # tensors that may be written to outside of it as well
            x, like = x.new_zeros(x.shape), trees.map_leaves(torch.clone, state)
            states, own = iter(layer_states(net, structure, like)), dict[Tensor, Tensor]()
            # the state that enters a step and the one after it, all layers side by side
            rest = memory = y.new_zeros(2, sum(map(Tensor.numel, trees.tensors(like))))
            self._before, self._after = memory.numpy()
            arguments = net.adapter.forward_arguments(x, ())
            self._is_read = arguments is not None
            outputs: Any = arguments[0] if arguments else x
            self._inputs = outputs
            for operation in structure.operations:
                target = operation.target
                if isinstance(target, nn.RNNBase):
                    run, outputs, leaves, rest = _prepare_layer(
                        target,
                        outputs,
                        y.new_empty(1, x.shape[1], target.input_size),
                        rest,
                        self._is_read and target.batch_first,
                    )
                    own |= zip(trees.tensors(next(states)), leaves, strict=True)
                else:
                    plain = isinstance(target, nn.Module) and not is_foreign(target)
                    run, outputs = target.forward if plain else operation, None  # without hooks
                self._operations.append(run)
            self._state = trees.map_leaves(lambda leaf: own[leaf].transpose(0, 1), like)
        self._row, self._array = x[0], x[0].numpy()
        self._is_index = not x.is_floating_point()
        self._is_new = type(structure.operations[-1].target) is nn.Linear

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
        if not x.is_cpu or type(net) is not Carried:
            return None
        try:
            step = cls(net, require_structure(net, x), x, state, y)
            fits = step.holds(net) and step.load(state)
            if fits and step._is_read:
                outputs: Any = step.run(x[0])
                results = outputs, *trees.tensors(step._state)
                fits = all(map(torch.equal, (y[0], *trees.tensors(after)), results))
        except MISFIT_ERRORS:  # a layer that no kernel runs, outputs of a type NumPy lacks
            return None
        step.is_loaded = False
        return step if fits else None

    def holds(self, net: Carried) -> bool:
        """Whether the net is what it was, its weights are where they were, and nobody observes."""
        try:
            return (
                net.adapter is self._adapter
                and net._modules["module"] is self._module
                and self._guards.hold(net)
                and self._weights_placement() == self._placement
            )
        except KeyError:
            return False

    def _weights_placement(self) -> tuple[Any, ...]:
        """Where the weights are, whatever their values: threads, memory, forms, contiguous."""
        weights = list[Tensor]()
        for own, get in self._slots:
            weights += get(own)
        return (
            torch.get_num_threads(),
            [*map(_address, weights)],
            [*map(_form, weights)],
            all(map(Tensor.is_contiguous, weights)),
        )

    def load(self, state: State) -> bool:
        """Copy a state into the memory of the calls; False if it does not fit."""

        def copy(own: Tensor, leaf: Tensor) -> Tensor:
            if type(leaf) not in PLAIN or _form(leaf) != _form(own) or not leaf.is_cpu:
                raise StateError
            return own.copy_(leaf)

        try:
            trees.map_leaves(copy, self._state, state)
        except StateError:
            return False
        self.is_loaded = True
        return True

    def read(self) -> State:
        """A copy of the state."""
        return trees.map_leaves(torch.clone, self._state)

    def run(self, inputs: Any) -> Tensor | None:
        """The outputs `(B, C)` for the inputs `(B, D)` of a step, of NumPy or torch.

        None for inputs that do not fit, and where an input, an output or a number of the state is
        not finite. The state is then as it was, and an ordinary call does or says what is due.
        """
        if not self._take(inputs):
            return None
        y = self._inputs
        try:
            for operation in self._operations:
                y = operation(y)
            if not (is_finite(y.numpy()) and is_finite(self._after)):
                return None
        except MISFIT_ERRORS:
            return None
        self._before[...] = self._after  # of all layers at once: an interrupt may come
        y = y.flatten(0, 1)
        return y if self._is_new else y.clone()  # it may be memory of ours

    def _take(self, inputs: Any) -> bool:
        """Copy the inputs of a step; False if they do not fit or are not finite."""
        if isinstance(inputs, np.ndarray):  # memory-mapped ones as well
            fits = inputs.dtype.kind in ("biu" if self._is_index else "f")
            if not fits or inputs.shape != self._array.shape:
                return False
            self._array[...] = inputs
        elif type(inputs) in PLAIN and inputs.is_cpu and _form(inputs) == _form(self._row):
            self._row.copy_(inputs)
        else:
            return False
        return self._is_index or is_finite(self._array)


def is_finite(values: Any) -> bool:
    """Whether all numbers of an array are; False as well if the sum of their squares is not.

    Cost: half a microsecond, a fifth of `np.isfinite(values).all()`.
    """
    return math.isfinite(np.vdot(values, values))  # np.dot warns of infinity


def _prepare_layer(
    layer: nn.RNNBase, inputs: Tensor | None, x: Tensor, memory: Tensor, batch_first: bool
) -> tuple[Callable[[Tensor], Tensor], Tensor, list[Tensor], Tensor]:
    """The calls of a layer for a step.

    Args:
        layer: whose weights stay where they are.
        inputs: memory of ours that every call will get; None for other inputs.
        x: an example `(1, B, D)`.
        memory: two rows, for the state that enters a step and for the one after it.
        batch_first: whether inputs and outputs are `(B, 1, ...)`.

    Returns:
        A function that maps the inputs of a step to outputs, and these, which the next call
        overwrites; the leaves of the state that enters a step, `(L, B, P)`; the rest of the memory.

    Raises:
        ValueError: no kernel runs the layer.
    """
    if backend(layer, x.transpose(0, 1) if layer.batch_first else x).name != "fused":
        raise ValueError
    form = _form(x.transpose(0, 1) if batch_first else x)
    if inputs is not None and _form(inputs) == form:
        x = inputs.view(x.shape)
    else:
        inputs = None
    cell, rows = BY_MODE[layer.mode], (layer.num_layers, x.shape[1])
    widths = cell.widths(layer.hidden_size, layer.proj_size)
    sizes = [math.prod(rows) * width for width in widths]
    y, rest = x.new_empty(layer.num_layers, *x.shape[:2], widths[0]), memory[:, sum(sizes) :]
    entering, leaving = (
        [part.view(*rows, -1) for part in row.split(sizes)] for row in memory[:, : sum(sizes)]
    )
    calls = list[Call]()
    for k, weights in enumerate(layer_weights(layer)):
        h, *others = [leaf[k] for leaf in entering]
        layer_inputs = LayerInputs(cell, x.dtype, x, h, [*others, None][0], weights, None)
        x = y[k]
        call, _ = layer_inputs.call(x, *(leaf[k] for leaf in leaving))
        calls.append(call)
    outputs = x.transpose(0, 1) if batch_first else x
    kernel = core().tt_forward

    def run(values: Tensor) -> Tensor:
        if values is not inputs:
            if _form(values) != form:
                raise ValueError
            values = values.contiguous()
            calls[0].x = values.data_ptr()
        for call in calls:
            check(kernel(call))
        return outputs

    return run, outputs, entering, rest
