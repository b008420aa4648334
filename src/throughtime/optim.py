"""SGD, Adam and AdamW that clip by the global norm and step in one call of the compiled core.

    n = |g|, over the gradients of all groups        g' = g * min(1, max_norm / (n + 1e-6))
    then torch's rule, with g' for g

They are subclasses of torch's optimizers, with the same arguments, groups, hooks and schedulers.
Each loads the `state_dict` of the other. Parameters and state stay separate tensors, so safetensors
and tied weights work as before. The kernel receives their addresses. It scales each gradient as it
reads it: clipping leaves `.grad` unchanged.

Torch's own step runs, clipped in the same way, when the kernel cannot, and `fallback` says why: at
the first step, which makes the state, if the rule has any; on other devices than the CPU, for other
types than float32 and float64, tensors with gaps, subclasses such as DTensor, `differentiable`, or
without the compiled core.

Not to be confused with `torch.nn.utils.clip_grad_norm_`, which writes the clipped gradients, nor
with clipping each tensor by itself.

References: R. Pascanu, T. Mikolov and Y. Bengio, On the difficulty of training recurrent neural
networks, ICML (2013), for the norm. For the rules, those of `torch.optim`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._autograd import _profiler_enabled as profiled

# torch.compiler.disable imports the whole compiler
from torch._compile import _disable_dynamo as disable_dynamo
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.optim.optimizer import _global_optimizer_post_hooks as post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as pre_hooks

from throughtime.errors import ConfigError
from throughtime.kernels.library import need, why_missing
from throughtime.kernels.optimizer import (
    OPTIONS,
    RULES,
    ParamEntry,
    StepTable,
    mismatch,
    overlap,
)

__all__ = ["SGD", "Adam", "AdamW"]

Closure = Callable[[], Any]
Group = Mapping[str, Any]


class _TablePlan(NamedTuple):
    """A table, and what it was built from besides tensors."""

    table: StepTable
    state: list[Any]
    options: list[tuple[Any, ...]]
    slots: list[dict[str, str]]
    has_tensor_options: bool  # the number of a tensor may change in place


class _KernelOptimizer(Optimizer):
    """Everything but the rule: when the compiled step runs, and clipping around torch's own."""

    _rule: str  # as torch's class, without its options
    _max_norm: float | None = None
    _norm: float | Tensor | None = None
    _plan: _TablePlan | None = None
    fallback: str | None = None  # why the last step was torch's own; None if it was compiled

    def __init__(
        self, params: ParamsT, *arguments: Any, max_norm: float | None = None, **options: Any
    ) -> None:
        torch_init: Any = super().__init__
        torch_init(params, *arguments, **options)
        self.max_norm = max_norm
        # GradScaler then unscales first, so the norm is that of the unscaled gradients
        self._step_supports_amp_scaling = False

    @property
    def max_norm(self) -> float | None:
        """The norm to which gradients are scaled down.

        None: the norm is not measured and nothing is scaled. May be set at any time.
        """
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        if value is not None and not value > 0:
            raise ConfigError(
                f"max_norm={value!r}, expected a number above 0, or None. To measure only:"
                " max_norm=float('inf')"
            )
        if value is not None and self.defaults["differentiable"]:
            raise ConfigError(
                "max_norm with differentiable=True: this clipping has no gradient. Clip by hand,"
                " without max_norm"
            )
        self._max_norm = None if value is None else float(value)

    @property
    def norm(self) -> float | None:
        """The global norm of the gradients of the last step, before clipping.

        None before the first step, and without `max_norm`.
        """
        return None if self._norm is None else float(self._norm)

    def step(self, closure: Closure | None = None) -> Any:
        """Update every parameter that has a gradient; `.grad` stays as it is.

        Args:
            closure: evaluates the model again, calls backward and returns the loss.

        Returns:
            The closure's result, None without a closure.

        Raises:
            RuntimeError: torch's own, for sparse gradients, except under SGD without `max_norm`.
        """
        if torch.compiler.is_compiling():
            return self._step_outside_graph(closure)
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if hooks or pre_hooks or post_hooks or profiled():
            return self._step_hooked() if closure is None else self._step_hooked(closure=closure)
        return self._step(closure)

    # Otherwise torch wraps every step for hooks and profilers, 7 us even when there are none.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _step(self, closure: Closure | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.fallback = self._step_compiled()
        if self.fallback is not None:
            self._step_torch()
        return loss

    # The graph of torch.compile ends before the step; the next begins after it.
    _step_outside_graph = disable_dynamo(step)
    _step_hooked = Optimizer.profile_hook_step(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove all gradients; fill them with zeros if `set_to_none` is false."""
        if not set_to_none or profiled():
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_max_norm": self._max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plan = None
        super().__setstate__(state)

    def _step_torch(self) -> None:
        step: Any = super().step
        if getattr(step, "hooked", False):  # the caller has run the hooks
            step = partial(step.__wrapped__, self)
        with self._clipped_grads():
            step()

    @contextmanager
    def _clipped_grads(self) -> Generator[None]:
        """Put clipped copies in place of the gradients for a while."""
        pairs = self._pairs()
        self._norm = None
        try:
            if self._max_norm is not None:
                for param, grad in pairs:
                    param.grad = grad.detach().clone()
                norm = clip_grad_norm_([param for param, _ in pairs], self._max_norm)
                # of a DTensor: now, while every rank is at this line
                self._norm = getattr(norm, "full_tensor", lambda: norm)()
            yield
        finally:
            for param, grad in pairs:
                param.grad = grad

    def _pairs(self) -> list[tuple[Tensor, Any]]:
        """The parameters that have a gradient, with it."""
        return [
            (param, grad)
            for group in self.param_groups
            for param in group["params"]
            if (grad := param.grad) is not None
        ]

    def _step_compiled(self) -> str | None:
        """Take the step in the compiled core, or return why not."""
        pairs = self._pairs()
        self._norm = None if self._max_norm is None else 0.0
        if not pairs:
            return None
        params, grads = zip(*pairs, strict=True)
        plan = self._last_plan()
        if plan is None or not plan.table.fits(params, grads):
            self._plan = None
            if (reason := self._unsupported(params, grads)) is not None:
                return reason
            self._plan = plan = self._new_plan(self._new_table(grads))
        norm = plan.table.run(grads, self._max_norm)
        if self._max_norm is not None:
            self._norm = norm
        return None

    def _last_plan(self) -> _TablePlan | None:
        """The plan of the last step with this step's numbers, if state and options still fit."""
        plan = self._plan
        if plan is None or dispatch_modes():
            return None
        state, options = self._state_values(), self._options()
        if len(state) != len(plan.state) or any(map(is_not, state, plan.state)):
            return None
        if plan.has_tensor_options or options != plan.options:
            if list(map(_slots, self.param_groups)) != plan.slots:
                return None
            self._plan = plan = self._new_plan(plan.table)
        return plan

    def _new_table(self, grads: Sequence[Tensor]) -> StepTable:
        entries = [
            self._entry(param, number, group)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]
        return StepTable(entries, grads, len(self.param_groups))

    def _new_plan(self, table: StepTable) -> _TablePlan:
        """The plan of the present state and options, whose numbers the table gets."""
        tensors = table.configure(list(map(self._numbers, self.param_groups)))
        slots = list(map(_slots, self.param_groups))
        return _TablePlan(table, self._state_values(), self._options(), slots, tensors)

    def _options(self) -> list[tuple[Any, ...]]:
        values = itemgetter(*self.defaults)
        return [(len(group["params"]), *values(group)) for group in self.param_groups]

    def _state_values(self) -> list[Any]:
        try:
            return list(chain.from_iterable(map(dict.values, self.state.values())))
        except TypeError:  # an object of the user's own; a new one equals nothing
            return [object()]

    def _unsupported(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> str | None:
        """Why the compiled core cannot take this step."""
        if dispatch_modes():
            return "a TorchDispatchMode is active"
        for param, grad in zip(params, grads, strict=True):
            if reason := mismatch(param, param):
                return f"a parameter {reason}"
            if reason := mismatch(grad, param):
                return f"a gradient {reason}"
        if overlap(params):
            return "parameters share memory with each other"
        for group in self.param_groups:
            if group["differentiable"] or group.get("capturable"):
                return "differentiable or capturable is set"
            for param in group["params"]:
                if param.grad is not None and (reason := self._unsupported_state(param, group)):
                    return f"its state {reason}"
        return why_missing() if need(f"tt.optim.{type(self).__name__}") is None else None

    def _unsupported_state(self, param: Tensor, group: Group) -> str | None:
        for key in _slots(group).values():
            tensor = self.state.get(param, {}).get(key)
            if not isinstance(tensor, Tensor):
                return f"has no tensor {key!r}, which a step of torch's own makes"
            if reason := mismatch(tensor, tensor if key == "step" else param):
                return f"{key!r} {reason}"
            if key == "step" and tensor.numel() != 1:
                return f"'step' has {tensor.numel()} entries, expected one"
        return None

    def _entry(self, param: Tensor, number: int, group: Group) -> ParamEntry:
        tensors = {slot: self.state[param][key] for slot, key in _slots(group).items()}
        return ParamEntry(param, number, **tensors)

    def _numbers(self, group: Group) -> dict[str, Any]:
        """The fields of `tt_group`."""
        numbers = {name: group[name] for name in OPTIONS if name in self.defaults}
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = group["betas"]
        rule = "adamw" if group.get("decoupled_weight_decay") else self._rule
        return numbers | {"rule": RULES[rule]}


def _slots(group: Group) -> dict[str, str]:
    """The key in torch's state of each tensor field of an entry."""
    if "momentum" in group:
        return {"first": "momentum_buffer"} if group["momentum"] else {}
    slots = {"step": "step", "first": "exp_avg", "second": "exp_avg_sq"}
    return slots | {"largest": "max_exp_avg_sq"} if group["amsgrad"] else slots


class Adam(_KernelOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` that clips by the global norm and steps in one call.

    The update is torch's, to rounding.

    It is faster for networks of few, small tensors, where an optimizer spends its time on calls. On
    a GPU torch's own step runs, and nothing is gained.

    Args:
        params: parameters, named parameters or groups, as `torch.optim.Adam` takes them.
        lr: the learning rate; a tensor of one number may change in place.
        betas: decay of the means of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: this times the weight is added to the gradient (L2), default 0. `AdamW`
            shrinks the weight instead.
        amsgrad: divide by the largest mean of squares so far.
        maximize: ascend instead of descending.
        max_norm: scale the gradients of all groups together down to this norm; default: leave them
            unchanged. `norm` then holds the norm before scaling. `.grad` is not written; to log
            clipped gradients, use `torch.nn.utils.clip_grad_norm_`.
        foreach, fused: select torch's own step for when the compiled one does not run.
        capturable, differentiable: either makes torch's own step run.

    Raises:
        ConfigError: `max_norm` that is not above 0, or with `differentiable`.
        ValueError: other arguments out of range, as torch reports it.

    Cost: 8 bytes of state per float32 number, 12 with amsgrad, as torch. Gradients are read twice
    with `max_norm`.

    Example:
        >>> import torch, throughtime.optim
        >>> layer = torch.nn.Linear(3, 2)
        >>> optimizer = throughtime.optim.Adam(layer.parameters(), lr=0.01, max_norm=1.0)
        >>> layer(torch.ones(4, 3)).square().sum().backward()
        >>> optimizer.step()
        >>> bool(optimizer.norm > 0)
        True

    References: D. P. Kingma and J. Ba, Adam: a method for stochastic optimization, ICLR (2015). S.
    J. Reddi, S. Kale and S. Kumar, On the convergence of Adam and beyond, ICLR (2018).
    """

    _rule = "adam"


class AdamW(_KernelOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` that clips by the global norm and steps in one call.

    The update is torch's, to rounding.

    Args:
        params: parameters, named parameters or groups, as `torch.optim.AdamW` takes them.
        lr: the learning rate; a tensor of one number may change in place.
        betas: decay of the means of gradients and of their squares.
        eps: added to the denominator.
        weight_decay: at each step the weight shrinks by this times the learning rate,
            independently of its gradient; default 0.01.
        amsgrad: divide by the largest mean of squares so far.
        maximize: ascend instead of descending.
        max_norm: as in `Adam`.
        foreach, fused, capturable, differentiable: as in `Adam`.

    Raises:
        ConfigError: `max_norm` that is not above 0, or with `differentiable`.
        ValueError: other arguments out of range, as torch reports it.

    Cost: that of `Adam`.

    Example:
        >>> import torch, throughtime.optim
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = throughtime.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.grad = torch.zeros(1)
        >>> optimizer.step()
        >>> round(weight.item(), 4)
        0.95

    References: I. Loshchilov and F. Hutter, Decoupled weight decay regularization, ICLR (2019).
    """

    _rule = "adamw"


class SGD(_KernelOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` that clips by the global norm and steps in one call.

    The update is torch's, to rounding.

    Args:
        params: parameters, named parameters or groups, as `torch.optim.SGD` takes them.
        lr: the learning rate; a tensor of one number may change in place.
        momentum: decay of the running sum of gradients that replaces the gradient; 0: no sum.
        dampening: the share of each new gradient that this sum omits.
        weight_decay: this times the weight is added to the gradient.
        nesterov: use Nesterov's momentum.
        maximize: ascend instead of descending.
        max_norm, foreach, fused, differentiable: as in `Adam`.

    Raises:
        ConfigError: `max_norm` that is not above 0, or with `differentiable`.
        ValueError: other arguments out of range, as torch reports it.

    Cost: 4 bytes of state per float32 number with momentum, none without, as torch. Gradients are
    read twice with `max_norm`.

    Example:
        >>> import torch, throughtime.optim
        >>> weight = torch.nn.Parameter(torch.tensor([0.0, 0.0]))
        >>> optimizer = throughtime.optim.SGD([weight], lr=1.0, max_norm=1.0)
        >>> weight.grad = torch.tensor([-30.0, 40.0])
        >>> optimizer.step()
        >>> weight.data, optimizer.norm
        (tensor([ 0.6000, -0.8000]), 50.0)

    References: I. Sutskever, J. Martens, G. Dahl and G. Hinton, On the importance of initialization
    and momentum in deep learning, ICML (2013), for Nesterov's momentum as torch writes it.
    """

    _rule = "sgd"
