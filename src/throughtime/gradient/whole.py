"""An update in one call: where a net is fused layers and a linear readout, and the loss one that
the kernels know.

What such an update spends outside arithmetic, a graph and some fifteen operators, is more than the
arithmetic of a small net: LSTM of 50 units, one lane, 100 steps. So `tt.updates` takes this way by
itself where a user could tell no difference: an `nn.Sequential` of `tt.nn` layers and an
`nn.Linear`, behind a front that carries nothing; `nn.CrossEntropyLoss` or `nn.MSELoss` with their
defaults; no hooks on modules, or on the parameters of layers and readout, no ties among these, no
autocast, no doctor or profiler that looks on. A front with weights, an `nn.Embedding` perhaps,
learns by autograd, from the gradient of what the first layer saw. A trace is told what the kernels
capture. The gradients are those of the graph to rounding. What only the graph itself knows of is
not seen: hooks on its nodes, or on tensors that it saves. Buffers are kept from one update to the
next, for as long as the net lives.

What a user can change between two updates is looked at in every one; what follows from it is laid
out once.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`C` outputs, `L` layers.
"""

import cmath
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from operator import is_
from threading import get_ident
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._C._autograd import _profiler_enabled as profiled  # as torch's own optimizers ask
from torch.nn.modules import module as torch_modules

from throughtime.carry.carried import MISFIT_ERRORS, Carried
from throughtime.carry.chain import ChainAdapter, StatelessAdapter
from throughtime.carry.layers import LayerAdapter
from throughtime.chunk import Chunk
from throughtime.gradient.objective import IGNORED, Objective
from throughtime.gradient.schedule import Window
from throughtime.gradient.work import LISTENERS, Asked, Result, Work
from throughtime.kernels.cells import BY_MODE
from throughtime.kernels.dispatch import active_torch_modes, static_backend
from throughtime.kernels.fused_step import CROSS_ENTROPY, SQUARED_ERROR
from throughtime.kernels.recurrent import TYPES
from throughtime.nn.layers import GRU, LSTM, RNN, WATCHES, Recurrent, weight_shapes
from throughtime.state import State

OURS = {LSTM, GRU, RNN}  # a subclass may do anything
NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def whole_update(
    net: Carried, steps: Chunk, chunk: Chunk, edge: State, plan: Window, objective: Objective
) -> Result | None:
    """Adds the gradient of the loss of `chunk`, the last of `steps`, to `.grad`; None where a graph
    has to be made instead.

    Args:
        net: made by `tt.carry`.
        steps: of the window.
        chunk: those that count.
        edge: the state entering the first of `steps`.
        plan: the window.
        objective: the loss.
    """
    form = _form(net)
    if form is None or form.by_graph or plan.start or not form.as_it_was(net, objective, plan):
        return None
    weights = form.weights()
    loss = _loss(objective.loss_fn, chunk, form.readout)
    if weights is None or loss is None or not form.fits(steps, weights[0].dtype):
        return None
    work, grads = form.work(steps, weights[0].dtype), form.gradients(weights)
    if grads is None or not work.reads(edge):
        return None
    front = form.entering(net, steps, edge, plan)  # last of all: it may draw random numbers
    x = front.detach()
    if type(x) is not Tensor or (
        form.foreign() and not form.unmoved(net, objective, plan, weights, grads)
    ):
        form.by_graph = True  # the front runs twice this once
        return None
    if x.shape != work.inputs or not _read(x, weights[0].dtype):  # torch will refuse it
        return None
    dx = torch.empty_like(x) if front.requires_grad else None
    result = work.update(x, dx, weights, grads, Asked(steps, chunk, edge, plan, loss))
    if result is None or dx is None:
        return result
    front.backward(dx)
    return result._replace(finite=result.finite and form.front_is_finite())


_forms: "WeakKeyDictionary[Carried, Form | None]" = WeakKeyDictionary()


def _form(net: Carried) -> "Form | None":
    """The net's, if it has one; worked out once."""
    try:
        return _forms[net]
    except KeyError:
        form = _forms[net] = _found(net)
        return form


def _found(net: Carried) -> "Form | None":
    contract = net.adapter
    if not isinstance(contract, ChainAdapter):
        return None
    *below, (_, top) = contract.links.items()
    before = {
        name: link
        for name, link in takewhile(lambda pair: isinstance(pair[1], StatelessAdapter), below)
        if isinstance(link, StatelessAdapter)
    }
    layers = {
        name: link.module
        for name, link in below
        if isinstance(link, LayerAdapter) and isinstance(link.module, Recurrent)
    }
    if not layers or len(before) + len(layers) < len(below):
        return None
    if not isinstance(top, StatelessAdapter) or not isinstance(top.module, nn.Linear):
        return None
    if any(
        upper.input_size != (lower.proj_size or lower.hidden_size)
        for lower, upper in pairwise(layers.values())
    ):
        return None
    return Form(contract, before, layers, top.module)


@dataclass(eq=False)
class Form:
    """A net of fused layers and a linear readout; `front` prepares the inputs."""

    contract: ChainAdapter
    front: dict[str, StatelessAdapter]
    layers: dict[str, Recurrent]
    readout: nn.Linear
    _works: dict[tuple[int, int, int, torch.dtype], "Work"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # once the front has made what no kernel reads, or written to what stands above it
        self.by_graph = False
        self.bias = self.readout._parameters["bias"] is not None
        self._front_chain = replace(self.contract, links=self.front)
        self._layers = [(layer, _drawn(layer)) for layer in self.layers.values()]
        self._others = (
            self.contract.module,
            *(link.module for link in self.front.values()),
            self.readout,
        )
        self._places: list[tuple[dict[str, Any], str]] = []
        self._shapes: list[tuple[int, ...]] = []
        inputs = 0
        for layer in self.layers.values():
            sizes = weight_shapes(
                BY_MODE[layer.mode],
                layer.input_size,
                layer.hidden_size,
                layer.proj_size,
                layer.bidirectional,
            )
            inputs = layer.proj_size or layer.hidden_size
            # torch's own list of names
            for k, names in enumerate(layer._all_weights):
                there = [
                    size
                    for name, size in zip(NAMES, sizes[k > 0], strict=True)
                    if f"{name}_l{k}" in names
                ]
                self._shapes += there
                # by name, without a search
                self._places += [(layer._parameters, name) for name in names]
        own, outputs = self.readout._parameters, self.readout.out_features
        self._shapes += [(outputs, inputs), *([(outputs,)] if self.bias else [])]
        self._places += [(own, name) for name in ("weight", *(["bias"] if self.bias else []))]

    def weights(self) -> list[Tensor] | None:
        """All parameters, as they are now.

        None where one is made of others, is tied to another, or has come since.
        """
        try:
            found: list[Tensor] = [place[name] for place, name in self._places]
        except KeyError:
            return None
        same = (
            len(set(map(id, found))) == len(found)
            and (self.readout._parameters["bias"] is not None) == self.bias
        )
        return found if same else None

    def as_it_was(self, net: Carried, objective: Objective, plan: Window) -> bool:
        """Whether nothing has been put in the way since: hooks, other modules, autocast, somebody looking on."""
        if (
            tuple(self.contract.module) != self.contract.children
            or type(net) is not Carried
            or type(self.readout) is not nn.Linear
        ):
            return False
        if _looked_at() or objective.scaler is not None or not _bare(net):
            return False
        for layer, drawn in self._layers:
            if (
                type(layer) not in OURS
                or _drawn(layer) != drawn
                or (layer.dropout and layer.training and layer.num_layers > 1)
            ):
                return False
            if not _bare(layer) or (WATCHES and not _told_enough(layer, plan)):
                return False
        for module in self._others:  # three times as fast as all() of a generator
            if not _bare(module):
                return False
        return True

    def entering(self, net: Carried, steps: Chunk, edge: State, plan: Window) -> Tensor:
        """What the first layer sees, with the graph of the front.

        In two parts where `run_window` would run the net on two.
        """
        if not self.front:
            return steps.inputs.contiguous()
        try:
            if not 0 < plan.keep < plan.stop:
                return self._through(steps.inputs).resolve_neg().contiguous()
            first = self._through(
                steps.inputs[: plan.keep]
            ).clone()  # a front may use its memory again
            return torch.cat([first, self._through(steps.inputs[plan.keep :])]).resolve_neg()
        except MISFIT_ERRORS as error:
            net._explain(error, steps.inputs, edge)
            raise

    def _through(self, inputs: Tensor) -> Tensor:
        return self._front_chain.run(inputs, dict.fromkeys(self.front, ()))[0]

    def foreign(self) -> bool:
        """Whether a module of the front is not torch's own, and may do anything."""
        modules = [link.module for link in self.front.values()]
        return any(
            module._modules or not type(module).__module__.startswith("torch.nn.modules.")
            for module in modules
        )

    def unmoved(
        self,
        net: Carried,
        objective: Objective,
        plan: Window,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor | None],
    ) -> bool:
        """Whether the front has left layers and readout as they were."""
        now = self.weights()
        if (
            now is None
            or not all(map(is_, now, weights))
            or not self.as_it_was(net, objective, plan)
        ):
            return False
        there = self.gradients(weights)
        return there is not None and all(map(is_, there, grads))

    def front_is_finite(self) -> bool:
        """Whether the gradients of the front's weights are."""
        weights = [weight for link in self.front.values() for weight in link.module.parameters()]
        return all(
            weight.grad is None or cmath.isfinite(weight.grad.sum().item()) for weight in weights
        )

    def fits(self, steps: Chunk, dtype: torch.dtype) -> bool:
        """Whether the kernels are the fastest for so many lanes of this type.

        The inputs have no gradient and are some.
        """
        if dtype not in TYPES or steps.inputs.requires_grad or not steps.inputs.numel():
            return False
        for layer, _ in self._layers:
            if (
                static_backend(
                    BY_MODE[layer.mode], dtype, layer.hidden_size, steps.lanes, layer.proj_size > 0
                ).name
                != "fused"
            ):
                return False
        return True

    def gradients(self, weights: Sequence[Tensor]) -> list[Tensor | None] | None:
        """Those that are there.

        None, of all, where a kernel may not read a weight, or write its gradient as autograd would.
        """
        found: list[Tensor | None] = []
        dtype = weights[0].dtype
        for weight, shape in zip(weights, self._shapes, strict=True):
            if (
                type(weight) is not nn.Parameter
                or weight.dtype is not dtype
                or weight.shape != shape
            ):
                return None
            if (
                not (weight.requires_grad and weight.is_cpu and weight.is_contiguous())
                or weight.is_neg()
            ):
                return None
            # there is no public way to ask
            if weight._backward_hooks or weight._post_accumulate_grad_hooks:
                return None
            grad = weight.grad
            if grad is not None and not (grad.shape == shape and _read(grad, dtype)):
                return None
            found.append(grad)
        return found

    def work(self, steps: Chunk, dtype: torch.dtype) -> "Work":
        """The buffers for so many steps and lanes, one for each thread."""
        key = steps.steps, steps.lanes, get_ident(), dtype
        work = self._works.get(key)
        if work is None:
            if len(self._works) > 3:  # a window, a ragged end, and what somebody tries in between
                self._works.clear()
            work = self._works[key] = Work(
                self.layers,
                tuple(self.contract.links),
                self.readout,
                (steps.steps, steps.lanes, dtype),
            )
        return work


def _looked_at() -> bool:
    """Whether there is somebody to whom a graph would show what one call does not, or no graph would be made."""
    if (
        not torch.is_grad_enabled()
        or active_torch_modes() is not None
        or torch.is_anomaly_enabled()
        or torch.is_autocast_enabled("cpu")
        or profiled()
    ):
        return True
    of = torch_modules
    hooks = (
        of._global_forward_hooks,
        of._global_forward_pre_hooks,
        of._global_backward_hooks,
        of._global_backward_pre_hooks,
    )
    return any(hooks)


def _drawn(layer: Recurrent) -> tuple[Any, ...]:
    """What a layer's calls are laid out by; plain attributes, which a user may write to."""
    return (
        layer.mode,
        layer.input_size,
        layer.hidden_size,
        layer.proj_size,
        layer.num_layers,
        layer.bias,
        layer.batch_first,
    )


def _read(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel reads from a tensor, row by row, what torch does."""
    if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.requires_grad:
        return False
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def _bare(module: nn.Module) -> bool:
    """Whether a module's forward is its class's, or need not be called, and nobody waits for it."""
    own = module.__dict__.get
    if (
        own("_forward_hooks")
        or own("_forward_pre_hooks")
        or own("_backward_hooks")
        or own("_backward_pre_hooks")
    ):
        return False
    forward = own("forward")
    if forward is None or forward is LISTENERS.get(module):
        return True
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )  # in a copy


def _told_enough(layer: Recurrent, plan: Window) -> bool:
    """Whether nobody watches the layer, or what a kernel captures of the whole window is enough.

    Where the next window begins within this one a graph is made in two parts, and what enters each
    is seen.
    """
    return layer not in WATCHES or (layer in LISTENERS and plan.keep in {0, plan.stop})


def _loss(fn: object, chunk: Chunk, readout: nn.Linear) -> int | None:
    """Which loss of the kernels it is; None where they do not have it, or not on such targets."""
    targets = chunk.targets
    if targets is None or not _read(targets, targets.dtype):
        return None
    if type(fn) is nn.CrossEntropyLoss and _bare(fn):
        usual = (
            fn.reduction == "mean"
            and fn.weight is None
            and fn.label_smoothing == 0
            and fn.ignore_index == IGNORED
        )
        return (
            CROSS_ENTROPY if usual and targets.dtype is torch.int64 and targets.dim() == 2 else None
        )
    if (
        type(fn) is nn.MSELoss
        and _bare(fn)
        and fn.reduction == "mean"
        and targets.dtype is readout.weight.dtype
    ):
        return (
            SQUARED_ERROR
            if targets.shape[2:] == (readout.out_features,)
            or (readout.out_features == 1 and targets.dim() == 2)
            else None
        )
    return None
