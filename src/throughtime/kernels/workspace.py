"""The memory and the prepared calls of fused steps: layers, linear readout, loss, all gradients.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`C` outputs of the readout, `L` layers.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from throughtime.chunk import Chunk
from throughtime.kernels import recurrent
from throughtime.kernels.cells import BY_MODE
from throughtime.kernels.library import TYPES, checked, core
from throughtime.kernels.recurrent import (
    INVALID_TARGET,
    NON_FINITE,
    Call,
    FusedStep,
    saved_size,
)
from throughtime.state import State


class _Leaf(NamedTuple):
    """A leaf: an empty tensor like it, the bytes of a layer, its fields in the calls."""

    like: Tensor
    size: int
    before: str
    after: str


class _ModuleState(NamedTuple):
    """The state of a recurrent module: leaves `(B, L, H)`, in memory one layer after another.

    Attributes:
        name: of the module.
        leaves: in the order of the cell.
        calls: of its layers.
        histories: of each layer the values of each leaf after every step of the last run.
    """

    name: str
    leaves: list[_Leaf]
    calls: list[Call]
    histories: list[list[Tensor]]


class Workspace:
    """The memory and the prepared call for a number of steps and lanes; used by one thread.

    Args:
        modules: stacks of recurrent layers, by name in the state; each reads the one before.
        names: the keys of the state, in order: those of `modules`, and others without leaves.
        readout: of the last one's outputs. None: a tail, see `run`.
        sizes: T, B, and the type of all numbers.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.RNNBase],
        names: Sequence[str],
        readout: nn.Linear | None,
        sizes: tuple[int, int, torch.dtype],
    ) -> None:
        self._steps, self._lanes, self._dtype = sizes
        self._names = tuple(names)
        self._calls = (Call * sum(module.num_layers for module in modules.values()))()
        self._each: list[Call] = []  # views of them
        self._pinned: list[Tensor] = []  # what they point to
        # their fields for weights and for gradients, in order
        self._slots: list[tuple[Call | FusedStep, str, str]] = []
        self._outputs = self._like = torch.empty(0, dtype=self._dtype, device="cpu")
        self._states = [self._lay_out(*module) for module in modules.items()]
        self._mean, self._largest = ctypes.c_double(), torch.finfo(self._dtype).max
        self._classes = 0 if readout is None else readout.out_features
        self._step = step = FusedStep(
            self._calls,
            len(self._calls),
            steps=self._steps,
            classes=self._classes,
            mean=ctypes.pointer(self._mean),
        )
        step.scratch = self._pin(core().tt_fused_step_scratch(ctypes.byref(step))).data_ptr()
        if readout is not None:
            pairs = zip(("w", "b"), readout.parameters(), strict=False)  # a bias may be missing
            self._slots += [(step, name, "d" + name) for name, _ in pairs]
        self._mask: Tensor | None = None

    def _pin(self, *shape: int) -> Tensor:
        self._pinned.append(self._like.new_empty(shape))
        return self._pinned[-1]

    def _lay_out(self, name: str, module: nn.RNNBase) -> _ModuleState:
        """Fill in the fields of a module's calls that never change."""
        cell, hidden = BY_MODE[module.mode], module.hidden_size
        widths = outputs, *_ = cell.widths(hidden, module.proj_size)
        kind = TYPES[self._dtype]
        inputs, histories, first = module.input_size, list[list[Tensor]](), len(self._each)
        weights = ["w_ih", "w_hh"]
        if module.bias:
            weights += ["b_ih", "b_hh"]
        if module.proj_size:
            weights.append("w_hr")
        for i in range(first, first + module.num_layers):
            sizes = cell.code, kind, self._steps, self._lanes, inputs, hidden, outputs
            self._outputs, dy = (self._pin(self._steps, self._lanes, outputs) for _ in range(2))
            saved, inputs = self._pin(saved_size(*sizes)), outputs
            self._calls[i] = Call(*sizes)
            call = self._calls[i]
            call.y, call.dy, call.saved = map(Tensor.data_ptr, (self._outputs, dy, saved))
            if i:
                call.x, call.dx = self._each[-1].y, self._each[-1].dy
            self._each.append(call)
            self._slots += [(call, name, "d" + name) for name in weights]
            histories.append([self._outputs])
            if len(widths) > 1:  # c is saved after the gates, in whole vectors
                cells = saved.view(5, self._steps, self._lanes, -1)[4]
                histories[-1].append(cells[..., :hidden])
        leaves: list[_Leaf] = []
        for leaf, width in zip(cell.states, widths, strict=True):
            like = self._like.new_empty(module.num_layers, self._lanes, width)
            size = like[0].nbytes
            leaves.append(_Leaf(like.transpose(0, 1), size, leaf + "0", leaf + "_end"))
        return _ModuleState(name, leaves, self._each[first:], histories)

    def read_state(self, state: State) -> list[Tensor] | None:
        """The leaves as kernels read them; None if they do not fit: kernels check no size."""
        if type(state) is not dict or tuple(state) != self._names:
            return None
        tensors: list[Tensor] = []
        for module in self._states:
            entering = state[module.name]
            if isinstance(entering, Tensor):
                entering = (entering,)
            if len(entering) != len(module.leaves):
                return None
            for tensor, (like, *_) in zip(entering, module.leaves, strict=True):
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
        call, targets, self._mask = self._step, chunk._targets, None
        if targets is None:
            raise RuntimeError("a chunk without targets")
        call.loss, call.steps, call.valid = loss, chunk.steps, chunk.valid_steps
        if chunk.valid_steps != chunk.steps * self._lanes:
            self._mask = chunk.mask.contiguous()
        outputs = self._like.new_empty(chunk.steps, self._lanes, self._classes)
        row = chunk._first * targets.stride(0) * targets.element_size()
        call.targets, call.outputs = targets.data_ptr() + row, outputs.data_ptr()
        call.mask = None if self._mask is None else self._mask.data_ptr()
        return outputs

    def run(
        self,
        steps: Chunk,
        inputs: tuple[Tensor, int],
        dx: Tensor | None,
        weights: Sequence[Tensor],
        state: Sequence[Tensor],
        tail: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[int, Tensor, dict[str, State]]:
        """Make the update: `.grad`, which is None so far, gets the gradients of valid targets.

        Args:
            steps: of the window.
            inputs: of the first layer: a contiguous tensor, and the row of the first step.
            dx: receives their gradient.
            weights: all of them, layer by layer and the readout's last.
            state: as `read_state` returned it.
            tail: in place of a linear readout: maps the outputs `(T, B, P)` of the last layer to
                their gradient. The next run overwrites them.

        Returns:
            The result of `fused_step`, the mean loss, and the state after the last step. The mean
            is infinite if it is too large for the type: the kernel adds in double precision.
        """
        grads = list(map(torch.empty_like, weights))
        for (call, name, of_grad), weight, grad in zip(self._slots, weights, grads, strict=True):
            setattr(call, name, weight.data_ptr())
            setattr(call, of_grad, grad.data_ptr())
        resets, threads = (
            steps.resets.contiguous() if steps.any_reset else None,
            torch.get_num_threads(),
        )
        for call in self._each:
            call.threads, call.resets = threads, None if resets is None else resets.data_ptr()
        call, (x, row) = self._each[0], inputs
        call.x = x.data_ptr() + row * x.stride(0) * self._dtype.itemsize
        call.dx = None if dx is None else dx.data_ptr()
        after = self._point_states(state)
        code = recurrent.fused_step(self._step) if tail is None else self._run_around(tail)
        mean = self._mean.value
        if code != INVALID_TARGET:
            for weight, grad in zip(weights, grads, strict=True):
                if weight.grad is None:
                    weight.grad = grad
                elif weight.grad is not grad:  # a tail that shares the weight has put its own there
                    weight.grad.add_(grad)
            if not abs(mean) <= self._largest:
                code, mean = NON_FINITE, mean * math.inf
        return code, self._like.new_full((), mean), after

    def _run_around(self, tail: Callable[[Tensor], Tensor]) -> int:
        """The forward passes of all layers, the tail, and their backward passes."""
        for call in self._each:
            checked(core().tt_forward(ctypes.byref(call)))
        dy = tail(self._outputs).contiguous()
        self._each[-1].dy = dy.data_ptr()
        for call in reversed(self._each):
            checked(core().tt_backward(ctypes.byref(call)))
        return 0

    def _point_states(self, state: Sequence[Tensor]) -> dict[str, State]:
        """Point the calls to the states; returns the one after the last step."""
        after: dict[str, State] = dict.fromkeys(self._names, ())
        entering = iter(state)
        for name, leaves, calls, _ in self._states:
            ends = [torch.empty_like(leaf.like) for leaf in leaves]
            for leaf, end in zip(leaves, ends, strict=True):
                source, target = next(entering).data_ptr(), end.data_ptr()
                for i, call in enumerate(calls):
                    setattr(call, leaf.before, source + i * leaf.size)
                    setattr(call, leaf.after, target + i * leaf.size)
            after[name] = _module_state(ends)
        return after

    def state_at(self, step: int, entering: State) -> State:
        """The state entering a step of the last run, which `entering` entered."""
        if step == 0:
            return entering
        state: dict[str, State] = dict.fromkeys(self._names, ())
        for module in self._states:
            layers = zip(*module.histories, strict=True)
            state[module.name] = _module_state(
                [torch.stack([values[step - 1] for values in leaf], 1) for leaf in layers]
            )
        return state


def _module_state(leaves: Sequence[Tensor]) -> State:
    return tuple(leaves) if len(leaves) > 1 else leaves[0]
