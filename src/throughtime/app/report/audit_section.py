"""The audit as pictures: how far back the gradient goes, what each horizon costs, what the past is worth."""

import math
from collections.abc import Sequence
from itertools import pairwise

from throughtime._svg import Range
from throughtime.app.audit_report import AuditReport
from throughtime.app.report.charts import Mark, Series, heat, lines
from throughtime.app.report.page import Figure, Table
from throughtime.diagnose import Audit, Reach
from throughtime.diagnose.audit import Truncation
from throughtime.diagnose.reach import within

_DECADES = 6  # below the largest norm, less is nothing
_MOST_BIAS = 3.0
_LEAVES = 6
_CELLS = 48  # of the heat map


def pictures(
    found: AuditReport, own: Truncation | None = None, window: int | None = None
) -> list[Figure]:
    """Norm by lag, as curves and over the parts of the state, bias by horizon, loss by context.

    Args:
        found: what was measured.
        own: the run's own truncation, to be marked.
        window: how many steps back credit went in training; default: the horizon of `own`.
    """
    window = own.horizon if window is None and own is not None else window
    parts = [by_part(found.reach, window)] if len(found.reach.by_leaf) > 1 else []
    return [
        by_lag(found.reach, window),
        *parts,
        by_horizon(found.audit, found.tolerance, own),
        by_context(found.reach),
    ]


def by_lag(reach: Reach, window: int | None = None) -> Figure:
    """How strongly a loss blames the state so many steps before it, and where the window of training ends."""
    leaves = list(reach.by_leaf.items())[:_LEAVES] if len(reach.by_leaf) > 1 else []
    y_range = _decades([norm for norm in reach.norms if norm > 0])
    shown = (
        len(reach.lags)
        if y_range is None
        else max(i for i, norm in enumerate(reach.norms, 1) if norm >= y_range[0])
    )
    lags = [float(lag) for lag in reach.lags[:shown]]
    shares = ", ".join(f"{share:.0%} within {lag:,}" for share, lag in sorted(reach.shares.items()))
    svg = lines(
        [
            Series(name, lags, norms[:shown])
            for name, norms in (("whole state", reach.norms), *leaves)
        ],
        title="How far back the gradient goes",
        description=(
            f"Norm of the gradient of a loss with respect to the state 1 to {reach.lags[-1]} steps"
            f" before it: {shares} steps."
        ),
        x_label="lag: steps before the loss",
        y_label="gradient norm",
        y_range=y_range,
        log_x=True,
        log_y=True,
        marks=[
            *(
                Mark(float(lag), f"{share:.0%} within {lag:,}", "x")
                for share, lag in sorted(reach.shares.items())
            ),
            *_window(window),
        ],
    )
    blamed = (
        "How much the loss of a step would change with the state so many steps before it, mean of"
        f" {reach.anchors} losses."
    )
    return Figure(
        svg,
        f"{blamed} Of the sum over all {reach.lags[-1]:,} lags, {shares}"
        f" steps.{_beyond(reach, window)}",
    )


def by_part(reach: Reach, window: int | None = None) -> Figure:
    """The same for each part of the state, the largest first as the net names them: which memory is long."""
    edges = sorted(
        {round(reach.lags[-1] ** (i / _CELLS)) for i in range(_CELLS + 1)} | {reach.lags[-1] + 1}
    )
    rows = [
        (name, [_mean(reach.lags, norms, a, b) for a, b in pairwise(edges)])
        for name, norms in reach.by_leaf.items()
    ]
    longest = {name: within(reach.lags, norms, 0.9) for name, norms in reach.by_leaf.items()}
    said = "; ".join(f"{name}: 90% within {lag:,}" for name, lag in longest.items())
    svg = heat(
        rows,
        [float(edge) for edge in edges],
        title="Gradient by part of the state",
        description=(
            "Norm of the gradient with respect to each part of the state by the number of steps"
            f" before the loss: {said} steps."
        ),
        x_label="lag: steps before the loss",
        decades=_DECADES,
        log_x=True,
        marks=_window(window),
    )
    return Figure(
        svg,
        "Each row is a part of the state; the fuller the colour, the more a loss blames it at that"
        f" lag. {said} steps.",
    )


def _mean(lags: Sequence[int], norms: Sequence[float], start: int, stop: int) -> float:
    inside = [
        norm
        for lag, norm in zip(lags, norms, strict=True)
        if start <= lag < stop and math.isfinite(norm)
    ]
    return sum(inside) / len(inside) if inside else math.nan


def _window(window: int | None) -> list[Mark]:
    return [] if window is None else [Mark(float(window), f"window of training, {window:,}", "x")]


def _beyond(reach: Reach, window: int | None) -> str:
    """How much of the credit the window of training left out."""
    whole = sum(norm for norm in reach.norms if math.isfinite(norm))
    if window is None or not whole:
        return ""
    out = sum(
        norm
        for lag, norm in zip(reach.lags, reach.norms, strict=True)
        if lag > window and math.isfinite(norm)
    )
    return (
        f" Training cut it {window:,} steps back: {out / whole:.1%} of the sum lies further back."
    )


def _decades(norms: Sequence[float]) -> Range | None:
    """The largest norm and what lies a few decades below it.

    `None` if nothing lies further below.
    """
    if not norms or max(norms) / min(norms) < 10**_DECADES:
        return None
    top = 10.0 ** math.ceil(math.log10(max(norms)))
    return top / 10**_DECADES, top


def by_horizon(audit: Audit, tolerance: float, own: Truncation | None) -> Figure:
    """How wrong the gradient of each horizon is; that of the whole stretch is the exact one."""
    x = [*(float(row.horizon) for row in audit.rows), float(audit.steps)]
    biases, cosines = (
        [*(row.bias for row in audit.rows), 0.0],
        [*(row.cosine for row in audit.rows), 1.0],
    )
    said = "; ".join(
        f"horizon {row.horizon}: bias {row.bias:.3f}, cosine {row.cosine:.3f}" for row in audit.rows
    )
    svg = lines(
        [Series("relative bias", x, biases), Series("cosine to the exact gradient", x, cosines)],
        title="What cutting the gradient costs",
        description=f"{said}; exact: bias 0, cosine 1.",
        x_label="horizon (steps)",
        y_label="bias, cosine",
        y_range=(min(0.0, *cosines), _MOST_BIAS) if max(biases) > _MOST_BIAS else None,
        log_x=True,
        dots=True,
        marks=[
            Mark(tolerance, f"tolerance {tolerance:g}"),
            Mark(float(audit.steps), "exact", "x"),
            *([] if own is None else [Mark(float(own.horizon), "as trained", "x")]),
        ],
    )
    return Figure(
        svg,
        "Bias is the difference to the exact gradient, in lengths of that gradient; a cosine of 1"
        " is the same direction.",
    )


def by_context(reach: Reach) -> Figure:
    """What a past of so many steps is worth."""
    steps, losses = zip(*reach.contexts.items(), strict=True)
    svg = lines(
        [Series("from a zero state", [float(n) for n in steps], losses)],
        title="What the past is worth",
        description=(
            f"Loss from a zero state after {steps[0]} to {steps[-1]} steps of context:"
            f" {losses[0]:.4g} to {losses[-1]:.4g}; with the state carried from the start of the"
            f" recording: {reach.loss:.4g}."
        ),
        x_label="steps of context, from a zero state",
        y_label="loss",
        log_x=True,
        dots=True,
        marks=[Mark(reach.loss, "with the whole past, state carried")],
    )
    return Figure(
        svg,
        f"The same {reach.anchors} losses when the net has seen only the last so many steps, and"
        " when it has seen all.",
    )


def table(audit: Audit) -> Table:
    """The figures of every horizon, and of the exact gradient."""
    rows = [
        [_whole(r.horizon), _whole(r.stride), _whole(r.updates), r.bias, r.cosine, *_worst(r)]
        for r in audit.rows
    ]
    exact = ["exact", _whole(audit.steps), "1", 0.0, 1.0, "none", 0.0]
    return Table(
        ["horizon", "stride", "updates", "bias", "cosine", "worst parameter", "its bias"],
        [*rows, exact],
        f"{audit.steps:,} steps of {audit.lanes} lanes at fixed weights: mean loss"
        f" {audit.loss:.4g}, norm of the exact gradient {audit.norm:.3g}.",
        numeric=(0, 1, 2, 3, 4, 6),
    )


def _whole(number: int) -> str:
    return f"{number:,}"


def _worst(row: Truncation) -> tuple[str, float]:
    name = max(row.by_parameter, key=lambda name: row.by_parameter[name])
    return name, row.by_parameter[name]
