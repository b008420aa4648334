"""The law of the mean: the loss of all rows is the weighted mean of the losses of their parts.

Chunks, ranks and accumulated updates split a loss, which changes nothing if it obeys the law. So
the first calls try it, on a copy of the loss and eight rows of the data. A part is one row, twice,
with its outputs scaled, so that the parts are unlike. Plain halves would not do: of 100,000 rows,
two halves have nearly the same root mean square. Labels of classes that occur go round. It is
computed in float64 if the loss can, so that rounding hides nothing.

A `SequenceLoss` that is additive obeys it for the two halves of any steps.

Shapes: `N` rows, one for each valid step, `C` outputs.
"""

import math
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from throughtime._device import fork_rng, generators, real_type
from throughtime.chunk import Chunk

SCALES = (0.25, 1.0, 0.06, 0.5, 0.9, 0.12, 0.7, 0.35)
TRIALS, TWICE = 6, 2
PREFIX = 64  # steps on which an additive loss is tried
# a loss that draws random numbers is judged by the mean of so many draws, of longer parts
DRAWS, LONGER = 16, 64
DEVIATIONS = 6
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 6e-3}

Loss = Callable[..., Any]
Weigh = Callable[[Tensor], float]
# the loss and the weight of a whole, then of its parts
Losses = Iterable[tuple[Any, float]]


def is_mean(loss_fn: Loss, outputs: Tensor, targets: Tensor, weigh: Weigh) -> bool | None:
    """Whether the loss of all rows is the weighted mean of the losses of their parts.

    A module, its buffers and torch's random state stay as they are. A function is called on rows
    that are not data, so one that counts its calls or draws from NumPy notices.

    Args:
        loss_fn: of outputs and targets.
        outputs: `(N, C)`.
        targets: `(N, ...)`.
        weigh: the weight of the loss of rows with these targets.

    Returns:
        None if these rows do not tell: their losses are too much alike, or the loss takes no other
        number of rows.

    Cost: 54 calls of the loss on up to 16 rows; of one that draws random numbers 900 on 1,000.
    """
    for dtype in dict.fromkeys((real_type(outputs), outputs.dtype)):
        try:
            call = _apart(loss_fn, dtype if dtype != outputs.dtype else None)
            with _unnoticed(outputs.device):
                trials = (_pick(outputs, targets, dtype, trial) for trial in range(TRIALS))
                verdicts = {_judge(_parts(call, *rows, weigh), rows[0]) for rows in trials}
        except Exception:  # noqa: BLE001, S112 (of any kind: the loss is the user's)
            continue
        # where one class occurs, weights of classes do not show
        varied = targets.is_floating_point() or bool((targets != targets[0]).any())
        return False if False in verdicts else True if True in verdicts and varied else None
    return None


def pairs_rows(loss_fn: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether the loss is the mean over all pairs of an output and a target of any row.

    So it is where `(N,)` meets `(N, 1)` by accident, which broadcasts to `(N, N)`.
    """
    rows, labels = _pick(outputs, targets, outputs.dtype, 0)
    pairs = product(rows.split(1), labels.split(1))
    cases = [((rows, labels), float(len(rows) ** 2)), *((pair, 1.0) for pair in pairs)]
    return _try(loss_fn, rows, lambda call: [(call(*rows), w) for rows, w in cases]) is True


def is_additive(loss_fn: Loss, outputs: Tensor, chunk: Chunk, lanes: bool = False) -> bool | None:
    """Whether sum and weight of a loss over steps are those of the two halves of the steps.

    Or, with `lanes`, those of the lanes. The outputs of the first half are scaled, so that the
    halves differ.

    Returns:
        None if these steps do not tell, or if the loss cannot be copied.
    """
    chunk, y = chunk[:PREFIX], outputs[:PREFIX].detach()
    half = chunk.steps // 2
    y = torch.cat([y[:half] * SCALES[0], y[half:]])
    parts = [(y, chunk), (y[:half], chunk[:half]), (y[half:], chunk[half:])]
    if lanes:
        parts[1:] = [(y[:, i : i + 1], chunk.lane(i)) for i in range(chunk.lanes)]
    return _try(loss_fn, y, lambda call: [call(*part) for part in parts])


def _try(loss_fn: Loss, rows: Tensor, losses: Callable[[Loss], Losses]) -> bool | None:
    """The verdict on the losses of a whole and its parts; None if the loss takes no such rows."""
    try:
        call = _apart(loss_fn, None)
        with _unnoticed(rows.device):
            return _judge(lambda _: losses(call), rows)
    except Exception:  # noqa: BLE001 (of any kind: the loss is the user's)
        return None


def _apart(loss_fn: Loss, dtype: torch.dtype | None) -> Loss:
    """A copy of the loss in evaluation mode, and of a type, if it is a module."""
    if not isinstance(loss_fn, nn.Module):  # a method would be copied with its object
        return loss_fn
    return deepcopy(loss_fn).eval().to(dtype)


@contextmanager
def _unnoticed(device: torch.device) -> Generator[None]:
    """A block that draws no random numbers, warns of nothing and compiles nothing."""
    # a compiled loss would be compiled for each number of rows
    compiles = "torch._dynamo" in sys.modules
    eager: Any = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
    with fork_rng(device), torch.enable_grad(), eager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _pick(
    outputs: Tensor, targets: Tensor, dtype: torch.dtype, trial: int
) -> tuple[Tensor, Tensor]:
    """Eight rows, spread over all, the outputs scaled; and their targets."""
    count, device = len(SCALES), outputs.device
    at = torch.linspace(0, len(outputs) - 1, count, device=device).round().long()
    rows, labels = outputs.detach()[at].to(dtype), targets[at]
    scales = torch.tensor(SCALES, dtype=dtype, device=device).roll(3 * trial)
    rows = rows * scales.view(-1, *[1] * (rows.dim() - 1))
    if labels.is_floating_point():
        return rows, labels.to(dtype)
    if labels.dim() == 1:
        known = targets.unique()  # others may be no index of what the loss looks up
        labels = known[(torch.arange(count, device=device) + trial).remainder(len(known))]
    return rows, labels


def _parts(call: Loss, rows: Tensor, labels: Tensor, weigh: Weigh) -> Callable[[int], Losses]:
    """The losses of all rows, and of each."""
    weights = [weigh(label) for label in labels.split(1)]

    def measure(longer: int) -> Losses:
        step = TWICE * longer
        x, y = (values.repeat_interleave(step, 0) for values in (rows, labels))
        x = x.requires_grad_()  # for a penalty of the gradient
        parts = [(x, y), *zip(x.split(step), y.split(step), strict=True)]
        return zip((call(*part) for part in parts), [sum(weights), *weights], strict=True)

    return measure


def _judge(measure: Callable[[int], Losses], rows: Tensor) -> bool | None:
    """Compare the loss of the whole with the mean of those of its parts; None if they are alike."""

    def losses(longer: int) -> tuple[Tensor, Tensor]:
        values, weights = zip(*measure(longer), strict=True)
        stacked = torch.stack([value.detach().reshape(()) for value in values])
        sizes = torch.tensor(weights, dtype=torch.float64, device="cpu")
        return stacked.to("cpu", torch.float64), sizes

    before, (values, weights) = generators(rows.device), losses(1)
    drawn, errors = generators(rows.device), torch.zeros_like(values)
    if any(not torch.equal(drawn[kind], state) for kind, state in before.items()):
        draws = torch.stack([losses(LONGER)[0] for _ in range(DRAWS)])
        values, errors = draws.mean(0), draws.std(0) * (DEVIATIONS / math.sqrt(DRAWS))
    counted = weights[1:] > 0
    if not counted.any() or not values[0].isfinite():
        return None
    parts, shares = values[1:][counted], weights[1:][counted] / weights[0]
    size, close = (shares * parts.abs()).sum(), TOLERANCE[rows.dtype]
    allowed = close * size + errors[0] + (shares * errors[1:][counted]).norm()
    gap = (values[0] - (shares * parts).sum()).abs()
    if not gap <= allowed or (shares.sum() - 1).abs() > close:
        return False
    # of parts that are alike even a root of the mean is nearly the mean of the roots
    root = (shares * parts.square()).sum().sqrt()
    return True if root - size > 2 * allowed else None
