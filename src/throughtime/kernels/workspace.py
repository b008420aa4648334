"""The memory and the prepared calls of fused steps: layers, linear readout, loss, all gradients.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`C` outputs of the readout, `L` layers.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from operator import add, attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from throughtime.chunk import Chunk
from throughtime.kernels import recurrent
from throughtime.kernels.cells import Cell
from throughtime.kernels.recurrent import (
    INVALID_TARGET,
    NON_FINITE,
    TYPES,
    Call,
    FusedStep,
    check,
    core,
    saved_size,
)
from throughtime.state import State

_address, _requires_grad = Tensor.data_ptr, attrgetter("requires_grad")


def _assign(weights: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Put gradients into `.grad`, or add them to what a tail that shares a weight has put there."""
    for weight, grad in zip(weights, grads, strict=True):
        if weight.grad is None:
            weight.grad = grad
        elif weight.grad is not grad:
            weight.grad.add_(grad)


def _neighbours(call: Call | FusedStep, first: str, count: int) -> ctypes.Array[Any]:
    """Neighbouring fields of a call for addresses, as an array."""
    return (ctypes.c_void_p * count).from_buffer(call, getattr(type(call), first).offset)


class LayerSizes(NamedTuple):
    """The sizes of a recurrent module, a stack of layers."""

    cell: Cell
    inputs: int
    hidden: int
    projection: int  # 0 for none
    layers: int
    bias: bool

    @property
    def outputs(self) -> int:
        """P."""
        return self.projection or self.hidden


class _ModuleState(NamedTuple):
    """The state of a recurrent module: leaves `(B, L, H)`, in memory one layer after another.

    Attributes:
        name: of the module.
        likes: an empty tensor for each leaf.
        layers: of each layer the fields of its call for the leaves before and after the steps, and
            the bytes from the beginning of each leaf to its part.
    """

    name: str
    likes: list[Tensor]
    layers: list[tuple[ctypes.Array[Any], ctypes.Array[Any], list[int]]]


class Workspace:
    """The memory and the prepared call for a number of steps and lanes; used by one thread.

    Args:
        modules: the sizes of each recurrent module, by its name in the state.
        names: the keys of the state, in order: those of `modules`, and others without leaves.
        readout: C, and the number of weights of the linear readout.
        sizes: T, B, and the type of all numbers.
    """

    def __init__(
        self,
        modules: Mapping[str, LayerSizes],
        names: Sequence[str],
        readout: tuple[int, int],
        sizes: tuple[int, int, torch.dtype],
    ) -> None:
        self._steps, self._lanes, self._dtype = sizes
        self._modules, self._names = modules, tuple(names)
        self._calls = (Call * sum(module.layers for module in modules.values()))()
        self._each = list(self._calls)  # views of them
        self._pinned: list[Tensor] = []  # what the calls point to
        self._outputs: list[Tensor] = []
        self._saved: list[Tensor] = []
        # of each call: its pointers to weights, those to their gradients, and their number
        self._slots: list[tuple[ctypes.Array[Any], ctypes.Array[Any], int]] = []
        self._states: list[_ModuleState] = []
        for name, module in modules.items():
            first = len(self._outputs)
            for i in range(first, first + module.layers):
                self._lay_out(i, module)
            self._states.append(
                self._module_state(name, module, self._each[first : first + module.layers])
            )
        self._each[-1].dy = self._pin(torch.empty_like(self._outputs[-1]))
        self._mean, self._largest = ctypes.c_double(), torch.finfo(self._dtype).max
        classes, weights = readout
        self._step = FusedStep(
            self._calls, len(self._calls), classes=classes, mean=ctypes.pointer(self._mean)
        )
        if weights:
            self._add_slots(self._step, "w", weights)
        self._addresses: list[int] = []  # of the weights, that the calls have
        self._options: tuple[int, int | None] | None = None  # that the calls have
        # of the readout: outputs of so many steps, and scratch memory for as many or fewer
        self._like = torch.empty((0, self._lanes, classes), dtype=self._dtype, device="cpu")
        self._scratch = self._like
        self._mask: Tensor | None = None
        self._targets = _neighbours(self._step, "targets", 3)  # with mask and outputs
        self._readout = 0, 0, 0  # the loss, steps and valid rows that the call has
        self._no_state: dict[str, State] = dict.fromkeys(names, ())
        # the state after the last run, leaf by leaf, and the addresses
        self._last: list[Tensor] = []
        self._last_addresses: list[int] = []

    def _pin(self, tensor: Tensor) -> int:
        self._pinned.append(tensor)
        return tensor.data_ptr()

    def _module_state(self, name: str, module: LayerSizes, calls: Sequence[Call]) -> _ModuleState:
        widths = module.cell.widths(module.hidden, module.projection)
        shapes = [(module.layers, self._lanes, width) for width in widths]
        likes = [torch.empty(shape, dtype=self._dtype, device="cpu") for shape in shapes]
        layers = [
            (
                _neighbours(call, "h0", len(likes)),
                _neighbours(call, "h_end", len(likes)),
                [like[i].data_ptr() - like.data_ptr() for like in likes],
            )
            for i, call in enumerate(calls)
        ]
        return _ModuleState(name, [like.transpose(0, 1) for like in likes], layers)

    def _lay_out(self, i: int, module: LayerSizes) -> None:
        """Fill in the fields of a layer's call that never change."""
        call, outputs = self._each[i], module.outputs
        inputs = self._outputs[-1].shape[2] if i else module.inputs
        kind, number_type = module.cell.code, TYPES[self._dtype]
        sizes = kind, number_type, self._steps, self._lanes, inputs, module.hidden, outputs
        names = ("kind", "type", "steps", "lanes", "inputs", "hidden", "outputs")
        for name, size in zip(names, sizes, strict=True):
            setattr(call, name, size)
        if i:
            call.x = self._outputs[-1].data_ptr()
            call.dx = self._each[i - 1].dy = self._pin(torch.empty_like(self._outputs[-1]))
        shape = self._steps, self._lanes, outputs
        self._outputs.append(torch.empty(shape, dtype=self._dtype, device="cpu"))
        self._saved.append(torch.empty(saved_size(*sizes), dtype=self._dtype, device="cpu"))
        call.y, call.saved = self._outputs[-1].data_ptr(), self._saved[-1].data_ptr()
        self._add_slots(call, "w_ih", 4 if module.bias else 2)
        if module.projection:
            self._add_slots(call, "w_hr", 1)

    def _add_slots(self, call: Call | FusedStep, first: str, count: int) -> None:
        """The fields of a call for weights, and those for their gradients."""
        weights, grads = (_neighbours(call, name, count) for name in (first, "d" + first))
        self._slots.append((weights, grads, count))

    def read_state(self, state: State) -> list[Tensor] | None:
        """The leaves as kernels read them; None if they do not fit: kernels check no size."""
        if type(state) is not dict or tuple(state) != self._names:
            return None
        tensors: list[Tensor] = []
        for module in self._states:
            entering = state[module.name]
            if isinstance(entering, Tensor):
                entering = (entering,)
            if len(entering) != len(module.likes):
                return None
            tensors += entering
        if (  # the usual case: the state that the last run returned, in the same memory
            self._last
            and all(map(is_, tensors, self._last))
            and list(map(_address, tensors)) == self._last_addresses
            and not any(map(_requires_grad, tensors))
        ):
            return tensors
        return self._lay_out_state(tensors)

    def _lay_out_state(self, state: Sequence[Tensor]) -> list[Tensor] | None:
        """The leaves of another state, copied where their layout is another one."""
        tensors: list[Tensor] = []
        likes = [like for module in self._states for like in module.likes]
        for like, tensor in zip(likes, state, strict=True):
            if (
                type(tensor) is not Tensor
                or tensor.dtype is not self._dtype
                or tensor.requires_grad
                or tensor.shape != like.shape
                or not tensor.is_cpu
                or tensor.is_neg()
            ):
                return None
            same = tensor.stride() == like.stride()
            tensors.append(tensor if same else tensor.transpose(0, 1).contiguous())
        return tensors

    def set_readout(self, loss: int, chunk: Chunk) -> Tensor:
        """Set what the readout of the next run compares with its outputs; returns these.

        Args:
            loss: `CROSS_ENTROPY` or `SQUARED_ERROR`.
            chunk: the last steps of the run, whose losses count; its targets are contiguous.
        """
        call, tensor, self._mask = self._step, chunk._targets, None
        if tensor is None:
            raise RuntimeError("a chunk without targets")
        steps, valid = chunk.steps, chunk.valid_steps
        if valid != steps * self._lanes:
            self._mask = chunk.mask.contiguous()
        if (loss, steps, valid) != self._readout:
            call.loss, call.steps, call.valid = self._readout = loss, steps, valid
        if steps != len(self._like):
            self._like = self._like.new_empty((steps, *self._like.shape[1:]))
            size = recurrent.fused_scratch_size(call)
            if size > self._scratch.numel():
                self._scratch = self._like.new_empty(size)
            call.scratch = self._scratch.data_ptr()
        outputs = torch.empty_like(self._like)
        self._targets[:] = (
            tensor.data_ptr() + chunk._first * tensor.stride(0) * tensor.element_size(),
            None if self._mask is None else self._mask.data_ptr(),
            outputs.data_ptr(),
        )
        return outputs

    def run(
        self,
        steps: Chunk,
        inputs: tuple[Tensor, int],
        dx: Tensor | None,
        weights: tuple[Sequence[Tensor], list[int]],
        state: Sequence[Tensor],
        tail: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[int, Tensor, dict[str, State]]:
        """Make the update: `.grad`, which is None so far, gets the gradients of valid targets.

        Args:
            steps: of the window.
            inputs: of the first layer: a contiguous tensor, and the row of the first step.
            dx: receives their gradient.
            weights: all of them, layer by layer and the readout's last; and their addresses.
            state: as `read_state` returned it.
            tail: in place of a linear readout: maps the outputs `(T, B, P)` of the last layer to
                their gradient. The next run overwrites them.

        Returns:
            The result of `fused_step`, the mean loss, and the state after the last step.
        """
        parameters, addresses = weights
        targets = list(map(torch.empty_like, parameters))
        targets_at, changed, at = list(map(_address, targets)), addresses != self._addresses, 0
        for weight_slots, grad_slots, count in self._slots:
            if changed:
                weight_slots[:] = addresses[at : at + count]
            grad_slots[:] = targets_at[at : at + count]
            at += count
        self._addresses = addresses
        resets = steps.resets.contiguous() if steps.any_reset else None
        options = torch.get_num_threads(), None if resets is None else resets.data_ptr()
        if options != self._options:
            for call in self._each:
                call.threads, call.resets = options
            self._options = options
        call = self._each[0]
        x, row = inputs
        call.x = x.data_ptr() + row * x.stride(0) * self._dtype.itemsize
        call.dx = None if dx is None else dx.data_ptr()
        after = self._point_states(state)
        code = recurrent.fused_step(self._step) if tail is None else self._run_around(tail)
        if code == INVALID_TARGET:
            return code, self._like, after
        if tail is None:
            for weight, grad in zip(parameters, targets, strict=True):
                weight.grad = grad
        else:
            _assign(parameters, targets)
        return *self._read_mean(code), after

    def _read_mean(self, code: int) -> tuple[int, Tensor]:
        """The result of `fused_step`, and the mean loss: infinite if it is too large for the type.

        The kernel adds in double precision.
        """
        mean = self._mean.value
        if not abs(mean) <= self._largest:
            code, mean = NON_FINITE, mean * math.inf
        return code, self._like.new_full((), mean)

    def _run_around(self, tail: Callable[[Tensor], Tensor]) -> int:
        """The forward passes of all layers, the tail, and their backward passes."""
        for call in self._each:
            check(core().tt_forward(call))
        dy = tail(self._outputs[-1]).contiguous()
        self._each[-1].dy = dy.data_ptr()
        for call in reversed(self._each):
            check(core().tt_backward(call))
        return 0

    def _point_states(self, state: Sequence[Tensor]) -> dict[str, State]:
        """Point the calls to the states; returns the one after the last step."""
        after, entering = self._no_state.copy(), list(map(_address, state))
        self._last, self._last_addresses = [], []
        at = 0
        for name, likes, layers in self._states:
            ends = list(map(torch.empty_like, likes))
            stop = at + len(ends)
            sources, targets = entering[at:stop], list(map(_address, ends))
            for i, (before, leaving, offsets) in enumerate(layers):
                before[:] = list(map(add, sources, offsets)) if i else sources
                leaving[:] = list(map(add, targets, offsets)) if i else targets
            self._last += ends
            self._last_addresses += targets
            after[name] = tuple(ends) if len(ends) > 1 else ends[0]
            at = stop
        return after

    def state_at(self, step: int, entering: State) -> State:
        """The state entering a step of the last run, which `entering` entered."""
        if step == 0:
            return entering
        state = self._no_state.copy()
        first = 0
        for name, module in self._modules.items():
            rows = range(first, first + module.layers)
            h = torch.stack([self._outputs[i][step - 1] for i in rows], 1)
            if len(module.cell.states) == 2:
                cells = [self._cell_states(i, module.hidden)[step - 1] for i in rows]
                state[name] = h, torch.stack(cells, 1)
            else:
                state[name] = h
            first += module.layers
        return state

    def _cell_states(self, i: int, hidden: int) -> Tensor:
        """The c of every step, `(T, B, H)`: saved after the gates, in whole vectors."""
        saved, rows = self._saved[i], self._steps * self._lanes
        width = saved.numel() // (5 * rows)
        return saved[4 * rows * width :].view(self._steps, self._lanes, width)[..., :hidden]
