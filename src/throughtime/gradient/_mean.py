"""The law of the mean: the loss of all rows is the weighted mean of the losses of their parts.

Chunks, ranks and accumulated updates split a loss, which changes nothing if it obeys the law. So
the first calls try it, on a copy of the loss and eight rows of the data. A part is one row, twice,
with its outputs scaled, so that the parts are unlike. Plain halves would not do: of 100,000 rows,
two halves have nearly the same root mean square. Labels of classes go round. It is computed in
float64 if the loss can, so that rounding hides nothing.

A `SequenceLoss` that is additive has a law of its own: its sum over all steps is that over two
halves.

Shapes: `N` rows, one for each valid step, `C` outputs.
"""

import math
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from throughtime._device import fork_rng, generators, real_type
from throughtime.chunk import Chunk

if TYPE_CHECKING:
    from throughtime.gradient.objective import SequenceLoss

SCALES = (0.25, 1.0, 0.06, 0.5, 0.9, 0.12, 0.7, 0.35)
TRIALS, TWICE = 6, 2
# a loss that draws random numbers is judged by the mean of so many draws, of longer parts
DRAWS, LONGER = 16, 64
DEVIATIONS = 6
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 6e-3}

Loss = Callable[..., Any]
Weigh = Callable[[Tensor], float]


def is_mean(loss_fn: Loss, outputs: Tensor, targets: Tensor, weigh: Weigh) -> bool | None:
    """Whether the loss of all rows is the weighted mean of the losses of their parts.

    The loss, its buffers and the random state stay as they are.

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
                verdicts = {_judge(call, *rows, weigh) for rows in trials}
        except Exception:  # noqa: BLE001, S112 (of any kind: the loss is the user's)
            continue
        return False if False in verdicts else True if True in verdicts else None
    return None


def pairs_rows(loss_fn: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether the loss is the mean over all pairs of an output and a target of any row.

    So it is where `(N,)` meets `(N, 1)` by accident, which broadcasts to `(N, N)`.
    """
    rows, labels = _pick(outputs, targets, outputs.dtype, 0)
    try:
        call = _apart(loss_fn, None)
        with _unnoticed(outputs.device):
            one = [slice(k, k + 1) for k in range(len(rows))]
            pairs = _values(call, [(rows[i], labels[j]) for i in one for j in one])
            whole = _values(call, [(rows, labels)])
    except Exception:  # noqa: BLE001 (of any kind: the loss is the user's)
        return False
    return bool((whole - pairs.mean()).abs() <= TOLERANCE[rows.dtype] * pairs.abs().mean())


def _apart(loss_fn: Loss, dtype: torch.dtype | None) -> Loss:
    """A copy of the loss, in evaluation mode if it is a module, and of a type."""
    scripted = isinstance(loss_fn, torch.jit.ScriptFunction)  # which has nothing to be copied
    copy = loss_fn if scripted else deepcopy(loss_fn)
    if isinstance(copy, nn.Module):
        copy.eval()
        copy.to(dtype)
    return copy


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
    count, device, classes = len(SCALES), outputs.device, outputs.shape[-1]
    at = torch.linspace(0, len(outputs) - 1, count, device=device).round().long()
    rows, labels = outputs.detach()[at].to(dtype), targets[at]
    scales = torch.tensor(SCALES, dtype=dtype, device=device).roll(3 * trial)
    rows = rows * scales.view(-1, *[1] * (rows.dim() - 1))
    if labels.is_floating_point():
        return rows, labels.to(dtype)
    if labels.dim() == 1 and rows.dim() > 1 and classes > 1 and int(targets.max()) < classes:
        labels = (torch.arange(count, device=device) + trial).remainder(classes).to(labels.dtype)
    return rows, labels


def _judge(call: Loss, rows: Tensor, labels: Tensor, weigh: Weigh) -> bool | None:
    """Compare the loss of all rows with the mean of those of the parts."""

    def losses(longer: int) -> Tensor:
        step = TWICE * longer
        x, y = (v.repeat_interleave(step, 0) for v in (rows, labels))
        x = x.requires_grad_()  # for a penalty of the gradient
        spans = [slice(None), *(slice(a, a + step) for a in range(0, len(x), step))]
        return _values(call, [(x[span], y[span]) for span in spans])

    values, spread = _sample(losses, rows.device)
    weights = torch.tensor([weigh(label) for label in labels.split(1)], dtype=values.dtype)
    counted = weights > 0
    if not counted.any() or not values[0].isfinite():
        return None
    parts, shares = values[1:][counted], weights[counted] / weights.sum()
    if not parts.isfinite().all():
        return False
    size = (shares * parts.abs()).sum()
    allowed = TOLERANCE[rows.dtype] * size + spread[0] + (shares * spread[1:][counted]).norm()
    if (values[0] - (shares * parts).sum()).abs() > allowed:
        return False
    # of parts that are alike even a root of the mean is nearly the mean of the roots
    root = (shares * parts.square()).sum().sqrt()
    return True if root - size > 2 * allowed else None


def is_additive(loss_fn: "SequenceLoss", outputs: Tensor, chunk: Chunk) -> bool:
    """Whether sum and weight of a loss over steps are those of the two halves of the steps.

    The outputs of the first half are scaled, so that the halves differ.
    """
    half, call = chunk.steps // 2, _apart(loss_fn, None)
    y = torch.cat([outputs[:half].detach() * SCALES[0], outputs[half:].detach()])
    pieces = [(y, chunk), (y[:half], chunk[:half]), (y[half:], chunk[half:])]

    def sums(_: int) -> Tensor:
        means, weights = zip(*(call(*piece) for piece in pieces), strict=True)
        sizes = torch.tensor(weights, dtype=torch.float64)
        values = torch.stack([mean.detach() for mean in means]).to("cpu", torch.float64)
        return torch.stack([values * sizes, sizes], 1)

    with _unnoticed(y.device):
        values, spread = _sample(sums, y.device)
    gap = (values[0] - values[1] - values[2]).abs()
    return bool((gap <= TOLERANCE[y.dtype] * values.abs().sum(0) + spread.sum(0)).all())


def _sample(losses: Callable[[int], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Losses, and their error, which is 0 unless they are drawn at random; then a mean of draws.

    Args:
        losses: of parts that are so many times as long.
        device: whose random numbers they may draw.
    """
    before, values = generators(device), losses(1)
    drawn = generators(device)
    if all(torch.equal(drawn[kind], state) for kind, state in before.items()):
        return values, torch.zeros_like(values)
    draws = torch.stack([losses(LONGER) for _ in range(DRAWS)])
    return draws.mean(0), draws.std(0) * (DEVIATIONS / math.sqrt(DRAWS))


def _values(call: Loss, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The losses of pairs of outputs and targets, on the host: one wait for a device."""
    losses = [call(rows, labels).detach().reshape(()) for rows, labels in pairs]
    return torch.stack(losses).to("cpu", torch.float64)
