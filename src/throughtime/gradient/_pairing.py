"""The check that a loss compares each row with its own target, and not with those of all rows.

One-column outputs and targets reach a loss as `(N, 1)`. `(N,)` against `(N, 1)` broadcasts to
`(N, N)` silently, and the gradient of its mean is that of another loss. Broadcasting adds the
missing dimension there. Operands with the same number of dimensions, as in
`a[:, None] - b[None, :]`, pair rows on purpose. So does a tensor with itself: `a[:, None] - a`.

A `TorchDispatchMode` observes the operations: also those of scripted losses and of custom autograd
functions, which a `TorchFunctionMode` does not see. It computes nothing.

Shapes: `N` rows, one for each valid step.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from throughtime._device import generators, set_generators
from throughtime.errors import ModelError

R = TypeVar("R")
Size: TypeAlias = tuple[int, ...]

# Operators that broadcast and are not tagged as pointwise. The losses have expanded operands.
_BROADCAST = {
    *("dist", "floor_divide", "masked_fill", "masked_select", "rsub"),
    *("huber_loss", "mse_loss", "smooth_l1_loss"),
}


class _PairOperation(NamedTuple):
    """An operation that pairs `size` elements of one operand with as many of another."""

    operator: str
    shapes: tuple[Size, Size]
    size: int


class _Watch(TorchDispatchMode):
    """Calls `on_pairing` before every operation that would pair elements."""

    def __init__(self, on_pairing: Callable[[_PairOperation], None]) -> None:
        super().__init__()
        self._on_pairing = on_pairing
        self._sources: dict[object, Size] = {}  # the shapes of expanded tensors before that

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        name = getattr(func, "_opname", "")
        if name in _BROADCAST or torch.Tag.pointwise in getattr(func, "tags", ()):
            self._inspect(name, [a for a in args if isinstance(a, Tensor)])
        result = func(*args, **(kwargs or {}))
        if name == "expand" and isinstance(result, Tensor):
            self._sources[_view(result)] = tuple(args[0].shape)
        return result

    def _inspect(self, name: str, operands: Sequence[Tensor]) -> None:
        for a, b in combinations(operands, 2):
            shapes = tuple(self._sources.get(_view(x), tuple(x.shape)) for x in (a, b))
            size = paired_size(*shapes)
            if size and not _is_same(a, b):
                self._on_pairing(_PairOperation(name, (shapes[0], shapes[1]), size))


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether both are views of the same elements."""
    return a.data_ptr() == b.data_ptr()


def _view(tensor: Tensor) -> object:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def paired_size(a: Size, b: Size) -> int:
    """How many elements of a dimension of `a` broadcast against as many of another one of `b`.

    0 if there are none, or if the shapes have the same number of dimensions.

    Example:
        >>> from throughtime.gradient._pairing import paired_size
        >>> paired_size((7,), (7, 1)), paired_size((1, 7), (7, 1)), paired_size((7,), (5, 7))
        (7, 0, 0)
    """
    if len(a) == len(b):
        return 0
    dims = max(len(a), len(b))
    pairs = [*zip((1,) * (dims - len(a)) + a, (1,) * (dims - len(b)) + b, strict=True)]
    sizes = {m for m, n in pairs if m > n == 1} & {n for m, n in pairs if n > m == 1}
    return max(sizes, default=0)


class _Stop(Exception):  # noqa: N818 (ends a call, and is no error)
    """Ends a call before the operation that pairs elements."""


def _call(
    function: Callable[[Tensor, Tensor], R],
    rows: Tensor,
    targets: Tensor,
    stops: Callable[[_PairOperation], bool],
) -> tuple[R, None] | tuple[None, _PairOperation]:
    """The result of the function, or its first pairing at which the call is to stop."""
    pairings: list[_PairOperation] = []

    def stop(pairing: _PairOperation) -> None:
        if stops(pairing):
            pairings.append(pairing)
            raise _Stop

    watch, result = _Watch(stop), None
    try:
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # it never compiles what it has met under a mode
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            # torch's own warning about a part of these cases
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Using a target size")
            stack.enter_context(watch)
            result = function(rows, targets)
    except Exception:  # of any type: a scripted function changes it
        if not pairings:
            raise
    if pairings:  # also where the function has caught the exception
        return None, pairings[0]
    return cast("R", result), None


def check_rows(
    function: Callable[[Tensor, Tensor], R], rows: Tensor, targets: Tensor, role: str
) -> R:
    """Call a loss or a metric once, and refuse it if it pairs rows by accident.

    A dimension may have N elements and hold no rows, such as a grid of values. So where elements
    are paired, the function runs on twice as many rows: the sizes of rows change, others do not. It
    is refused, or called again with the same random numbers. Where it takes no other number of
    rows, N decides.

    Args:
        function: of outputs and targets.
        rows: the outputs, `(N, C)`, N at least 2.
        targets: `(N, C)` or `(N,)`.
        role: of the function, for the message.

    Returns:
        What the function returns.

    Raises:
        ModelError: the function pairs rows; the message has the line, and the one to write.

    Cost: 10 to 20 microseconds for each operation of the call.
    """
    random = generators(rows.device)
    intended: list[tuple[object, ...]] = []
    while True:
        result, pairing = _call(function, rows, targets, lambda one: one[:2] not in intended)
        if pairing is None:
            return cast("R", result)
        if _grows(function, rows, targets, pairing):
            raise ModelError(_message(rows, targets, pairing, role))
        intended.append(pairing[:2])
        set_generators(random, rows.device)


def _grows(
    function: Callable[[Tensor, Tensor], object],
    rows: Tensor,
    targets: Tensor,
    first: _PairOperation,
) -> bool:
    """Whether the operation pairs more elements if there are more rows."""
    twice = [torch.cat([values, values]) for values in (rows, targets)]
    try:
        _, pairing = _call(
            function,
            twice[0],
            twice[1],
            lambda other: other.operator == first.operator and other.size != first.size,
        )
    except Exception:  # noqa: BLE001 (such as that of a function for a fixed number of rows)
        return first.size == len(rows)
    return pairing is not None


def _message(rows: Tensor, targets: Tensor, pairing: _PairOperation, role: str) -> str:
    a, b = pairing.shapes
    whole = tuple(torch.broadcast_shapes(a, b))
    advice = (
        "targets[:, 0] beside outputs[:, 0], or outputs beside targets"
        if rows.shape == targets.shape
        else "outputs[:, 0] beside targets, or targets[:, None] beside outputs"
    )
    return (
        f"{role} pairs each row with every other: {pairing.operator} broadcasts {a} against"
        f" {b} to {whole}. The outputs are {tuple(rows.shape)} and the targets"
        f" {tuple(targets.shape)}, one row for each valid"
        f" step; write {advice}. If all pairs are meant, write a[:, None] - b[None, :]"
    )
