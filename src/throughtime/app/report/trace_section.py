"""The trace of a run as a picture: gradient over time and layer, where chunks end, and what becomes of it."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from throughtime._svg import numbers
from throughtime.app.config import Config
from throughtime.app.report.charts import Series, heat
from throughtime.app.report.page import Figure, Part, Table, Text
from throughtime.app.trace import EXPLODED, VANISHED, GradientLifetime, Memory, RunTrace

_CELLS = 200  # of a row
_MOST_CUTS = 60  # closer together they would hide the cells
_DECADES = 2, 6


def parts(seen: RunTrace, config: Config) -> list[Part]:
    """The heat map and the figures of each state, gate and layer."""
    return [
        over_time(seen, config),
        Text(_meaning(seen)),
        lives(seen),
        *([memories(seen)] if seen.memories else []),
    ]


def over_time(seen: RunTrace, config: Config) -> Figure:
    """The norm of the gradient of each state and gate at every step of a stretch."""
    bins = _bins(seen)
    stop = seen.start + seen.steps
    where = f"steps {seen.start:,} to {stop:,} of recording {seen.recording}"
    rows = [
        (name, [_largest(norms[a - seen.start : b - seen.start]) for a, b in pairwise(bins)])
        for name, norms in seen.norms.items()
    ]
    svg = heat(
        rows,
        [float(edge) for edge in bins],
        title="Gradient over time and layer",
        description=(
            f"Norm of the gradient with respect to each state and gate at {where},"
            f" {_cut_in_words(seen)}: "
            f"{'; '.join(f'{life.name} at most {life.largest:.2g} at step {life.at:,}' for life in seen.lives)}."
        ),
        x_label="step of the recording",
        decades=_decades([value for _, values in rows for value in values if value > 0]),
        cuts=(
            "an update ends",
            [float(e) for e in seen.edges] if len(seen.edges) <= _MOST_CUTS else [],
        ),
        above=Series("signal", [step + 0.5 for step in range(seen.start, stop)], seen.signal),
    )
    return Figure(svg, f"Each row is a state or a gate, {where}. {_caption(seen, config)}")


def _bins(seen: RunTrace) -> list[int]:
    """Where the cells begin; none crosses an edge."""
    wide = max(1, math.ceil(seen.steps / _CELLS))
    ends = [seen.start, *seen.edges, seen.start + seen.steps]
    return [*(at for a, b in pairwise(ends) for at in range(a, b, wide)), ends[-1]]


def _decades(values: Sequence[float]) -> int:
    """As many as there are between the largest and the smallest, within bounds: colours tell few shades apart."""
    span = math.log10(max(values) / min(values)) if values else 0.0
    return min(_DECADES[1], max(_DECADES[0], math.ceil(span)))


def _largest(norms: Sequence[float]) -> float:
    """An infinite one has no colour, so the others are to be seen."""
    return max((norm for norm in norms if math.isfinite(norm)), default=math.nan)


def _cut_in_words(seen: RunTrace) -> str:
    if not seen.edges:
        return "no edge of an update among them"
    edges = f"an update every {seen.stride:,} steps"
    return edges + (
        f", credit back through at most {seen.horizon:,}"
        if seen.horizon > seen.stride
        else ", where credit is cut"
    )


def _caption(seen: RunTrace, config: Config) -> str:
    """How the run cuts, and what is seen of it."""
    said = (
        "The fuller the colour, the more the losses that train the net blame it at that step, all"
        " of them added up."
    )
    if config.train_on == "windows":
        return (
            f"{said} Each window of {seen.stride:,} steps starts from zero, and no credit"
            " leaves it."
        )
    if not seen.edges:
        rest = f" Losses up to {seen.ahead:,} steps further on were counted." if seen.ahead else ""
        return f"{said} No update of the run ends in between, so nothing is cut here.{rest}"
    if seen.horizon == seen.stride:
        return (
            f"{said} Where an update ends credit is cut: the last step is blamed by its own loss"
            " alone, the next by all of an update."
        )
    further = f"up to {seen.ahead:,} steps further on" if seen.ahead else "of the steps shown alone"
    short = "" if seen.ahead >= _ahead(config) else f" Losses {further} were counted."
    return (
        f"{said} Credit crosses the ends of updates, through at most {seen.horizon:,} steps.{short}"
    )


def _ahead(config: Config) -> int:
    """How many steps after a step the run's own losses may lie, beyond the update that counts it."""
    return max(0, (config.horizon or config.stride) - config.stride)


def _meaning(seen: RunTrace) -> str:
    what = "the stretch" if seen.windows == 1 else f"each of {seen.windows} windows"
    return (
        f"What becomes of the gradient in {what}, counted back from the end: it lives as long as it"
        f" is above {VANISHED:g} of its largest norm; it blows up where it is over {EXPLODED:g}"
        " times what the losses after it could add up to without growth. What crosses the edge is"
        " what would flow on into the steps before, relative to the largest: below 0.01 a longer"
        " horizon buys nothing, near 1 as much is thrown away as any step was given."
    )


def lives(seen: RunTrace) -> Table:
    """Where it dies or blows up, and what crosses the edge, for each state and gate."""
    rows = [
        [
            life.name,
            _small(life.largest),
            f"{life.at:,}",
            f"{life.lived:,.0f}",
            _share(life.edge),
            _fate(life, seen.windows),
        ]
        for life in seen.lives
    ]
    of = (
        "the stretch"
        if seen.windows == 1
        else f"{seen.windows} windows; steps and shares are the median of them"
    )
    return Table(
        [
            "gradient of",
            "largest",
            "at step",
            "lives, steps back",
            "crosses the edge",
            "what becomes of it",
        ],
        rows,
        f"Of {of}. Gates have no edge: no gate is carried on.",
        numeric=(1, 2, 3, 4),
    )


def _small(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "infinite"


def _share(edge: float | None) -> str:
    return "" if edge is None else f"{edge:.2g}"


def _fate(life: GradientLifetime, windows: int) -> str:
    """What becomes of it, and how often."""
    every = "" if windows == 1 else f" in {{}} of {windows}"
    if not life.largest:
        return "no gradient reaches it"
    if life.exploded:
        return f"blows up {life.burst:,.0f} steps back" + every.format(life.exploded)
    if life.died:
        return f"dies {life.lived:,.0f} steps back" + every.format(life.died)
    return "lives to the first step"


def memories(seen: RunTrace) -> Table:
    """How long the gates of each layer remember."""
    return Table(
        [
            "layer",
            "a tenth of the units, under",
            "half of them, under",
            "a tenth, over",
            "the longest",
        ],
        [[memory.name, *_steps(memory)] for memory in seen.memories],
        "Time constants: so many steps its gates keep 1/e of what a unit holds, \u22121 / log of"
        " the mean forget gate (of z in a GRU). The few units that remember longest carry the"
        " gradient furthest.",
        numeric=(1, 2, 3, 4),
    )


def _steps(memory: Memory) -> Iterable[str]:
    return (
        numbers([steps], 3)[0] if math.isfinite(steps) else "without end"
        for steps in (memory.short, memory.median, memory.long, memory.longest)
    )
