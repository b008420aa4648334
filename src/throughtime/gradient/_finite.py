"""Whether a loss and its gradient are finite: read at once, or on a device one update later.

Reading a value of a device makes the host wait until the device has computed it. So on a device an
update ends with one flag that stays there, and the host reads it before the next update. Until then
a gradient that is not finite is zero: the optimizer's step changes no weight, except by momentum
and weight decay.
"""

import cmath
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from throughtime._device import is_accelerator
from throughtime.errors import RunError

# The message for a loss and gradients, of which the named one is the first that is not finite
Message: TypeAlias = Callable[[str | None], str]


@dataclass(eq=False)
class _Flag:
    """What is on the device after one update.

    Attributes:
        finite: one boolean.
        sizes: the largest absolute value of the loss and of each gradient.
        names: of the gradients.
        message: for the error.
    """

    finite: Tensor
    sizes: Tensor
    names: list[str]
    message: Message

    def error(self) -> RunError:
        """The error; it names the first gradient that is not finite."""
        _, *sizes = self.sizes.tolist()
        wrong = (n for n, size in zip(self.names, sizes, strict=True) if not math.isfinite(size))
        return RunError(self.message(next(wrong, None)))


@dataclass(eq=False)
class LateChecks:
    """The flags of updates that the host has not read yet."""

    flags: list[_Flag] = field(default_factory=list[_Flag])

    def add(self, gradients: Mapping[str, Tensor], loss: Tensor, message: Message) -> bool:
        """Set the gradients to zero, on their device, if one of them or the loss is not finite.

        Returns:
            False where there is nothing to wait for: no accelerator, or tensors of other classes.
        """
        values = {name: _values(gradient) for name, gradient in gradients.items()}
        values = {name: value for name, value in values.items() if value.numel()}
        tensors = [loss, *values.values()]
        if not is_accelerator(loss) or any(type(tensor) is not Tensor for tensor in tensors):
            return False
        with torch.no_grad():
            # as torch's clip_grad_norm_ does; get_total_norm would return the largest one alone
            norms = torch._foreach_norm(tensors, math.inf)  # pyright: ignore[reportPrivateImportUsage]
            sizes = torch.stack([norm.to(loss.device) for norm in norms])
            finite = sizes.isfinite().all()
            for value in values.values():
                value.masked_fill_(~finite.to(value.device), 0)
        self.flags.append(_Flag(finite, sizes, list(values), message))
        return True

    def zero(self, sums: Iterable[Tensor | None]) -> None:
        """Set sums of gradients to zero, on their device, if one of the flags says so."""
        if self.flags:
            finite = torch.stack([flag.finite for flag in self.flags]).all()
            for total in sums:
                if total is not None:
                    _values(total).masked_fill_(~finite.to(total.device), 0)

    def read(self) -> None:
        """Wait for the device, and read all flags at once.

        Raises:
            RunError: a loss or gradient was not finite.
        """
        flags, self.flags = self.flags, []
        every = [flag.finite for flag in flags]
        if not every or bool(every[0] if len(every) == 1 else torch.stack(every).all()):
            return
        raise next(flag for flag in flags if not bool(flag.finite)).error()


def is_finite(loss: Tensor, gradients: Iterable[Tensor | None]) -> bool:
    """Whether loss and gradients are finite; false as well if the sum of a gradient is not.

    Waits for a device once.
    """
    values = [loss, *(gradient.sum() for gradient in gradients if gradient is not None)]
    if loss.is_cpu or any(type(value) is not Tensor for value in values):
        return all(cmath.isfinite(value.item()) for value in values)
    moved = [value.detach().abs().to(loss.device, torch.float32) for value in values]
    return bool(torch.stack(moved).isfinite().all())


def first_nonfinite(gradients: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """The name of the first gradient that is not finite."""
    for name, gradient in gradients:
        if gradient is None:
            continue
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not bool(values.isfinite().all()):
            return name
    return None


def _values(gradient: Tensor) -> Tensor:
    """The numbers of a gradient; of a sparse one those that are stored, without a wait."""
    return gradient._values() if gradient.is_sparse else gradient
