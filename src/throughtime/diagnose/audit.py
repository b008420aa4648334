"""The audit: the bias of each truncation, against the exact gradient at the same weights.

    bias(h)   = |g_h - g| / |g|           cosine(h) = <g_h, g> / (|g_h| |g|)

g is the exact gradient of the mean loss of a stretch, g_h the sum over the updates of a truncation
at horizon h of that stretch, each loss weighing the same in both. All come from one forward pass,
so they belong to the same random numbers: each pass back cuts the credit where the windows of its
truncation begin. The audit compares gradients at fixed weights: in training, a truncation also
makes more updates, one every stride.

Near a minimum g is small, and a relative bias says little. To know when, the losses are split into
two interleaved halves, with gradients g_a + g_b = g:

    noise = |g_a - g_b| / |g|             the standard error of g over its length, if blocks are
                                          independent


References: C. Aicher, N. Foti and E. Fox, Adaptively truncating backpropagation through time to
control gradient bias, UAI 2019, for the relative bias and what it costs: a relative bias of d takes
1 / (1 - d) times the steps.

Shapes: `B` lanes (rows of the batch).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from throughtime.carry.carried import Carried, device_of
from throughtime.diagnose._slice import CreditPass, StreamSlice
from throughtime.errors import DataError, RunError, counted
from throughtime.gradient import LossFn, Objective
from throughtime.gradient.objective import require_gradient, trainable_weights
from throughtime.gradient.segment import preserve_rng_and_buffers
from throughtime.gradient.truncated import norm
from throughtime.gradient.window import check_horizon
from throughtime.stream import Stream

BLOCKS = 16  # of steps; every other one is in the same half
HORIZONS = (50, 200, 800, 3200)  # the default, those shorter than the slice


class WindowGroup(NamedTuple):
    """Windows that do not overlap: the spans whose losses count, and where credit is cut."""

    spans: list[tuple[int, int]]
    cuts: set[int]


@dataclass(frozen=True)
class Truncation:
    """One row of an audit.

    Attributes:
        horizon: steps that credit may flow back.
        stride: steps between two updates.
        bias: `|g_h - g| / |g|`, over all parameters.
        cosine: of the angle between g_h and g.
        norm: `|g_h| / |g|`.
        by_parameter: the bias of each parameter by itself, by its name.
    """

    horizon: int
    stride: int
    bias: float
    cosine: float
    norm: float
    by_parameter: dict[str, float]


@dataclass(frozen=True)
class Audit:
    """The result of `tt.audit`.

    Attributes:
        steps: audited steps of every lane.
        lanes: B.
        loss: mean loss of the stretch.
        norm: `|g|`, the norm of the exact gradient.
        rows: one for each horizon, the shortest first.
        noise: sampling noise of g relative to `|g|`; from 0.7 on, half of `|g|^2` or more is noise,
            and relative biases say little.
    """

    steps: int
    lanes: int
    loss: float
    norm: float
    rows: tuple[Truncation, ...]
    noise: float = 0.0

    def suggest(self, tolerance: float = 0.1) -> int | None:
        """The shortest horizon from which on no audited one has a bias above `tolerance`.

        It is a horizon at the stride of its row, by default `tt.Truncated(horizon)`. With a
        shorter stride, credit of every loss flows back at least horizon - stride steps: the bias is
        usually smaller, updates are more, and an update costs horizon / stride times the passes.

        `None` if even the longest audited horizon has a bias above `tolerance`: audit longer ones,
        or train with `tt.Exact()`. One as long as the stretch cuts nothing there, and shows nothing
        of longer recordings.
        """
        near = takewhile(lambda row: row.bias <= tolerance, reversed(self.rows))
        return min((row.horizon for row in near if row.horizon < self.steps), default=None)

    def __str__(self) -> str:
        """A line for each horizon; `worst parameter` is the one whose gradient is most wrong."""
        head = (
            f"{'horizon':>9} {'stride':>8} {'bias':>8} {'cosine':>8} {'norm':>7}  worst parameter"
        )
        foot = (
            f"over {counted(self.steps, 'step')} of {counted(self.lanes, 'lane')}, at fixed"
            f" weights; loss {self.loss:.4g}, |g| {self.norm:.3g}, its noise {self.noise:.2g}"
            " times that"
        )
        return "\n".join([head, *map(_line, self.rows), foot])


def audit(
    net: Carried,
    stream: Stream,
    loss_fn: LossFn,
    horizons: Sequence[int] | None = None,
    *,
    stride: int | None = None,
    steps: int | None = None,
    chunk: int | None = None,
) -> Audit:
    """Measure the bias of truncations: the distance of each horizon's gradient from the exact one.

    Use it before you choose a horizon, and again later in training: it measures the gradient at the
    present weights. In a net that has not learned to remember, little gradient flows far back, and
    every horizon has a small bias; see `tt.reach`.

    Args:
        net: made by `tt.carry`; neither its weights, `.grad`, buffers nor its mode are changed.
        stream: a `tt.Stream`; it is read, not moved.
        loss_fn: as for `tt.updates`; a `tt.SequenceLoss` that is not additive needs a `stride`: it
            is called for the steps of each.
        horizons: steps, in any order; default: those of 50, 200, 800, 3200 that are shorter than
            the slice.
        stride: steps between two updates, for all horizons; those below it are refused. Default:
            each horizon is its own stride, as in `tt.Truncated(horizon)`. A short stride costs
            about horizon / stride backward passes.
        steps: the number of steps of every lane, from the start of an epoch; default: all.
        chunk: steps per segment, see `tt.Exact`.

    Returns:
        An `Audit`: a row for each horizon; `print(audit)` for a table, `suggest(tolerance)` for the
        shortest horizon within a bias.

    Raises:
        ConfigError: a horizon below 1 or below the stride, a `chunk` below 1, or a loss of whole
            strides without a stride.
        DataError: no step to measure.
        RunError: a gradient is not finite.

    Cost: an exact gradient, and a pass back for the sampling noise and for each horizon; horizon /
    stride passes for one with a short stride. A pass back runs forward again, where the graph of
    the slice would take more than 512 MB.

    Example:
        >>> import torch, throughtime as tt
        >>> data = {"inputs": torch.randn(500, 3), "targets": torch.randn(500)}
        >>> stream = tt.Stream(data, lanes=1, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> result = tt.audit(net, stream, torch.nn.MSELoss(), horizons=(2, 50))
        >>> result.rows[1].bias < result.rows[0].bias
        True

    References: Aicher, Foti & Fox, UAI 2019.
    """
    objective, weights = Objective(loss_fn, split=True), trainable_weights(net, loss_fn)
    objective.set_stride(stride, "tt.audit")
    with torch.enable_grad(), preserve_rng_and_buffers(net, device_of(net)):
        section = StreamSlice(net, stream, steps, objective)
        each, steps = objective.stride or 1, section.steps
        steps = steps // each * each or steps  # a loss of strides is told of whole ones
        selected = _horizons(horizons, stride, steps)
        plans = [window_groups(steps, stride or horizon, horizon) for horizon in selected]
        blocks = range(0, steps, max(each, steps // BLOCKS // each * each))
        groups = [group for plan in plans for group in plan]
        cuts = set().union(*(group.cuts for group in groups))
        begins = {*blocks}.union(*(span for group in groups for span in group.spans))
        run = CreditPass(
            net,
            objective,
            section.read,
            steps,
            section.state,
            weights.values(),
            cuts,
            begins,
            chunk,
            each,
        )
        total = sum(run.counts.values())
        if not total:
            raise DataError(
                f"none of the {counted(steps, 'step')} has a target that counts: there is no loss"
            )

        def gradient(spans: Iterable[tuple[int, int]], cut: set[int]) -> list[Tensor]:
            """The gradient of the losses of some spans, without the credit that crosses a cut."""
            chosen = torch.zeros_like(run.losses)
            for start, stop in spans:
                chosen[run.span(start, stop)] = 1 / total
            run.gate = lambda step, credit: [None] * len(credit) if step and step in cut else credit
            grads = run.gradients((run.losses * chosen).sum())
            require_gradient(any(grad is not None for grad in grads))
            pairs = zip(grads, weights.values(), strict=True)
            return [torch.zeros_like(w) if grad is None else grad for grad, w in pairs]

        exact = gradient([(0, steps)], set())
        size = norm(exact)
        if not math.isfinite(size):
            raise RunError(
                "the exact gradient is not finite (NaN or infinite): nothing can be compared with"
                " it. tt.updates with tt.Exact() names the chunk and the parameter"
            )
        half = gradient(((start, start + blocks.step) for start in blocks[::2]), set())
        rows: list[Truncation] = []
        for horizon, plan in zip(selected, plans, strict=True):
            parts = [gradient(*group) for group in plan]
            truncated: Any = [sum(grads) for grads in zip(*parts, strict=True)]
            rows.append(_row((horizon, stride or horizon), [*weights], truncated, exact))
    noise = norm([2 * part - whole for part, whole in zip(half, exact, strict=True)])
    loss = run.losses.sum().item() / total
    vars(run).clear()  # or its graph, which refers to it, would wait for the garbage collector
    return Audit(steps, stream.lanes, loss, size, tuple(rows), _ratio(noise, size))


def window_groups(steps: int, stride: int, horizon: int) -> list[WindowGroup]:
    """The windows of `tt.Truncated(stride, horizon)`, in as few groups as do not overlap."""
    groups: list[WindowGroup] = []
    for begin in range(0, steps, stride):
        stop = min(begin + stride, steps)
        start = begin if horizon == stride else max(0, stop - horizon)
        group = next((group for group in groups if group.spans[-1][1] <= start), None)
        if group is None:
            groups.append(group := WindowGroup([], set()))
        group.spans.append((begin, stop))
        group.cuts.add(start)
    return groups


def _row(
    setting: tuple[int, int],
    names: Sequence[str],
    gradient: Sequence[Tensor],
    exact: Sequence[Tensor],
) -> Truncation:
    pairs = list(zip(gradient, exact, strict=True))
    differences, sizes = [g - e for g, e in pairs], (norm(gradient), norm(exact))
    inner = sum((g.conj() * e).real.sum(dtype=torch.float64).item() for g, e in pairs)
    biases = [_ratio(norm([d]), norm([e])) for d, e in zip(differences, exact, strict=True)]
    return Truncation(
        *setting,
        _ratio(norm(differences), sizes[1]),
        _ratio(inner, sizes[0] * sizes[1]),
        _ratio(*sizes),
        dict(zip(names, biases, strict=True)),
    )


def _ratio(part: float, whole: float) -> float:
    """The quotient; zero of zero is zero, for a parameter without gradient."""
    if whole:
        return part / whole
    return math.inf if part else 0.0


def _line(row: Truncation) -> str:
    worst = max(row.by_parameter, key=row.by_parameter.__getitem__)
    return (
        f"{row.horizon:>9} {row.stride:>8} {row.bias:>8.3f} {row.cosine:>8.3f}"
        f" {row.norm:>7.2f}  {worst} {row.by_parameter[worst]:.3f}"
    )


def _horizons(requested: Sequence[int] | None, stride: int | None, steps: int) -> list[int]:
    least = stride or 1
    fitting = [h for h in HORIZONS if least <= h < steps] or [max(least, steps // 2)]
    horizons = sorted(set(requested or fitting))
    for horizon in horizons:
        check_horizon(horizon if stride is None else stride, horizon)
    return horizons
