"""An update in one call of the compiled core, where a net and its loss allow it.

Outside arithmetic such an update spends much on a graph and some fifteen operators: for a small net
(LSTM of 50 units, one lane, 100 steps) more than on the arithmetic. So `tt.updates` makes one call
wherever the result is the same: an `nn.Sequential` of `tt.nn` layers and an `nn.Linear`, after
modules that carry nothing (the front); `nn.CrossEntropyLoss` or `nn.MSELoss` with their defaults;
no hooks on modules, or on the parameters of layers and readout, no ties among these, no autocast,
no active torch mode or profiler. A front with weights, such as an `nn.Embedding`, learns by
autograd, from the gradient of the first layer's inputs. The gradients are those of the graph to
rounding. Hooks on nodes of the graph, or on tensors that it saves, do not run. Buffers are reused
from one update to the next, for as long as the net exists.

We re-check everything the user may change before each update and cache only what depends on shapes.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`C` outputs, `L` layers.
"""

import cmath
import ctypes
from collections.abc import Sequence
from itertools import pairwise, repeat, takewhile
from operator import is_, itemgetter
from threading import get_ident
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled as profiler_enabled  # as torch's optimizers do
from torch.nn.modules import module as torch_modules

from throughtime.carry.carried import MISFIT_ERRORS, Carried
from throughtime.carry.layers import ChainAdapter, LayerAdapter, StatelessAdapter
from throughtime.chunk import Chunk
from throughtime.gradient.objective import IGNORED, Objective
from throughtime.gradient.schedule import Window
from throughtime.kernels import recurrent as kernel
from throughtime.kernels.cells import BY_MODE
from throughtime.kernels.dispatch import active_torch_modes, static_backend
from throughtime.kernels.recurrent import TYPES, Call, saved_size
from throughtime.nn.layers import GRU, LSTM, RNN, Recurrent, weight_shapes
from throughtime.state import State

FUSED_LAYERS = {LSTM, GRU, RNN}  # a subclass may compute something else
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
# plain attributes of a layer, which the user may write to
_settings = itemgetter(
    "mode", "input_size", "hidden_size", "proj_size", "num_layers", "bias", "batch_first"
)
_GLOBAL_HOOKS = (
    torch_modules._global_forward_hooks,
    torch_modules._global_forward_pre_hooks,
    torch_modules._global_backward_hooks,
    torch_modules._global_backward_pre_hooks,
)


class FusedResult(NamedTuple):
    """The result of an update whose gradient has been added to `.grad`.

    Attributes:
        loss: a scalar.
        outputs: `(T, B, C)` of the steps that count.
        state: after the last step.
        edge: the state entering step `keep` of the window.
        finite: whether all gradients are.
    """

    loss: Tensor
    outputs: Tensor
    state: State
    edge: State
    finite: bool


def try_fused(
    net: Carried, steps: Chunk, chunk: Chunk, edge: State, window: Window, objective: Objective
) -> FusedResult | None:
    """Add the gradient of the loss of a window to `.grad` in one call, if that is possible.

    Args:
        net: made by `tt.carry`.
        steps: of the window.
        chunk: the last of them, whose losses count.
        edge: the state entering the first step.
        window: the plan.
        objective: the loss.

    Returns:
        The result; None if a graph must be built instead, and nothing has been changed.
    """
    try:
        fused = _nets[net]
    except KeyError:
        fused = _nets[net] = _match(net)
    if fused is None or window.start:
        return None
    return fused.update(net, steps, chunk, edge, window, objective)


_nets: "WeakKeyDictionary[Carried, _FusedNet | None]" = WeakKeyDictionary()


def _match(net: Carried) -> "_FusedNet | None":
    """The parts of a net of fused layers and a linear readout; None for any other net."""
    adapter = net.adapter
    if not isinstance(adapter, ChainAdapter):
        return None
    *below, (_, top) = adapter.links.items()
    front = {
        name: link
        for name, link in takewhile(lambda pair: isinstance(pair[1], StatelessAdapter), below)
        if isinstance(link, StatelessAdapter)
    }
    layers = {
        name: link.module
        for name, link in below
        if isinstance(link, LayerAdapter) and isinstance(link.module, Recurrent)
    }
    if not layers or len(front) + len(layers) < len(below):
        return None
    if not isinstance(top, StatelessAdapter) or not isinstance(top.module, nn.Linear):
        return None
    for lower, upper in pairwise(layers.values()):
        if upper.input_size != (lower.proj_size or lower.hidden_size):
            return None
    return _FusedNet(adapter, front, layers, top.module)


class _FusedNet:
    """A net of fused layers and a linear readout; `front` prepares the inputs."""

    def __init__(
        self,
        adapter: ChainAdapter,
        front: dict[str, StatelessAdapter],
        layers: dict[str, Recurrent],
        readout: nn.Linear,
    ) -> None:
        self._adapter, self._front, self._layers, self._readout = adapter, front, layers, readout
        before = tuple(link.module for link in front.values())
        self._front_adapter = ChainAdapter(nn.Sequential(*before), before, front)
        # set when the front has returned what no kernel reads, or has changed layers or readout
        self._declined = False
        modules = [adapter.module, *(link.module for link in front.values())]
        modules += [*layers.values(), readout]
        self._instances = [module.__dict__ for module in modules]
        self._children = adapter.module._modules
        self._stack = [(layer, _settings(layer.__dict__)) for layer in layers.values()]
        self._bias = readout._parameters["bias"] is not None
        self._slots: list[tuple[dict[str, Any], str]] = []  # of every weight
        self._shapes: list[tuple[int, ...]] = []
        self._buffers: dict[tuple[int, int, int, torch.dtype], _Buffers] = {}
        self._kernel_fits: dict[tuple[int, torch.dtype], bool] = {}
        # the weights that passed all checks, and their addresses then
        self._checked: list[Tensor] = []
        self._addresses: list[int] = []
        outputs = 0
        for layer in layers.values():
            outputs = layer.proj_size or layer.hidden_size
            first, later = _weight_shapes(layer)
            for k, names in enumerate(layer._all_weights):
                shapes = zip(WEIGHTS, later if k else first, strict=True)
                self._shapes += [shape for name, shape in shapes if f"{name}_l{k}" in names]
                self._slots += [(layer._parameters, name) for name in names]
        self._slots.append((readout._parameters, "weight"))
        self._shapes.append((readout.out_features, outputs))
        if self._bias:
            self._slots.append((readout._parameters, "bias"))
            self._shapes.append((readout.out_features,))
        foreign = [
            module
            for link in front.values()
            if (module := link.module)._modules
            or not type(module).__module__.startswith("torch.nn.modules.")
        ]
        self._check_front = bool(foreign)

    def update(
        self,
        net: Carried,
        steps: Chunk,
        chunk: Chunk,
        edge: State,
        window: Window,
        objective: Objective,
    ) -> FusedResult | None:
        """As `try_fused`."""
        if self._declined or not self._unchanged(net, objective):
            return None
        parameters = self._read_weights()
        if parameters is None:
            return None
        weights, grads = parameters
        dtype = weights[0].dtype
        loss = _loss_code(objective.loss_fn, chunk, self._readout.out_features, dtype)
        if loss is None or not self._kernel_fastest(steps, dtype):
            return None
        buffers = self._buffers_for(steps, dtype)
        state = buffers.read_state(edge)
        if state is None:
            return None
        if not self._front:
            front = x = steps.inputs.contiguous()
        else:  # last of all: it may draw random numbers
            front = self._run_front(net, steps, edge, window)
            x = front.detach()
            if type(x) is not Tensor or (
                self._check_front and not self._front_is_pure(net, objective, weights, grads)
            ):
                self._declined = True  # the front runs twice, this once
                return None
        if x.shape != buffers.input_shape or not _readable(x, dtype):
            return None  # torch will refuse it
        dx = torch.empty_like(x) if front.requires_grad else None
        request = steps, chunk, edge, window, loss
        result = buffers.run(x, dx, weights, self._addresses, grads, state, request)
        if result is None or dx is None:
            return result
        front.backward(dx)
        return result._replace(finite=result.finite and self._front_is_finite())

    def _unchanged(self, net: Carried, objective: Objective) -> bool:
        """Whether modules and settings are as they were, and nothing observes the computation."""
        if (
            tuple(self._children.values()) != self._adapter.children
            or type(net) is not Carried
            or type(self._readout) is not nn.Linear
            or objective.scaler is not None
            or not torch.is_grad_enabled()
            or active_torch_modes() is not None
            or torch.is_anomaly_enabled()
            or torch.is_autocast_enabled("cpu")
            or profiler_enabled()
            or any(_GLOBAL_HOOKS)
            or _modified(net.__dict__)
        ):
            return False
        for instance in self._instances:
            if _modified(instance):
                return False
        for layer, settings in self._stack:
            if (
                type(layer) not in FUSED_LAYERS
                or _settings(layer.__dict__) != settings
                or (layer.dropout and layer.training and layer.num_layers > 1)
            ):
                return False
        return True

    def _read_weights(self) -> tuple[list[Tensor], list[Tensor | None]] | None:
        """All parameters and their `.grad`.

        None if a kernel must not read a weight or write a gradient, or if a parameter is computed
        from others, tied or new. Type, device and sign of a weight are fixed while it is the same
        object at the same address.
        """
        try:
            weights: list[Tensor] = [parameters[name] for parameters, name in self._slots]
        except KeyError:
            return None
        if not self._bias and self._readout._parameters["bias"] is not None:
            return None
        checked = len(self._checked) == len(weights) and all(map(is_, weights, self._checked))
        if not checked and (
            any(type(weight) is not nn.Parameter for weight in weights)
            or len(set(map(id, weights))) < len(weights)
        ):
            return None
        addresses = list(map(Tensor.data_ptr, weights))
        if not checked or addresses != self._addresses:
            if not all(weight.is_cpu and not weight.is_neg() for weight in weights):
                return None
            self._checked, self._addresses = weights, addresses
        dtype = weights[0].dtype
        grads: list[Tensor | None] = []
        for weight, shape in zip(weights, self._shapes, strict=True):
            grad = weight.grad
            if (
                weight.shape != shape
                or weight.dtype is not dtype
                or not weight.requires_grad
                or not weight.is_contiguous()
                or weight._backward_hooks
                or weight._post_accumulate_grad_hooks
                or (grad is not None and not (grad.shape == shape and _readable(grad, dtype)))
            ):
                return None
            grads.append(grad)
        return weights, grads

    def _kernel_fastest(self, steps: Chunk, dtype: torch.dtype) -> bool:
        """Whether the kernels are the fastest for these lanes and type, and the inputs fit them."""
        inputs = steps.inputs
        if dtype not in TYPES or inputs.requires_grad or not inputs.numel():
            return False
        key = steps.lanes, dtype
        fits = self._kernel_fits.get(key)
        if fits is None:
            fits = self._kernel_fits[key] = all(
                static_backend(
                    BY_MODE[layer.mode], dtype, layer.hidden_size, steps.lanes, layer.proj_size > 0
                ).name
                == "fused"
                for layer in self._layers.values()
            )
        return fits

    def _buffers_for(self, steps: Chunk, dtype: torch.dtype) -> "_Buffers":
        """The buffers for so many steps and lanes, one for each thread."""
        key = steps.steps, steps.lanes, get_ident(), dtype
        buffers = self._buffers.get(key)
        if buffers is None:
            if len(self._buffers) > 3:  # a window, a ragged end, and what is tried in between
                self._buffers.clear()
            links = tuple(self._adapter.links)
            sizes = steps.steps, steps.lanes, dtype
            buffers = self._buffers[key] = _Buffers(self._layers, links, self._readout, sizes)
        return buffers

    def _run_front(self, net: Carried, steps: Chunk, edge: State, window: Window) -> Tensor:
        """The inputs of the first layer, with the graph of the front.

        In two calls where a window with a graph runs the net in two.
        """
        inputs = steps.inputs
        try:
            if not 0 < window.keep < window.stop:
                return self._prepare(inputs).resolve_neg().contiguous()
            # a front may reuse its memory
            first = self._prepare(inputs[: window.keep]).clone()
            return torch.cat([first, self._prepare(inputs[window.keep :])]).resolve_neg()
        except MISFIT_ERRORS as error:
            net._explain(error, inputs, edge)
            raise

    def _prepare(self, inputs: Tensor) -> Tensor:
        return self._front_adapter.run(inputs, dict.fromkeys(self._front, ()))[0]

    def _front_is_pure(
        self,
        net: Carried,
        objective: Objective,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> bool:
        """Whether the front has not changed layers and readout."""
        now = self._read_weights() if self._unchanged(net, objective) else None
        return now is not None and all(map(is_, now[0], weights)) and all(map(is_, now[1], grads))

    def _front_is_finite(self) -> bool:
        """Whether the gradients of the front's weights are."""
        return all(
            weight.grad is None or cmath.isfinite(weight.grad.sum().item())
            for link in self._front.values()
            for weight in link.module.parameters()
        )


class _Leaf(NamedTuple):
    """A leaf of a layer's state, `(B, L, H)`, with the layers one after another in memory."""

    size: tuple[int, int, int]
    stride: tuple[int, int, int]
    layer: int  # bytes from one layer to the next

    @classmethod
    def lay_out(cls, lanes: int, layers: int, width: int, dtype: torch.dtype) -> "_Leaf":
        strides = (width, lanes * width, 1)
        return cls((lanes, layers, width), strides, lanes * width * dtype.itemsize)


class _Buffers:
    """The buffers of a number of steps and lanes, and the calls that use them."""

    def __init__(
        self,
        layers: dict[str, Recurrent],
        links: tuple[str, ...],
        readout: nn.Linear,
        sizes: tuple[int, int, torch.dtype],
    ) -> None:
        self._steps, self._lanes, self._dtype = steps, lanes, dtype = sizes
        self.input_shape = steps, lanes, next(iter(layers.values())).input_size
        self._layers, self._links = layers, links
        self._calls = (Call * sum(layer.num_layers for layer in layers.values()))()
        self._each = list(self._calls)  # views of them
        self._pinned: list[Tensor] = []  # what the calls point to
        self._addresses: list[int] = []  # of the weights that the calls point to
        # of each weight: the struct with its pointer, the field, and that of its gradient
        self._fields: list[tuple[Call | kernel.FusedStep, str, str]] = []
        self._outputs: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._leaves: dict[str, list[_Leaf]] = {}
        # of each leaf: the calls of its layers, and their fields for it before and after the steps
        self._states: list[tuple[_Leaf, list[Call], str, str]] = []
        for name, layer in layers.items():
            widths = BY_MODE[layer.mode].widths(layer.hidden_size, layer.proj_size)
            self._leaves[name] = [
                _Leaf.lay_out(lanes, layer.num_layers, width, dtype) for width in widths
            ]
            first = len(self._outputs)
            for i in range(first, first + layer.num_layers):
                self._lay_out(i, layer)
            calls = self._each[first : first + layer.num_layers]
            for leaf, letter in zip(self._leaves[name], "hc", strict=False):
                self._states.append((leaf, calls, f"{letter}0", f"{letter}_end"))
        self._each[-1].dy = self._pin(torch.empty_like(self._outputs[-1]))
        self._mean = ctypes.c_double()
        classes = readout.out_features
        self._step = kernel.FusedStep(
            self._calls, len(self._calls), classes=classes, mean=ctypes.pointer(self._mean)
        )
        self._scratch_steps, self._scratch = 0, torch.empty(0)  # for the readout of so many steps
        names = ("w", "b") if readout._parameters["bias"] is not None else ("w",)
        self._fields += [(self._step, name, "d" + name) for name in names]
        self._row = lanes * classes, classes, 1  # strides of the outputs
        self._options: tuple[int, bool, int | None] | None = None  # that the calls have
        self._no_state: dict[str, State] = dict.fromkeys(links, ())

    def _pin(self, tensor: Tensor) -> int:
        self._pinned.append(tensor)
        return tensor.data_ptr()

    def _lay_out(self, i: int, layer: Recurrent) -> None:
        """Fill in the fields of a layer's call that never change."""
        call = self._each[i]
        outputs = layer.proj_size or layer.hidden_size
        inputs = self._outputs[-1].shape[2] if i else layer.input_size
        sizes = (
            BY_MODE[layer.mode].code,
            TYPES[self._dtype],
            self._steps,
            self._lanes,
            inputs,
            layer.hidden_size,
            outputs,
        )
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
        names = ("w_ih", "w_hh", "b_ih", "b_hh") if layer.bias else ("w_ih", "w_hh")
        if layer.proj_size:
            names = (*names, "w_hr")
        self._fields += [(call, name, "d" + name) for name in names]

    def read_state(self, edge: State) -> list[Tensor] | None:
        """The leaves as kernels read them; None if they do not fit: kernels check no size."""
        if type(edge) is not dict or tuple(edge) != self._links:
            return None
        tensors: list[Tensor] = []
        for name, leaves in self._leaves.items():
            state = edge[name]
            if isinstance(state, Tensor):
                state = (state,)
            if len(state) != len(leaves):
                return None
            for leaf, tensor in zip(leaves, state, strict=True):
                if (
                    type(tensor) is not Tensor
                    or tensor.dtype is not self._dtype
                    or tensor.requires_grad
                    or tensor.shape != leaf.size
                    or not tensor.is_cpu
                    or tensor.is_neg()
                ):
                    return None
                # itself if an update made it
                laid_out = tensor.stride() == leaf.stride
                tensors.append(tensor if laid_out else tensor.transpose(0, 1).contiguous())
        return tensors

    def run(
        self,
        x: Tensor,
        dx: Tensor | None,
        weights: Sequence[Tensor],
        addresses: list[int],
        grads: Sequence[Tensor | None],
        state: Sequence[Tensor],
        request: tuple[Chunk, Chunk, State, Window, int],
    ) -> FusedResult | None:
        """Make the update.

        Args:
            x: the inputs of the first layer.
            dx: receives their gradient.
            weights: all of them.
            addresses: theirs.
            grads: those in `.grad`.
            state: as `read_state` returned it.
            request: steps, chunk, edge and window as for `try_fused`, and the loss.
        """
        steps, chunk, edge, window, loss = request
        fresh = all(map(is_, grads, repeat(None)))
        if fresh:
            targets = list(map(torch.empty_like, weights))
        else:  # one that is missing beside others begins with zeros
            targets = [
                torch.zeros_like(weight) if grad is None else grad
                for weight, grad in zip(weights, grads, strict=True)
            ]
        resets = steps.resets.contiguous() if steps.any_reset else None
        after = self._point_states(x, state, None if resets is None else resets.data_ptr(), fresh)
        self._each[0].x = x.data_ptr()
        self._each[0].dx = None if dx is None else dx.data_ptr()
        if addresses != self._addresses:
            for (struct, name, _), address in zip(self._fields, addresses, strict=True):
                setattr(struct, name, address)
            self._addresses = addresses
        for (struct, _, gradient), grad in zip(self._fields, targets, strict=True):
            setattr(struct, gradient, grad.data_ptr())
        outputs = x.new_empty_strided((chunk.steps, self._lanes, self._row[1]), self._row)
        mask = self._point_readout(chunk, outputs, loss, fresh)
        code = kernel.fused_step(self._step)
        del mask, resets  # the call has read them
        if code == kernel.INVALID_TARGET:
            return None  # torch says which target, and of how many classes
        for weight, old, grad in zip(weights, grads, targets, strict=True):
            if old is None:
                weight.grad = grad
        if not fresh:
            torch.autograd.graph.increment_version(targets)
        if window.keep == window.stop:
            boundary = after
        else:
            boundary = self._state_at(window.keep) if window.keep else edge
        mean = outputs.new_full((), self._mean.value)
        return FusedResult(mean, outputs, after, boundary, code != kernel.NON_FINITE)

    def _point_states(
        self, x: Tensor, state: Sequence[Tensor], resets: int | None, fresh: bool
    ) -> State:
        """Point the calls to the states; returns the one after the last step."""
        options = torch.get_num_threads(), not fresh, resets
        if options != self._options:
            for call in self._each:
                call.threads, call.accumulate, call.resets = options
            self._options = options
        ends: list[Tensor] = []
        for (leaf, calls, before, end), entering in zip(self._states, state, strict=True):
            leaving = x.new_empty_strided(leaf.size, leaf.stride)
            ends.append(leaving)
            source, target = entering.data_ptr(), leaving.data_ptr()
            for call in calls:
                setattr(call, before, source)
                setattr(call, end, target)
                source += leaf.layer
                target += leaf.layer
        after, leaves = self._no_state.copy(), iter(ends)
        for name, layouts in self._leaves.items():
            h = next(leaves)
            after[name] = h if len(layouts) == 1 else (h, next(leaves))
        return after

    def _point_readout(
        self, chunk: Chunk, outputs: Tensor, loss: int, fresh: bool
    ) -> Tensor | None:
        """Point the readout to outputs and targets; the mask it returns must outlive the call."""
        step, count, valid = self._step, chunk.steps, chunk.valid_steps
        mask = None if valid == count * self._lanes else chunk.mask.contiguous()
        step.loss, step.accumulate, step.steps, step.valid = loss, not fresh, count, valid
        if count > self._scratch_steps:
            size = kernel.fused_scratch_size(step)
            self._scratch_steps = count
            self._scratch = torch.empty(size, dtype=self._dtype, device="cpu")
            step.scratch = self._scratch.data_ptr()
        step.targets = None if chunk.targets is None else chunk.targets.data_ptr()
        step.mask = None if mask is None else mask.data_ptr()
        step.outputs = outputs.data_ptr()
        return mask

    def _state_at(self, step: int) -> State:
        """The state entering a step within the window."""
        state = self._no_state.copy()
        first = 0
        for name, layer in self._layers.items():
            rows = range(first, first + layer.num_layers)
            h = torch.stack([self._outputs[i][step - 1] for i in rows], 1)
            if len(self._leaves[name]) == 2:
                cells = [self._cell_states(i, layer)[step - 1] for i in rows]
                state[name] = h, torch.stack(cells, 1)
            else:
                state[name] = h
            first += layer.num_layers
        return state

    def _cell_states(self, i: int, layer: Recurrent) -> Tensor:
        """The c of every step, `(T, B, H)`: saved after the gates, in whole vectors."""
        saved, rows = self._saved[i], self._steps * self._lanes
        width = saved.numel() // (5 * rows)
        cells = saved[4 * rows * width :].view(self._steps, self._lanes, width)
        return cells[..., : layer.hidden_size]


def _weight_shapes(layer: Recurrent) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The shapes of the weights of the first layer, and of those after it."""
    return weight_shapes(
        BY_MODE[layer.mode],
        layer.input_size,
        layer.hidden_size,
        layer.proj_size,
        layer.bidirectional,
    )


def _readable(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel reads from a tensor, row by row, the same values as torch."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is dtype
        and not tensor.requires_grad
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def _modified(instance: dict[str, Any]) -> bool:
    """Whether a module, by its `__dict__`, has hooks or another forward than that of its class."""
    if (
        instance["_forward_hooks"]
        or instance["_forward_pre_hooks"]
        or instance["_backward_hooks"]
        or instance["_backward_pre_hooks"]
    ):
        return True
    return "forward" in instance and not _has_class_forward(instance)


def _has_class_forward(instance: dict[str, Any]) -> bool:
    """Whether the forward of an instance is that of its class, as in a copy of a module."""
    forward = instance["forward"]
    if not isinstance(forward, MethodType):
        return False
    module = forward.__self__
    return (
        isinstance(module, nn.Module)
        and module.__dict__ is instance
        and forward.__func__ is type(module).forward
    )


def _loss_code(fn: object, chunk: Chunk, classes: int, dtype: torch.dtype) -> int | None:
    """The loss of the kernels; None if they do not have it, or not for such targets."""
    targets = chunk.targets
    if targets is None or not _readable(targets, targets.dtype):
        return None
    if type(fn) is nn.CrossEntropyLoss:
        code = kernel.CROSS_ENTROPY
        default = (
            fn.label_smoothing == 0 and fn.ignore_index == IGNORED and fn._buffers["weight"] is None
        )
        fits = targets.dtype is torch.int64 and targets.dim() == 2
    elif type(fn) is nn.MSELoss:
        code, default = kernel.SQUARED_ERROR, targets.dtype is dtype
        dims = targets.dim()
        fits = targets.shape[2] == classes if dims == 3 else dims == 2 and classes == 1
    else:
        return None
    return (
        code if default and fits and fn.reduction == "mean" and not _modified(fn.__dict__) else None
    )
