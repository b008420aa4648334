"""The buffers of an update in one call, the calls that are made on them, and who is told what they
capture.

Everything is laid out once for a number of steps and lanes; an update points the calls to what is
its own: inputs, targets, states, weights and their gradients, each of which the user may have
moved. What is looked at before stands in `whole.py`.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `C` outputs, `L` layers.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from throughtime.chunk import Chunk
from throughtime.gradient.schedule import Window
from throughtime.gradient.window import Run
from throughtime.kernels import fused_step as kernel
from throughtime.kernels.cells import BY_MODE
from throughtime.kernels.recurrent import TYPES, Call, saved_size
from throughtime.nn.layers import Recurrent
from throughtime.state import State


class Result(NamedTuple):
    """What an update gave: its loss, a scalar, and the window as if it had been run.

    Whether all gradients are finite.
    """

    loss: Tensor
    run: Run
    finite: bool


class Asked(NamedTuple):
    """One update, as `whole.whole_update` is given it."""

    steps: Chunk
    chunk: Chunk
    edge: State
    plan: Window
    loss: int  # of `kernels.whole`


class Captures(Protocol):
    """Memory for what the calls of an update capture (`kernels.recurrent.Captured`), and who is told of it."""

    def point(self) -> None:
        """Points the calls to memory that is free."""
        ...

    def keep(self) -> None:
        """They have been made: what they captured counts."""
        ...


class Listener(Protocol):
    """Who watches a layer and is content with what its kernel captures, as `tt.trace` is."""

    @property
    def together(self) -> object:
        """The same for all layers that are told of as one pass."""
        ...

    @property
    def tracks(self) -> Sequence[str]:
        """What each of the layers inside, whose calls are told of apart, goes by."""
        ...

    def captures(self, calls: Sequence[tuple[str, Call]]) -> Captures:
        """Lays out memory for these calls, each with its track."""
        ...


LISTENERS: dict[
    nn.Module, Listener
] = {}  # by layer; it stands in for the layer's forward, which need not be called


class Leaf(NamedTuple):
    """A leaf of the state of one module, `(B, L, H)` as a net has it, the layers one after another in memory as kernels have them."""

    size: tuple[int, int, int]
    stride: tuple[int, int, int]
    layer: int  # bytes from one layer to the next

    @classmethod
    def of(cls, lanes: int, layers: int, width: int, dtype: torch.dtype) -> "Leaf":
        return cls(
            (lanes, layers, width), (width, lanes * width, 1), lanes * width * dtype.itemsize
        )

    def fits(self, leaf: Tensor, dtype: torch.dtype) -> bool:
        """Whether a kernel may read it."""
        if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.requires_grad:
            return False
        return leaf.shape == self.size and leaf.is_cpu and not leaf.is_neg()

    def laid(self, leaf: Tensor) -> Tensor:
        """The leaf as it lies in memory for a kernel; itself where an update made it."""
        return leaf if leaf.stride() == self.stride else leaf.transpose(0, 1).contiguous()


class Work:
    """The buffers of a number of steps and lanes, and the calls that are made on them."""

    def __init__(
        self,
        layers: Mapping[str, Recurrent],
        links: tuple[str, ...],
        readout: nn.Linear,
        sizes: tuple[int, int, torch.dtype],
    ) -> None:
        self.steps, self.lanes, self.dtype = steps, lanes, dtype = sizes
        self.inputs = steps, lanes, next(iter(layers.values())).input_size
        self._layers, self._links = layers, links
        self._calls = (Call * sum(layer.num_layers for layer in layers.values()))()
        self._each = list(self._calls)  # views of them
        self._held: list[Tensor] = []  # what the calls point to
        self._names: list[
            tuple[Call | kernel.FusedStep, str, str]
        ] = []  # of each weight: whose, as what, and its gradient
        self._outputs: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._leaves: dict[str, list[Leaf]] = {}
        self._stacks: dict[str, list[Call]] = {}
        for name, layer in layers.items():
            widths = [
                layer.proj_size or layer.hidden_size,
                *([layer.hidden_size] if layer.mode == "LSTM" else []),
            ]
            self._leaves[name] = [
                Leaf.of(lanes, layer.num_layers, width, dtype) for width in widths
            ]
            first = len(self._outputs)
            for i in range(first, first + layer.num_layers):
                self._lay(i, layer)
            self._stacks[name] = self._each[first : first + layer.num_layers]
        self._each[-1].dy = self._hold(torch.empty_like(self._outputs[-1]))
        self._mean = ctypes.c_double()
        classes = readout.out_features
        self._whole = kernel.FusedStep(
            self._calls, len(self._calls), classes=classes, mean=ctypes.pointer(self._mean)
        )
        self._counted, self._room = 0, torch.empty(0)  # for the readout of so many steps
        self._names += [
            (self._whole, name, "d" + name)
            for name in ("w", "b")[: len(list(readout.parameters()))]
        ]
        self._row = lanes * classes, classes, 1  # strides of the outputs
        self._heard: list[Callable[[], object]] = [_nobody] * len(
            layers
        )  # weakly: a trace that is over may go
        self._captures: list[Captures] = []

    def _hold(self, tensor: Tensor) -> int:
        self._held.append(tensor)
        return tensor.data_ptr()

    def _lay(self, i: int, layer: Recurrent) -> None:
        """Fills in what a layer's call is always given."""
        call, cell = self._each[i], BY_MODE[layer.mode]
        outputs = layer.proj_size or layer.hidden_size
        inputs = self._outputs[-1].shape[2] if i else layer.input_size
        sizes = (
            cell.code,
            TYPES[self.dtype],
            self.steps,
            self.lanes,
            inputs,
            layer.hidden_size,
            outputs,
        )
        for name, size in zip(
            ("kind", "type", "steps", "lanes", "inputs", "hidden", "outputs"), sizes, strict=True
        ):
            setattr(call, name, size)
        if i:
            call.x = self._outputs[-1].data_ptr()
            call.dx = self._each[i - 1].dy = self._hold(torch.empty_like(self._outputs[-1]))
        self._outputs.append(
            torch.empty(self.steps, self.lanes, outputs, dtype=self.dtype, device="cpu")
        )
        self._saved.append(torch.empty(saved_size(*sizes), dtype=self.dtype, device="cpu"))
        call.y, call.saved = self._outputs[-1].data_ptr(), self._saved[-1].data_ptr()
        names = ("w_ih", "w_hh", "b_ih", "b_hh") if layer.bias else ("w_ih", "w_hh")
        self._names += [
            (call, name, "d" + name) for name in (*names, *(("w_hr",) if layer.proj_size else ()))
        ]

    def reads(self, edge: State) -> bool:
        """Whether the state is what the kernels read, who look at no size."""
        if not isinstance(edge, dict) or tuple(edge) != self._links:
            return False
        for name, leaves in self._leaves.items():
            found = edge[name]
            if isinstance(found, Tensor):
                found = (found,)
            if len(found) != len(leaves):
                return False
            for leaf, tensor in zip(leaves, found, strict=True):
                if not leaf.fits(tensor, self.dtype):
                    return False
        return True

    def update(
        self,
        x: Tensor,
        dx: Tensor | None,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        asked: Asked,
    ) -> Result | None:
        """As `whole.whole_update`, once it is known that it can be.

        `grads` the gradients that are there, `dx` where that of `x` goes.
        """
        outputs = x.new_empty_strided((asked.chunk.steps, self.lanes, self._row[1]), self._row)
        fresh = Tensor not in map(type, grads)
        missing = (
            torch.empty_like if fresh else torch.zeros_like
        )  # one that is missing beside others begins with zeros
        made = [
            missing(weight) if grad is None else grad
            for weight, grad in zip(weights, grads, strict=True)
        ]
        after, kept = self._enter(x, asked, accumulate=not fresh)
        self._each[0].dx = None if dx is None else dx.data_ptr()
        kept += self._read_out(asked, outputs, accumulate=not fresh)
        self._weigh(weights, made)
        captures = self._listening()
        code = kernel.step(self._whole)
        del kept
        if code == kernel.INVALID_TARGET:
            return None  # torch says which target, and of how many classes
        for told in captures:
            told.keep()
        for weight, had, grad in zip(weights, grads, made, strict=True):
            if had is None:
                weight.grad = grad
        if not fresh:
            torch.autograd.graph.increment_version(made)
        plan, edge = asked.plan, asked.edge
        between = (
            after if plan.keep == plan.stop else self._within(plan.keep) if plan.keep else edge
        )
        return Result(
            outputs.new_full((), self._mean.value),
            Run(outputs, after, between),
            code != kernel.NON_FINITE,
        )

    def _listening(self) -> Sequence[Captures]:
        """Who is told of this update, the calls pointed to memory for it.

        Laid out anew where somebody has come or gone.
        """
        if not LISTENERS and not self._captures:  # the usual case
            return ()
        for layer, heard in zip(self._layers.values(), self._heard, strict=True):
            listener = heard()
            if LISTENERS.get(layer) is not listener or (listener is None and heard is not _nobody):
                self._lay_out()
                break
        for told in self._captures:
            told.point()
        return self._captures

    def _lay_out(self) -> None:
        """Memory for what is captured, together for all layers of a trace."""
        listeners = [LISTENERS.get(layer) for layer in self._layers.values()]
        heard: list[Callable[[], object]] = [
            _nobody if one is None else ref(one) for one in listeners
        ]
        self._captures, self._heard = [], [_unknown] * len(listeners)  # until all is laid out
        groups: dict[object, tuple[Listener, list[tuple[str, Call]]]] = {}
        for listener, own in zip(listeners, self._stacks.values(), strict=True):
            for call in own:
                call.squares = call.entering = call.kept = None
            if listener is not None:
                groups.setdefault(listener.together, (listener, []))[1].extend(
                    zip(listener.tracks, own, strict=True)
                )
        self._captures, self._heard = (
            [listener.captures(group) for listener, group in groups.values()],
            heard,
        )

    def _enter(self, x: Tensor, asked: Asked, *, accumulate: bool) -> tuple[State, list[Tensor]]:
        """Points the calls to inputs and states.

        The state after them, and what must live until they are made.
        """
        steps, threads = asked.steps, torch.get_num_threads()
        resets = steps.resets.contiguous() if steps.any_reset else None
        at, kept = None if resets is None else resets.data_ptr(), [] if resets is None else [resets]
        after: dict[str, State] = dict.fromkeys(self._links, ())
        for name, leaves in self._leaves.items():
            state = asked.edge[name]
            laid = [
                leaf.laid(tensor)
                for leaf, tensor in zip(
                    leaves, (state,) if isinstance(state, Tensor) else state, strict=True
                )
            ]
            ends = [x.new_empty_strided(leaf.size, leaf.stride) for leaf in leaves]
            for k, call in enumerate(self._stacks[name]):
                call.threads, call.accumulate, call.resets = threads, accumulate, at
                call.h0, call.h_end = (
                    laid[0].data_ptr() + k * leaves[0].layer,
                    ends[0].data_ptr() + k * leaves[0].layer,
                )
                if len(leaves) == 2:
                    call.c0, call.c_end = (
                        laid[1].data_ptr() + k * leaves[1].layer,
                        ends[1].data_ptr() + k * leaves[1].layer,
                    )
            kept += laid
            after[name] = tuple(ends) if len(ends) == 2 else ends[0]
        self._each[0].x = x.data_ptr()
        return after, kept

    def _weigh(self, weights: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Points layers and readout to their weights, and to the gradients that are made of them."""
        for (of, name, gradient), weight, grad in zip(self._names, weights, made, strict=True):
            setattr(of, name, weight.data_ptr())
            setattr(of, gradient, grad.data_ptr())

    def _read_out(self, asked: Asked, outputs: Tensor, *, accumulate: bool) -> list[Tensor]:
        """Points the readout to outputs and targets; what must live until it is made."""
        whole, chunk = self._whole, asked.chunk
        mask = None if chunk.valid == chunk.steps * chunk.lanes else chunk.mask.contiguous()
        whole.loss, whole.accumulate, whole.steps, whole.valid = (
            asked.loss,
            accumulate,
            chunk.steps,
            chunk.valid,
        )
        if chunk.steps > self._counted:
            self._counted, self._room = (
                chunk.steps,
                torch.empty(kernel.scratch_size(whole), dtype=self.dtype, device="cpu"),
            )
            whole.room = self._room.data_ptr()
        whole.targets = None if chunk.targets is None else chunk.targets.data_ptr()
        whole.mask, whole.outputs = None if mask is None else mask.data_ptr(), outputs.data_ptr()
        return [] if mask is None else [mask]

    def _within(self, step: int) -> State:
        """The state entering a step within the window."""
        found: dict[str, State] = dict.fromkeys(self._links, ())
        at = 0
        for name, layer in self._layers.items():
            rows = range(at, at + layer.num_layers)
            leaves = [torch.stack([self._outputs[i][step - 1] for i in rows], 1)]
            if layer.mode == "LSTM":
                leaves.append(torch.stack([self._cells(i, layer)[step - 1] for i in rows], 1))
            found[name] = tuple(leaves) if len(leaves) == 2 else leaves[0]
            at += layer.num_layers
        return found

    def _cells(self, i: int, layer: Recurrent) -> Tensor:
        """The c of every step, `(T, B, H)`: behind the gates in what was saved, in whole vectors."""
        wide = self._saved[i].numel() // (5 * self.steps * self.lanes)
        return self._saved[i][4 * self.steps * self.lanes * wide :].view(
            self.steps, self.lanes, wide
        )[..., : layer.hidden_size]


def _nobody() -> None:
    """Listens to a layer that nobody listens to."""


def _unknown() -> None:
    """Stands for who listens while that is laid out, and after an error in it: nobody is this."""
