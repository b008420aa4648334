"""SGD, Adam and AdamW that clip by the global norm and step in one call of the compiled core.

    n = |g|, over the gradients of all groups        g' = g * min(1, max_norm / (n + 1e-6))
    then torch's rule, with g' for g

Drop-in for `torch.optim`: subclasses of its optimizers, with their arguments, groups, hooks,
schedulers and a `state_dict` that either loads from the other. Parameters and state stay tensors of
their own, so that neither safetensors nor tied weights notice; the kernel is handed their
addresses. It reads a gradient and scales it on the way: clipping leaves `.grad` as the backward
pass left it.

Whatever the kernel does not take goes through torch's own step, clipped in the same way, and
`fallback` says why: other devices and types than float32 and float64 on the CPU, tensors with gaps,
subclasses such as DTensor, `differentiable`, or no compiled core. To be confused neither with
`torch.nn.utils.clip_grad_norm_`, which writes the clipped gradients, nor with clipping each tensor
by itself.

References: R. Pascanu, T. Mikolov and Y. Bengio, On the difficulty of training recurrent neural
networks, ICML (2013), for the norm; for the rules those of `torch.optim`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_not, itemgetter
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._autograd import _profiler_enabled as profiled
from torch._compile import (
    _disable_dynamo as disable_dynamo,
)  # torch.compiler.disable imports the whole compiler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from torch.optim.optimizer import _global_optimizer_post_hooks as post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as pre_hooks

from throughtime.errors import ConfigError
from throughtime.kernels.library import need, why_missing
from throughtime.kernels.optimizer import RULES, TYPES, Entry, Table, misfit, overlap

__all__ = ["SGD", "Adam", "AdamW"]

Closure = Callable[[], Any]
Group = Mapping[str, Any]


class _Plan(NamedTuple):
    """A table, and what else than tensors it was made from."""

    table: Table
    state: list[Any]
    options: list[tuple[Any, ...]]
    slots: list[dict[str, str]]
    live: bool  # an option is a tensor, whose number may change where it is


class _Compiled(Optimizer):
    """What the three share: everything but the rule."""

    _torch: ClassVar[type[Optimizer]]
    _max_norm: float | None = None
    _norm: float | Tensor | None = None
    _plan: _Plan | None = None
    fallback: str | None = (
        None  # why the last step was torch's own; None where the compiled core took it
    )

    def _begin(self, max_norm: float | None) -> None:
        self.max_norm = max_norm
        self._step_supports_amp_scaling = (
            False  # GradScaler then unscales first, so that the norm is that of the gradients
        )

    @property
    def max_norm(self) -> float | None:
        """The norm that gradients are scaled down to.

        None: neither scaled nor measured. May be set at any time.
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

        None before the first, and without `max_norm`.
        """
        return None if self._norm is None else float(self._norm)

    def step(self, closure: Closure | None = None) -> Any:
        """One update of every parameter that has a gradient; `.grad` stays as it is.

        Args:
            closure: evaluates the model again, calls backward and returns the loss.

        Returns:
            What the closure returned, None without one.

        Raises:
            ConfigError: sparse gradients, which only SGD without `max_norm` takes.
        """
        if torch.compiler.is_compiling():
            return self._untraced(closure)
        own = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if own or pre_hooks or post_hooks or profiled():
            return self._observed() if closure is None else self._observed(closure=closure)
        return self._advance(closure)

    # Torch would wrap every step for hooks and profilers, 7 us that are for nothing where there are
    # none.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _advance(self, closure: Closure | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.fallback = self._in_core()
        if self.fallback is not None:
            self._in_torch()
        return loss

    @disable_dynamo
    def _untraced(self, closure: Closure | None) -> Any:
        """A graph of torch.compile ends before the step and the next begins behind it."""
        return self.step(closure)

    _observed = Optimizer.profile_hook_step(_advance)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leaves no gradient behind, or zeros where `set_to_none` is false."""
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

    def _in_torch(self) -> None:
        step: Callable[[Optimizer], Any] = self._torch.step
        step = (
            getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        )  # hooks are called already
        with self._clipped():
            step(self)

    @contextmanager
    def _clipped(self) -> Generator[None]:
        """Clipped copies in the places of the gradients."""
        held = [
            (param, param.grad)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        self._refuse_sparse([grad for _, grad in held if grad.layout != torch.strided])
        self._norm = None
        if self._max_norm is None:
            yield
            return
        try:
            for param, grad in held:
                param.grad = grad.detach().clone()
            norm = clip_grad_norm_([param for param, _ in held], self._max_norm)
            self._norm = getattr(
                norm, "full_tensor", lambda: norm
            )()  # of a DTensor: now, when every rank is here
            yield
        finally:
            for param, grad in held:
                param.grad = grad

    def _refuse_sparse(self, sparse: Sequence[Tensor]) -> None:
        if sparse and (self._max_norm is not None or not isinstance(self, torch.optim.SGD)):
            raise ConfigError(
                f"{len(sparse)} gradients under {type(self).__name__} are sparse, the first of"
                f" shape {tuple(sparse[0].shape)}; expected dense ones, only SGD without max_norm"
                " takes others. Take nn.Embedding(..., sparse=False), or torch.optim.SparseAdam"
            )

    def _in_core(self) -> str | None:
        """Takes the step in the compiled core, or says why not."""
        params = [param for group in self.param_groups for param in group["params"]]
        grads: list[Any] = [param.grad for param in params]
        if NoneType in map(type, grads):
            params = [param for param, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not params:
            self._norm = None if self._max_norm is None else 0.0
            return None
        plan = self._last_plan()
        if plan is None or not plan.table.fits(params, grads):
            self._plan = None
            if (why := self._unfit(params, grads)) is not None:
                return why
            self._plan = plan = self._new_plan(params, grads)
        norm = plan.table.run(grads, self._max_norm)
        self._norm = None if self._max_norm is None else norm
        return None

    def _last_plan(self) -> _Plan | None:
        """The plan of the last step with the numbers of this one, where state and options are of the same form."""
        plan = self._plan
        if plan is None or dispatch_modes():
            return None
        state, options = self._kept(), self._options()
        if len(state) != len(plan.state) or any(map(is_not, state, plan.state)):
            return None
        if plan.live or options != plan.options:
            if list(map(self._slots, self.param_groups)) != plan.slots:
                return None
            live = plan.table.configure(list(map(self._numbers, self.param_groups)))
            self._plan = plan = plan._replace(options=options, live=live)
        return plan

    def _new_plan(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> _Plan:
        places = {
            id(param): (number, group)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
        }
        entries = [self._entry(param, *places[id(param)]) for param in params]
        table = Table(entries, grads, len(self.param_groups))
        live = table.configure(list(map(self._numbers, self.param_groups)))
        return _Plan(
            table, self._kept(), self._options(), list(map(self._slots, self.param_groups)), live
        )

    def _options(self) -> list[tuple[Any, ...]]:
        take = itemgetter(*self.defaults)
        return [(len(group["params"]), *take(group)) for group in self.param_groups]

    def _kept(self) -> list[Any]:
        try:
            return list(chain.from_iterable(map(dict.values, self.state.values())))
        except TypeError:  # something of the user's own, which is equal to nothing
            return [object()]

    def _unfit(self, params: Sequence[Tensor], grads: Sequence[Tensor]) -> str | None:
        """What the compiled core cannot take."""
        if dispatch_modes():
            return "a mode of torch.utils._python_dispatch watches the operators"
        for param, grad in zip(params, grads, strict=True):
            if why := misfit(param, param):
                return f"a parameter {why}"
            if why := misfit(grad, param):
                return f"a gradient {why}"
        if overlap(params):
            return "parameters share memory with each other"
        for group in self.param_groups:
            if group["differentiable"] or group.get("capturable"):
                return "differentiable or capturable is set"
            for param in group["params"]:
                if param.grad is not None and (why := self._unfit_state(param, group)):
                    return f"its state {why}"
        return why_missing() if need(f"tt.optim.{type(self).__name__}") is None else None

    def _unfit_state(self, param: Tensor, group: Group) -> str | None:
        state = self.state.get(param)
        if not state or self._fresh(state):
            return None
        for key in self._slots(group).values():
            tensor = state.get(key)
            if not isinstance(tensor, Tensor):
                return f"has no tensor {key!r}"
            if why := _misfit_step(tensor) if key == "step" else misfit(tensor, param):
                return f"{key!r} {why}"
        return None

    def _entry(self, param: Tensor, number: int, group: Group) -> Entry:
        slots = self._slots(group)
        if not slots:
            return Entry(param, number)
        state = self.state[param]
        fresh = self._fresh(state)
        if fresh:
            for key in slots.values():
                state[key] = (
                    _counter()
                    if key == "step"
                    else torch.zeros_like(param, memory_format=torch.preserve_format)
                )
        return Entry(
            param, number, fresh=fresh, **{slot: state[key] for slot, key in slots.items()}
        )

    @staticmethod
    def _slots(group: Group) -> dict[str, str]:
        """Under which name of torch's state each field of an entry is kept."""
        raise NotImplementedError

    @staticmethod
    def _fresh(state: Mapping[str, Any]) -> bool:
        """Whether a parameter takes its first step."""
        raise NotImplementedError

    def _numbers(self, group: Group) -> dict[str, Any]:
        """The numbers of `tt_group`."""
        raise NotImplementedError


def _counter() -> Tensor:
    """Torch's: a float64 can count further, where all is float64."""
    return torch.tensor(
        0.0,
        dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32,
        device="cpu",
    )


def _misfit_step(step: Tensor) -> str | None:
    if (
        type(step) is not Tensor
        or step.device.type != "cpu"
        or step.dtype not in TYPES
        or step.numel() != 1
    ):
        return (
            f"is {step.dtype} on {step.device} with {step.numel()} entries, expected one float32 or"
            " float64 on the CPU"
        )
    return None


class _OfAdam(_Compiled):
    @staticmethod
    def _slots(group: Group) -> dict[str, str]:
        slots = {"step": "step", "first": "exp_avg", "second": "exp_avg_sq"}
        return slots | {"largest": "max_exp_avg_sq"} if group["amsgrad"] else slots

    @staticmethod
    def _fresh(state: Mapping[str, Any]) -> bool:
        return not state

    def _numbers(self, group: Group) -> dict[str, Any]:
        apart = group.get("decoupled_weight_decay", isinstance(self, torch.optim.AdamW))
        beta1, beta2 = group["betas"]
        numbers = {
            "lr": group["lr"],
            "decay": group["weight_decay"],
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
        }
        return numbers | {
            "rule": RULES["adamw" if apart else "adam"],
            "amsgrad": group["amsgrad"],
            "maximize": group["maximize"],
        }


class Adam(_OfAdam, torch.optim.Adam):
    """`torch.optim.Adam` that clips by the global norm and steps in one call; the update is
    torch's, to rounding.

    For networks of few, small tensors, where calls are what an optimizer costs. On a GPU nothing is
    gained: it is torch's own step there.

    Args:
        params: parameters, named parameters or groups, as `torch.optim.Adam` takes them.
        lr: the learning rate; a tensor of one number may change where it is.
        betas: decay of the means of gradients and of their squares.
        eps: joins the denominator.
        weight_decay: times the weight joins the gradient (L2); `AdamW` shrinks the weight instead.
        amsgrad: divide by the largest mean of squares so far.
        maximize: climb instead of descending.
        max_norm: scale the gradients of all groups together down to this norm; default: leave them
            as they are. `norm` then is what it was before, and `.grad` is not written: what logs
            clipped gradients wants `torch.nn.utils.clip_grad_norm_`.
        foreach, fused: which of torch's own steps runs where the compiled one does not; without
        meaning elsewhere. capturable, differentiable: torch's own step.

    Raises:
        ConfigError: `max_norm` that is not above 0, or with `differentiable`.
        ValueError: other arguments out of range, as torch words it.

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

    _torch = torch.optim.Adam

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        max_norm: float | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        torchs: dict[str, Any] = {
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **torchs)
        self._begin(max_norm)


class AdamW(_OfAdam, torch.optim.AdamW):
    """`torch.optim.AdamW` that clips by the global norm and steps in one call; the update is
    torch's, to rounding.

    Args:
        params: parameters, named parameters or groups, as `torch.optim.AdamW` takes them.
        lr: the learning rate; a tensor of one number may change where it is.
        betas: decay of the means of gradients and of their squares.
        eps: joins the denominator.
        weight_decay: the weight shrinks by this times the learning rate at each step, apart from
            its gradient.
        amsgrad: divide by the largest mean of squares so far.
        maximize: climb instead of descending.
        max_norm: as in `Adam`.
        foreach, fused, capturable, differentiable: as in `Adam`.

    Raises:
        ConfigError: `max_norm` that is not above 0, or with `differentiable`.
        ValueError: other arguments out of range, as torch words it.

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

    _torch = torch.optim.AdamW

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        max_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        torchs: dict[str, Any] = {
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, **torchs)
        self._begin(max_norm)


class SGD(_Compiled, torch.optim.SGD):
    """`torch.optim.SGD` that clips by the global norm and steps in one call; the update is torch's,
    to rounding.

    Args:
        params: parameters, named parameters or groups, as `torch.optim.SGD` takes them.
        lr: the learning rate; a tensor of one number may change where it is.
        momentum: decay of the sum of gradients that takes the place of the gradient; 0: none is
            kept.
        dampening: what share of each new gradient that sum leaves out.
        weight_decay: times the weight joins the gradient.
        nesterov: look ahead by one step of momentum.
        maximize: climb instead of descending.
        max_norm, foreach, fused, differentiable: as in `Adam`.

    Raises:
        ConfigError: `max_norm` that is not above 0, or with `differentiable`.
        ValueError: other arguments out of range, as torch words it.

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

    _torch = torch.optim.SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        max_norm: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        torchs: dict[str, Any] = {
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, **torchs)
        self._begin(max_norm)

    @staticmethod
    def _slots(group: Group) -> dict[str, str]:
        return {"first": "momentum_buffer"} if group["momentum"] else {}

    @staticmethod
    def _fresh(state: Mapping[str, Any]) -> bool:
        return state.get("momentum_buffer") is None

    def _numbers(self, group: Group) -> dict[str, Any]:
        numbers = {
            "lr": group["lr"],
            "decay": group["weight_decay"],
            "momentum": group["momentum"],
            "dampening": group["dampening"],
        }
        return numbers | {
            "rule": RULES["sgd"],
            "nesterov": group["nesterov"],
            "maximize": group["maximize"],
        }
