"""An update in one call of the compiled core, where a net and its loss allow it.

Outside arithmetic such an update spends much on a graph and some fifteen operators: for a small net
(LSTM of 50 units, one lane, 100 steps) more than on the arithmetic. So `tt.updates` makes one call
wherever the result is the same: `tt.nn` layers and an `nn.Linear`, after modules of torch, or of
this package, that carry nothing (the front), as an `nn.Sequential` or in a class whose forward can
be read (`carry/structure.py`); `nn.CrossEntropyLoss` or `nn.MSELoss` with their defaults (others by
autograd on the outputs of the layers); no hooks on modules, or on the parameters of layers and
readout, no ties among these, no autocast, no active torch mode or profiler. A front with weights,
such as an `nn.Embedding`, learns by autograd, from the gradient of the first layer's inputs. The
gradients are those of the graph to rounding. Hooks on nodes of the graph, or on tensors that it
saves, do not run. Buffers are reused from one update to the next, for as long as the net exists.

We re-check everything the user may change before each update and cache only what depends on shapes.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`C` outputs, `L` layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter, is_, itemgetter
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from throughtime.carry.carried import MISFIT_ERRORS, Carried
from throughtime.carry.structure import ModuleGuards, modified, torch_observes
from throughtime.chunk import Chunk
from throughtime.gradient._parts import Parts, match
from throughtime.gradient.objective import IGNORED, Objective, require_gradient
from throughtime.kernels import recurrent as kernel
from throughtime.kernels.cells import BY_MODE
from throughtime.kernels.dispatch import static_backend
from throughtime.kernels.library import TYPES
from throughtime.kernels.workspace import Workspace
from throughtime.nn.layers import layer_shapes
from throughtime.state import State

WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
_traits = attrgetter(
    "grad", "shape", "dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"
)
_address = Tensor.data_ptr
MOST_MATCHES = 20  # a net that changes again and again is run with a graph


# loss, outputs `(T, B, C)` of the steps that count, the states after the last step and entering
# step `keep`, and whether all gradients are finite, or None if that is not known
FusedResult: TypeAlias = tuple[Tensor, Tensor, State, State, bool | None]


def try_fused(
    net: Carried, steps: Chunk, chunk: Chunk, edge: State, keep: int, objective: Objective
) -> FusedResult | None:
    """Add the gradient of the loss of some steps to `.grad` in one call, if that is possible.

    Args:
        net: made by `tt.carry`.
        steps: with their graph.
        chunk: the last of them, whose losses count.
        edge: the state entering the first step.
        keep: a step, counted from the first.
        objective: the loss.

    Returns:
        Loss, outputs, state, the state entering step `keep`, and whether all gradients, which are
        in `.grad` now, are finite, if that is known. None if a graph must be built; then nothing
        has been changed.
    """
    fused = net._fused_net
    if not isinstance(fused, FusedNet) or not fused.holds(net):
        fused = _match_again(net, steps.inputs, fused if isinstance(fused, FusedNet) else None)
        if fused is None:
            return None
    loss = None
    if fused.parts.readout is not None:
        loss = _loss_code(objective.loss_fn, chunk._targets, fused.parts.readout)
        if loss is None:
            fused = fused.by_tail()
    return fused.update(net, steps, chunk, edge, keep, objective, loss)


def _match_again(net: Carried, inputs: Tensor, before: "FusedNet | None") -> "FusedNet | None":
    """The net whose parts are read for the first time, or were replaced; None to build a graph."""
    matches = 1 if before is None else 1 + before.matches
    if torch_observes() or not ModuleGuards(net.module).hold(net):
        return None  # a trial would be noticed
    parts = match(net, inputs) if matches <= MOST_MATCHES else None
    if parts is None:
        net._fused_net = False
        return None
    net._fused_net = fused = FusedNet(parts, ModuleGuards(net.module, parts.guards), matches)
    return fused


class FusedNet:
    """A net that is updated in one call.

    Args:
        parts: of the net.
        guards: of its modules.
        matches: how often its parts have been read.
    """

    def __init__(self, parts: Parts, guards: ModuleGuards, matches: int) -> None:
        self.parts, self.guards, self.matches = parts, guards, matches
        self._readout = readout = parts.readout
        layers = parts.layers
        # set when the front has returned what no kernel reads, or has changed layers or readout
        self._declined = False
        self._deep = [layer for layer in layers.values() if layer.num_layers > 1]
        self._inputs = next(iter(layers.values())).input_size
        self._bias = readout is not None and readout._parameters["bias"] is not None
        # the parameters of every module, and what picks them in the order of the kernel
        self._slots: list[tuple[dict[str, Any], itemgetter[Any]]] = []
        self._shapes: list[tuple[int, ...]] = []
        self._tail_net: FusedNet | None = None
        self._workspaces: dict[tuple[int, int, int, torch.dtype], Workspace | None] = {}
        # the weights that passed all checks, their addresses then, and the traits that they keep
        self._checked: list[Tensor] = []
        self._addresses: list[int] = []
        self._traits: list[tuple[Any, ...]] = []
        for layer in layers.values():
            sizes = layer.input_size, layer.hidden_size, layer.proj_size
            (self._width, *_), first, later = layer_shapes(layer.mode, *sizes, layer.bidirectional)
            for k, names in enumerate(layer._all_weights):
                shapes = zip(WEIGHTS, later if k else first, strict=True)
                self._shapes += [shape for name, shape in shapes if f"{name}_l{k}" in names]
                self._slots.append((layer._parameters, itemgetter(*names)))
        if readout is not None:
            self._slots.append((readout._parameters, itemgetter("weight", "bias")))
            self._shapes.append((readout.out_features, self._width))
            if self._bias:
                self._shapes.append((readout.out_features,))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a net, or one read from a file, is matched anew."""
        return type(None), ()

    def holds(self, net: Carried) -> bool:
        """Whether modules and settings are as they were, and nothing observes the computation."""
        return type(net) is Carried and self.parts.adapter is net.adapter and self.guards.hold(net)

    def update(  # noqa: C901  (one call, made in every update of a small net)
        self,
        net: Carried,
        steps: Chunk,
        chunk: Chunk,
        edge: State,
        keep: int,
        objective: Objective,
        loss: int | None,
    ) -> FusedResult | None:
        """As `try_fused`; `loss` is that of the kernel, None with a tail."""
        parts = self.parts
        # a graph runs a window in two calls where its state is kept within: dropout draws anew
        fits = not (
            self._declined
            or objective.scaler is not None
            or steps._inputs.requires_grad
            or (steps.any_reset and not parts.zero_start)
            or (parts.random_tail and 0 < keep < steps.steps)
            or (self._deep and any(layer.dropout and layer.training for layer in self._deep))
        )
        parameters = self._read_weights() if fits and torch.is_grad_enabled() else None
        if parameters is None:
            return None
        dtype = parameters[0].dtype
        workspace = self._workspace(steps, dtype)
        before = parts.by_name(edge) if parts.argument else edge
        state = None if workspace is None else workspace.read_state(before)
        if workspace is None or state is None:
            return None
        front = None
        if parts.front is not None:
            front = self._front_inputs(net, steps, edge, keep)
            if front is None:
                return None
        inputs = self._read_inputs(steps, front, dtype)
        if inputs is None:
            return None  # torch will refuse it
        dx = None if front is None or not front.requires_grad else torch.empty_like(inputs[0])
        results: list[Tensor] = []

        def tail(y: Tensor) -> Tensor:
            """The gradient of the layers' outputs, by autograd."""
            leaf = y.clone().requires_grad_()  # the next run overwrites y
            outputs = parts.tail(leaf, steps.inputs)[len(y) - chunk.steps :]
            mean, _ = objective(outputs, chunk)
            require_gradient(mean.requires_grad)
            mean.backward()
            results.extend((mean.detach(), outputs.detach()))
            return torch.zeros_like(y) if leaf.grad is None else leaf.grad

        outputs = None if loss is None else workspace.set_readout(loss, chunk)
        run = None if outputs is not None else tail
        code, mean, after = workspace.run(steps, inputs, dx, parameters, state, run)
        if code == kernel.INVALID_TARGET:
            return None  # torch says which target, and of how many classes
        finite = None
        if outputs is None:
            mean, outputs = results
        elif dx is None:
            finite = code != kernel.NON_FINITE
        if front is not None and dx is not None:
            front.backward(dx)
        whole = keep == steps.steps
        boundary = after if whole else workspace.state_at(keep, before)
        if parts.argument:
            after, boundary = parts.of_net(after), parts.of_net(boundary)
        return mean, outputs, after, boundary, finite

    def by_tail(self) -> "FusedNet":
        """The same net with its readout as tail, for a loss that the kernel does not have."""
        if self._tail_net is None:
            self._tail_net = FusedNet(replace(self.parts, readout=None), self.guards, 0)
        return self._tail_net

    def _read_inputs(
        self, steps: Chunk, front: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, int] | None:
        """The inputs of the first layer: a contiguous tensor, and the row of the first step.

        None if a kernel would not read the same numbers as torch.
        """
        x, row = (steps._inputs, steps._first) if front is None else (front.detach(), 0)
        if not x.is_contiguous():
            x, row = steps.inputs.contiguous(), 0
        shape = x.shape
        fits = shape[1:] == (steps.lanes, self._inputs) and shape[0] >= row + steps.steps
        return (x, row) if fits and _readable(x, dtype) else None

    def _read_weights(self) -> list[Tensor] | None:
        """All parameters.

        None if a kernel must not read a weight or write a gradient, or if a parameter is computed
        from others, tied or new. Type, device and sign of a weight are fixed while it is the same
        object at the same address.
        """
        weights: list[Any] = []
        try:
            for own, get in self._slots:
                weights += get(own)
        except KeyError:
            return None
        if self._readout is not None:
            if (weights[-1] is not None) is not self._bias:
                return None
            if not self._bias:
                weights.pop()
        addresses = list(map(_address, weights))
        if addresses != self._addresses or not all(map(is_, weights, self._checked)):
            if not self._accepts(weights):
                return None
            self._checked, self._addresses = weights, addresses
        if not all(map(Tensor.is_contiguous, weights)):
            return None
        traits = list(map(_traits, weights))
        # torch compares a gradient with None in 10 us
        fits = traits[0][0] is None and traits == self._traits
        return weights if fits else None

    def _accepts(self, weights: Sequence[Tensor]) -> bool:
        """Whether a kernel may read new weights; notes the traits that they must keep."""
        dtype = weights[0].dtype
        self._traits = [(None, shape, dtype, True, None, None) for shape in self._shapes]
        return len({id(weight) for weight in weights}) == len(weights) and all(
            type(weight) is nn.Parameter
            and weight.dtype is dtype
            and weight.is_cpu
            and not weight.is_neg()
            for weight in weights
        )

    def _workspace(self, steps: Chunk, dtype: torch.dtype) -> Workspace | None:
        """The memory for so many steps and lanes, one for each thread; None if torch is faster."""
        key = steps.steps, steps.lanes, get_ident(), dtype
        if key not in self._workspaces:
            if len(self._workspaces) > 3:  # a window, a ragged end, and what is tried in between
                self._workspaces.clear()
            fused = dtype in TYPES and all(
                layer.input_size
                and static_backend(
                    BY_MODE[layer.mode], dtype, layer.hidden_size, steps.lanes, layer.proj_size > 0
                ).name
                == "fused"
                for layer in self.parts.layers.values()
            )
            parts, sizes = self.parts, (steps.steps, steps.lanes, dtype)
            self._workspaces[key] = (
                Workspace(parts.layers, parts.names, parts.readout, sizes) if fused else None
            )
        return self._workspaces[key]

    def _front_inputs(self, net: Carried, steps: Chunk, edge: State, keep: int) -> Tensor | None:
        """The inputs of the first layer, with the graph of the front; None to build all of it.

        Called after all checks, since a front may draw random numbers. In two calls where a window
        with a graph runs the net in two.
        """
        inputs, prepare = steps.inputs, self.parts.front
        if prepare is None:
            return None
        try:
            if not 0 < keep < steps.steps:
                front = prepare(inputs).resolve_neg().contiguous()
            else:  # a front may reuse its memory
                first = prepare(inputs[:keep]).clone()
                front = torch.cat([first, prepare(inputs[keep:])]).resolve_neg()
        except MISFIT_ERRORS as error:
            net._explain(error, inputs, edge)
            raise
        if len(front) == steps.steps:
            return front
        self._declined = True  # the front runs twice, this once
        return None


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


def _loss_code(fn: object, targets: Tensor | None, readout: nn.Linear) -> int | None:
    """The loss of the kernels; None if they do not have it, or not for such targets."""
    weight = readout._parameters.get("weight")
    if weight is None or targets is None or not _readable(targets, targets.dtype):
        return None
    classes = weight.shape[0]
    if type(fn) is nn.CrossEntropyLoss:
        code, label_smoothing = kernel.CROSS_ENTROPY, fn.label_smoothing
        default = (
            label_smoothing == 0 and fn.ignore_index == IGNORED and fn._buffers["weight"] is None
        )
        fits = targets.dtype is torch.int64 and targets.dim() == 2
    elif type(fn) is nn.MSELoss:
        code, default = kernel.SQUARED_ERROR, targets.dtype is weight.dtype
        dims = targets.dim()
        fits = targets.shape[2] == classes if dims == 3 else dims == 2 and classes == 1
    else:
        return None
    plain = fn.reduction == "mean" and not modified(fn.__dict__)
    return code if default and fits and plain else None
