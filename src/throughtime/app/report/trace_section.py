"""The section of a run's trace: the gradient over time and layer, and how far back it goes."""

import math
from collections.abc import Sequence
from itertools import pairwise

from throughtime._svg import numbers
from throughtime.app.config import Config
from throughtime.app.report.charts import Series, heat
from throughtime.app.report.page import DataTable, Figure, Paragraphs, Part
from throughtime.app.trace import (
    EXPLODED,
    VANISHED,
    GradientLifetime,
    RunTrace,
)

_CELLS = 200  # of a row
_MOST_CUTS = 60  # closer together, the lines would hide the cells
_FEWEST_DECADES, _MOST_DECADES = 2, 6  # more shades cannot be distinguished


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
    width = max(1, math.ceil(trace.steps / _CELLS))
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
            f"{text} Each window of {trace.stride:,} steps starts from a zero state, and no credit"
            " leaves it."
        )
    if not trace.edges:
        ahead = f" Losses up to {trace.ahead:,} steps later are included." if trace.ahead else ""
        return f"{text} No update of the run ends in between, so nothing is cut here.{ahead}"
    if trace.horizon == trace.stride:
        return (
            f"{text} Credit is cut at the end of each update. The last step of an update receives"
            " the gradient of its own loss alone, the first one that of all losses of the update."
        )
    text += f" Credit crosses the ends of updates, through at most {trace.horizon:,} steps."
    stride, horizon = config.update_steps(), config.credit_steps()
    if stride is not None and horizon is not None and trace.ahead < horizon - stride:
        limit = f"up to {trace.ahead:,} steps later" if trace.ahead else "of the steps shown alone"
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
        [x.name, *(_steps(n) for n in (x.short, x.median, x.long, x.longest))]
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
