"""Trials of a module: on a copy, on a few steps, with nothing left behind.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import copy
import random
import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from throughtime._device import fork_rng
from throughtime.carry._inside import OF_EVERY_MODULE

STEPS, LANES = 7, 3  # of a trial: small, different, and rarely the sizes of a layer
LONG_STEPS, MAX_STEPS = 32, 256  # of one of a link on more steps, and of any at most

_DRAWS = re.compile("(rand|randn|normal|bernoulli|uniform|exponential)(_like)?_?")


class ConstantRandomness(TorchFunctionMode):
    """Replaces dropout and random numbers by constants: the same for every step and lane.

    What a module computes then does not depend on how its steps are divided among calls, unless
    something that is dropped or drawn is part of its state.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if "dropout" in name:
            x = (*args, *kwargs.values())[0].clone()
            y = func(*args, **kwargs)
            return y if torch.equal(x, y) else x * 0.75
        result = func(*args, **kwargs)
        if _DRAWS.fullmatch(name) and isinstance(result, Tensor) and result.is_floating_point():
            with torch.no_grad():
                result.fill_(0.5)
        return result


@contextmanager
def quiet(device: torch.device) -> Generator[None]:
    """Random states are restored; no autocast, no warnings; cuDNN, which needs training, is off."""
    python = random.getstate()
    try:
        with (
            fork_rng(device),
            torch.autocast(device.type, enabled=False),
            torch.backends.cudnn.flags(enabled=False),
            torch.inference_mode(False),
            warnings.catch_warnings(action="ignore"),
            torch.enable_grad(),
        ):
            yield
    finally:
        random.setstate(python)


T = TypeVar("T", bound=nn.Module)


def copy_of(module: T) -> T | None:
    """A copy of a module, with weights of its own; None for one that refuses to be copied.

    Tensors with a graph in attributes, which torch does not copy, are detached.
    """
    held = pytree.tree_leaves([[*vars(part).values()] for part in module.modules()])
    graphs = [leaf for leaf in held if isinstance(leaf, Tensor) and not leaf.is_leaf]
    try:
        twin = copy.deepcopy(module, {id(leaf): leaf.detach().clone() for leaf in graphs})
    # whatever a class raises that is not made for copies: FSDP, locks, handles
    except Exception:  # noqa: BLE001
        return None
    # computing in less than float32 would hide what the laws measure
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in twin.parameters()):
        twin.float()
    return twin


class Snapshot:
    """The attributes, buffers and modes of a module, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        containers: list[Any] = []
        for part in module.modules():
            own = vars(part)
            held = [value for name, value in own.items() if name not in OF_EVERY_MODULE]
            containers += [own, part._buffers, part._parameters]
            containers += [value for value in held if isinstance(value, (list, dict))]
        self._containers = [(values, copy.copy(values)) for values in containers]
        self._buffers = [(b, b.detach().clone()) for b in module.buffers()]

    def restore(self) -> None:
        """Put everything back."""
        for values, before in self._containers:
            if isinstance(values, list):
                values[:] = before
            else:
                values.clear()
                values.update(before)
        for buffer, value in self._buffers:
            if buffer.shape != value.shape or not torch.equal(buffer, value):
                buffer.data = value.clone()  # a graph may hold what is unchanged


def set_modes(module: nn.Module, training: Sequence[bool]) -> None:
    """Set the training mode of every part; none is evaluation. torch's own dropout is off."""
    for i, part in enumerate(module.modules()):
        part.training = bool(training) and training[i]
        if isinstance(part, nn.RNNBase) and training:
            part.dropout = 0.0  # a random number generator inside the operator


def is_sharded(module: nn.Module) -> bool:
    """Whether weights are spread over ranks: such a module cannot be called part by part."""
    # by name: importing DTensor takes longer than all of throughtime
    kinds = {*map(type, module.parameters()), *map(type, module.modules())}
    return any(b.__name__ in ("DTensor", "FSDPModule") for kind in kinds for b in kind.__mro__)


def weight_of(module: nn.Module) -> Tensor | None:
    """A weight of a module; None without any."""
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def random_normal(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal numbers on the host, whatever the default device and dtype are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def sample_inputs(
    x: Tensor, lanes: int, steps: int = STEPS, *, scale: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """Example inputs for any number of lanes and steps, all rows different if possible.

    Rows are drawn from those of `x` `(T, B, ...)`; numbers get noise, tokens stay what they are.
    With a `scale` they are normal numbers of that deviation instead, in the dtype of a `weight`.
    """
    rows = x.detach().flatten(0, 1)
    if not x.is_floating_point():
        rows = rows.unique(dim=0)
    order = random_normal((steps * lanes,), 0).argsort() % len(rows)
    sample = rows[order.to(rows.device)].unflatten(0, (steps, lanes))
    if not x.is_floating_point():
        return sample
    sample = sample.nan_to_num(0.0, 0.0, 0.0)
    noise, spread = random_normal(sample.shape, 3).to(sample), sample.std()
    sample = noise * scale if scale else sample + noise * (spread * 0.5 if spread > 0 else 1)
    return sample if weight is None else sample.to(weight.dtype)


def reach_of(module: nn.Module) -> int:
    """The past steps that convolutions need, if time is the longest dimension of their kernels."""
    return sum(
        max((size - 1) * by for size, by in zip(part.kernel_size, part.dilation, strict=True))
        for part in module.modules()
        if isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    )


def changed_inputs(x: Tensor, step: int, lane: int) -> Tensor:
    """The inputs with another row at one step of one lane."""
    other, row = x.clone(), x[step, lane]
    if x.is_floating_point():
        other[step, lane] = row * -1.5 + 0.7
        return other
    different = [o for o in x.flatten(0, 1).unique(dim=0) if not torch.equal(o, row)]
    other[step, lane] = different[0] if different else (row == 0).to(x.dtype)
    return other


def perturb(module: nn.Module) -> None:
    """Add noise to all weights and buffers: a layer that starts at zero hides what is below it.

    Weights get noise of their own size, at least .1, and stay positive where all of them were, as
    under a root. Biases become positive, since a ReLU hides negative ones; buffers keep their zeros
    and signs.
    """
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            if p.is_floating_point() and p.numel():
                spread = max(0.1, float(p.detach().square().mean().sqrt()))
                is_positive = p.dim() == 1 or bool((p > 0).all())
                p.add_(random_normal(p.shape, i).to(p) * spread)
                p.copy_(p.abs() if is_positive else p)
        for i, b in enumerate(module.buffers()):
            if b.is_floating_point():
                b.mul_(1 + 0.1 * random_normal(b.shape, i).to(b).clamp(-3, 3))
