"""The sections of an audit: reach of the gradient, cost of truncating it, gradient over time."""

import math
from collections.abc import Sequence
from itertools import pairwise

from throughtime._svg import Range, numbers
from throughtime.app.audit import AuditReport
from throughtime.app.config import Config
from throughtime.app.report.charts import Mark, Series, heat, lines
from throughtime.app.report.page import DataTable, Figure, Paragraphs, Part
from throughtime.app.trace import GradientLifetime, RunTrace
from throughtime.diagnose import Audit, Reach, SettlingTime
from throughtime.diagnose._trace_summary import EXPLODED, VANISHED
from throughtime.diagnose.audit import Truncation
from throughtime.diagnose.reach import within
from throughtime.errors import counted

_DECADES = 6  # shown below the largest norm
_BIAS_AXIS_MAX = 3.0
_MAX_LEAVES = 6  # curves beside that of the whole state
_LAG_BINS = 48  # of a row of the gradient by part
_TIME_CELLS = 200  # of a row of the gradient over time
_MOST_CUTS = 60  # closer together, the lines would hide the cells
_FEWEST_DECADES, _MOST_DECADES = 2, 6  # more shades cannot be distinguished
_LAG_LABEL = "lag: steps before the loss"


def audit_figures(
    report: AuditReport, own: Truncation | None = None, window: int | None = None
) -> list[Figure]:
    """Gradient by lag and by part of the state, bias by horizon, loss by context.

    Args:
        report: the audit.
        own: the truncation of the run, to be marked.
        window: steps that credit went back in training; default: the horizon of `own`.
    """
    window = own.horizon if window is None and own is not None else window
    figures = [gradient_by_lag(report.reach, window)]
    if len(report.reach.by_leaf) > 1:
        figures.append(gradient_by_part(report.reach, window))
    return [
        *figures,
        _bias_by_horizon(report.audit, report.tolerance, own),
        _loss_by_context(report.reach),
    ]


def gradient_by_lag(reach: Reach, window: int | None = None) -> Figure:
    """The norm of the gradient with respect to the state `lag` steps before the loss."""
    curves = {"whole state": reach.norms}
    if len(reach.by_leaf) > 1:
        curves |= dict(list(reach.by_leaf.items())[:_MAX_LEAVES])
    y_range = _upper_decades([norm for norm in reach.norms if norm > 0])
    shown = len(reach.lags)
    if y_range is not None:
        shown = max(i for i, norm in enumerate(reach.norms, 1) if norm >= y_range[0])
    within_lags = [
        (lag, f"{share:.0%} within {lag:,}") for share, lag in sorted(reach.shares.items())
    ]
    shares = ", ".join(text for _, text in within_lags)
    svg = lines(
        [Series(name, reach.lags[:shown], norms[:shown]) for name, norms in curves.items()],
        title="How far back the gradient goes",
        description=(
            f"Norm of the gradient of a loss with respect to the state 1 to"
            f" {counted(reach.lags[-1], 'step')} before it: {shares} steps."
        ),
        x_label=_LAG_LABEL,
        y_label="gradient norm",
        y_range=y_range,
        log_x=True,
        log_y=True,
        x_marks=[*(Mark(lag, text) for lag, text in within_lags), *_window_mark(window)],
    )
    return Figure(
        svg,
        "The norm of a loss's gradient with respect to the state so many steps earlier, mean of"
        f" {reach.anchors} losses. Of the sum over all {reach.lags[-1]:,} lags: {shares} steps."
        f"{_beyond_window(reach, window)}",
    )


def gradient_by_part(reach: Reach, window: int | None = None) -> Figure:
    """The gradient norm by lag, for each part of the state."""
    last = reach.lags[-1]
    edges = sorted({round(last ** (i / _LAG_BINS)) for i in range(_LAG_BINS + 1)} | {last + 1})
    rows = [
        (name, [_mean(reach.lags, norms, a, b) for a, b in pairwise(edges)])
        for name, norms in reach.by_leaf.items()
    ]
    shares = "; ".join(
        f"{name}: 90% within {within(reach.lags, norms, 0.9):,}"
        for name, norms in reach.by_leaf.items()
    )
    svg = heat(
        rows,
        edges,
        title="Gradient by part of the state",
        description=(
            "Norm of the gradient with respect to each part of the state by the number of steps"
            f" before the loss: {shares} steps."
        ),
        x_label=_LAG_LABEL,
        decades=_DECADES,
        log_x=True,
        marks=_window_mark(window),
    )
    return Figure(
        svg,
        "Each row is a part of the state. The stronger the colour, the larger the gradient at that"
        f" lag. {shares} steps.",
    )


def _mean(lags: Sequence[int], norms: Sequence[float], start: int, stop: int) -> float:
    """The mean of the finite norms at the lags from `start` to before `stop`."""
    pairs = zip(lags, norms, strict=True)
    inside = [norm for lag, norm in pairs if start <= lag < stop and math.isfinite(norm)]
    return sum(inside) / len(inside) if inside else math.nan


def _window_mark(window: int | None) -> list[Mark]:
    return [] if window is None else [Mark(window, f"window of training, {window:,}")]


def _beyond_window(reach: Reach, window: int | None) -> str:
    """A sentence on the share of the gradient that training leaves out."""
    norms = [(lag, n) for lag, n in zip(reach.lags, reach.norms, strict=True) if math.isfinite(n)]
    total = sum(norm for _, norm in norms)
    if window is None or not total:
        return ""
    beyond = sum(norm for lag, norm in norms if lag > window)
    return (
        f" Training truncated it after {counted(window, 'step')}, leaving out"
        f" {beyond / total:.1%} of the sum."
    )


def _upper_decades(norms: Sequence[float]) -> Range | None:
    """The decades below the largest norm; `None` if no norm lies further below."""
    if not norms or max(norms) / min(norms) < 10**_DECADES:
        return None
    top = 10.0 ** math.ceil(math.log10(max(norms)))
    return top / 10**_DECADES, top


def _bias_by_horizon(audit: Audit, tolerance: float, own: Truncation | None) -> Figure:
    """Bias and cosine of each horizon; the audited steps as a whole give the exact gradient."""
    horizons = [*(row.horizon for row in audit.rows), audit.steps]
    biases = [*(row.bias for row in audit.rows), 0.0]
    cosines = [*(row.cosine for row in audit.rows), 1.0]
    figures = "; ".join(
        f"horizon {row.horizon}: bias {row.bias:.3f}, cosine {row.cosine:.3f}" for row in audit.rows
    )
    svg = lines(
        [
            Series("relative bias", horizons, biases),
            Series("cosine to the exact gradient", horizons, cosines),
        ],
        title="What truncating the gradient costs",
        description=f"{figures}; exact: bias 0, cosine 1.",
        x_label="horizon (steps)",
        y_label="bias, cosine",
        y_range=(min(0.0, *cosines), _BIAS_AXIS_MAX) if max(biases) > _BIAS_AXIS_MAX else None,
        log_x=True,
        dots=True,
        x_marks=[
            Mark(audit.steps, "exact"),
            *([] if own is None else [Mark(own.horizon, "as trained")]),
        ],
        y_marks=[Mark(tolerance, f"tolerance {tolerance:g}")],
    )
    return Figure(
        svg,
        "The bias is the norm of the difference from the exact gradient, divided by the norm of"
        " that gradient. A cosine of 1 means the same direction.",
    )


def _loss_by_context(reach: Reach) -> Figure:
    """The loss from a zero state, by steps of context."""
    steps, losses = zip(*reach.contexts.items(), strict=True)
    svg = lines(
        [Series("from a zero state", steps, losses)],
        title="Loss by context length",
        description=(
            f"Loss from a zero state after {steps[0]} to {steps[-1]} steps of context:"
            f" {losses[0]:.4g} to {losses[-1]:.4g}; with the state carried from the start of the"
            f" recording: {reach.loss:.4g}."
        ),
        x_label="steps of context, from a zero state",
        y_label="loss",
        log_x=True,
        dots=True,
        y_marks=[Mark(reach.loss, "state carried from the start")],
    )
    return Figure(
        svg,
        f"The same {reach.anchors} losses, once with only the last steps as input and once with the"
        " state carried from the start of the recording.",
    )


def audit_table(audit: Audit) -> DataTable:
    """The figures of every horizon and of the exact gradient."""
    rows: list[list[str | float]] = []
    for row in audit.rows:
        worst = max(row.by_parameter, key=lambda name: row.by_parameter[name])
        counts = [f"{n:,}" for n in (row.horizon, row.stride)]
        rows.append([*counts, row.bias, row.cosine, worst, row.by_parameter[worst]])
    rows.append(["exact", f"{audit.steps:,}", 0.0, 1.0, "none", 0.0])
    return DataTable(
        ["horizon", "stride", "bias", "cosine", "worst parameter", "its bias"],
        rows,
        f"{counted(audit.steps, 'step')} of {counted(audit.lanes, 'lane')} at fixed weights."
        f" The mean loss is {audit.loss:.4g}, the norm of the exact gradient {audit.norm:.3g},"
        f" its sampling noise {audit.noise:.2g} times that.",
        numeric=(0, 1, 2, 3, 5),
    )


def settling_parts(settling: SettlingTime) -> list[Part]:
    """How long a cold start differs from the carried state: in words, and step by step."""
    ages, means = zip(*settling.remembrance.items(), strict=True)
    svg = lines(
        [Series("mean difference", [age + 1 for age in ages], means)],
        title="A cold start beside the carried state",
        description=(
            f"Mean difference of the outputs, relative to their deviation: {means[0]:.2g} at the"
            f" first step after a cold start, {means[-1]:.2g} at step {ages[-1] + 1:,}."
        ),
        x_label="steps since the cold start",
        y_label="relative difference",
        log_x=True,
        dots=True,
        y_marks=[Mark(settling.tolerance, "counts as agreement")],
    )
    open_ = (
        "Cold starts that had not settled count as not settled in every share to which they belong:"
        " no number of steps up to the compared ones is enough for them."
    )
    advice = (
        "So many steps are to be played before the outputs are used, wherever the net starts in the"
        " middle of a recording."
    )
    text = str(settling)
    return [
        Paragraphs(f"{text[0].upper()}{text[1:]}.\n\n{open_ if settling.unsettled else advice}"),
        Figure(
            svg,
            "The largest difference between the outputs after a cold start and those of the run"
            f" whose state was carried, mean of {len(settling.starts)} cold starts.",
        ),
    ]


def trace_parts(trace: RunTrace, config: Config) -> list[Part]:
    """The heat map, and a table each of the gradients and of the gates."""
    figure, explanation = gradient_over_time(trace, config), Paragraphs(_explanation(trace))
    timescales = [timescale_table(trace)] if trace.timescales else []
    return [figure, explanation, lifetime_table(trace), *timescales]


def gradient_over_time(trace: RunTrace, config: Config) -> Figure:
    """The norm of the gradient of each state and gate at every step of the excerpt."""
    stop = trace.start + trace.steps
    location = f"steps {trace.start:,} to {stop:,} of recording {trace.recording}"
    bins = _bins(trace)
    rows = [
        (name, [_largest(norms[a - trace.start : b - trace.start]) for a, b in pairwise(bins)])
        for name, norms in trace.norms.items()
    ]
    maxima = "; ".join(
        f"{x.name} at most {x.largest:.2g} at step {x.at:,}" for x in trace.lifetimes
    )
    caption = _caption(trace, config)
    svg = heat(
        rows,
        bins,
        title="Gradient over time and layer",
        description=(
            f"Norm of the gradient with respect to each state and gate at {location}: {maxima}."
            f" {caption}"
        ),
        x_label="step of the recording",
        decades=_decades([value for _, values in rows for value in values if value > 0]),
        cuts=("an update ends", trace.edges if len(trace.edges) <= _MOST_CUTS else ()),
        above=Series("signal", [step + 0.5 for step in range(trace.start, stop)], trace.signal),
    )
    return Figure(svg, f"Each row is a state or a gate, {location}. {caption}")


def _bins(trace: RunTrace) -> list[int]:
    """The edges of the cells; no cell contains the end of an update."""
    width = max(1, math.ceil(trace.steps / _TIME_CELLS))
    ends = [trace.start, *trace.edges, trace.start + trace.steps]
    return [*(step for a, b in pairwise(ends) for step in range(a, b, width)), ends[-1]]


def _decades(values: Sequence[float]) -> int:
    """The decades between the smallest and the largest value, within limits."""
    span = math.log10(max(values) / min(values)) if values else 0.0
    return min(_MOST_DECADES, max(_FEWEST_DECADES, math.ceil(span)))


def _largest(norms: Sequence[float]) -> float:
    """The largest finite norm; an infinite one has no colour."""
    return max((norm for norm in norms if math.isfinite(norm)), default=math.nan)


def _caption(trace: RunTrace, config: Config) -> str:
    """How the run truncates, and which losses the figure includes."""
    text = (
        "The stronger the colour, the larger the gradient of the training losses, added up, with"
        " respect to that step."
    )
    if config.train_on == "windows":
        return (
            f"{text} The run was trained on {config.windows_in_words()}; no credit leaves a window."
        )
    if not trace.edges:
        ahead = (
            f" Losses up to {counted(trace.ahead, 'step')} later are included."
            if trace.ahead
            else ""
        )
        return f"{text} No update of the run ends in between, so nothing is cut here.{ahead}"
    if trace.horizon == trace.stride:
        return (
            f"{text} Credit is cut at the end of each update. The last step of an update receives"
            " the gradient of its own loss alone, the first one that of all losses of the update."
        )
    text += (
        f" Credit crosses the ends of updates, through at most {counted(trace.horizon, 'step')}."
    )
    stride, horizon = config.update_steps(), config.credit_steps()
    if stride is not None and horizon is not None and trace.ahead < horizon - stride:
        limit = (
            f"up to {counted(trace.ahead, 'step')} later"
            if trace.ahead
            else "of the steps shown alone"
        )
        text += f" Losses {limit} are included."
    return text


def _explanation(trace: RunTrace) -> str:
    windows = "the excerpt" if trace.windows == 1 else f"each of {trace.windows} windows"
    return (
        f"The table follows the gradient back from the end of {windows}. It vanishes where it"
        f" stays below {VANISHED:g} of its largest norm. It explodes where it exceeds"
        f" {EXPLODED:g} times the sum of the later losses' gradients without growth.\n\nThe last"
        " number is the gradient that crosses the start of the window, relative to the largest."
        " Below 0.01 a longer horizon gains nothing. Near 1, truncation discards as much as any"
        " step receives."
    )


def lifetime_table(trace: RunTrace) -> DataTable:
    """For each state and gate, how far back its gradient goes and what crosses the edge."""
    rows = [
        [
            x.name,
            f"{x.largest:.2g}" if math.isfinite(x.largest) else "infinite",
            f"{x.at:,}",
            f"{x.lived:,.0f}",
            "" if x.edge is None else f"{x.edge:.2g}",
            _outcome(x, trace.windows),
        ]
        for x in trace.lifetimes
    ]
    source = "The excerpt is one window."
    if trace.windows > 1:
        source = f"Medians of {trace.windows} windows."
    return DataTable(
        ["gradient of", "largest", "at step", "steps back", "crosses the edge", "outcome"],
        rows,
        f"{source} Gates are not carried, so nothing of theirs crosses an edge.",
        numeric=(1, 2, 3, 4),
    )


def _outcome(lifetime: GradientLifetime, windows: int) -> str:
    """What happens to the gradient, and in how many windows."""
    if not lifetime.largest:
        return "no gradient reaches it"
    if not (lifetime.exploded or lifetime.died):
        return "reaches the first step"
    if lifetime.exploded:
        verb, steps, count = "explodes", lifetime.burst, lifetime.exploded
    else:
        verb, steps, count = "vanishes", lifetime.lived, lifetime.died
    share = "" if windows == 1 else f" in {count} of {windows}"
    return f"{verb} {steps:,.0f} steps back{share}"


def timescale_table(trace: RunTrace) -> DataTable:
    """How long the gates of each layer retain memory."""
    rows = [
        [x.name, *(_steps(n) for n in (x.short, x.median, x.long, max(x.taus)))]
        for x in trace.timescales
    ]
    return DataTable(
        ["layer", "10% of units below", "50% below", "10% above", "longest"],
        rows,
        "Time constants of the units: the steps after which 1/e of a memory is left,"
        " \u22121 / log of the mean forget gate (of z in a GRU). The few units with the longest"
        " memory carry the gradient furthest.",
        numeric=(1, 2, 3, 4),
    )


def _steps(steps: float) -> str:
    return numbers([steps], 3)[0] if math.isfinite(steps) else "unlimited"
