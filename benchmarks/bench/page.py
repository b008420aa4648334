"""Results as tables in Markdown, put between two marks of a page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.cases import CASES
from benchmarks.bench.implementations import RECOMPUTED, STRIDE_GRAPHS, TORCH_WITH_RESETS

from throughtime.errors import ConfigError

BEGIN, END = "<!-- figures: python -m benchmarks.bench -->", "<!-- end of figures -->"
WIDE = "v4"
Row = Mapping[str, Any]


def tables(facts: Mapping[str, Any]) -> str:
    """All that there is, as Markdown.

    Args:
        facts: what a file of results holds.
    """
    parts = [_measured_on(facts)]
    for title, kinds, columns, wanted in _PARTS:
        rows = [row for row in _ordered(facts["rows"]) if row["kind"] in kinds and wanted(row)]
        if rows:
            parts.append(f"## {title}\n\n" + _table(rows, columns))
    return "\n\n".join(parts) + "\n"


def parts_of(page: Path) -> tuple[str, str]:
    """What a page says before its tables, and after them.

    Raises:
        ConfigError: it has no place for them.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(
            f"{page}: expected a line {BEGIN!r} and one {END!r} after it, between which the tables"
            " are put"
        )
    return before, after


def write_tables(page: Path, text: str) -> None:
    """Writes between the marks of the page.

    Raises:
        ConfigError: they are not there.
    """
    before, after = parts_of(page)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def _measured_on(facts: Mapping[str, Any]) -> str:
    summary, rows = facts["machine"], facts["rows"]
    loads = [load for row in rows for load in row["load"]]
    rounds = sorted(
        {f"{row['settings']['rounds']} turns of {row['settings']['turn']:g} s" for row in rows}
    )
    header = (
        f"Processor: {summary['processor']}, {summary['cores']} cores, {summary['torch_level']};"
        f" {summary['system']}; torch {summary['torch']}, Python {summary['python']}. Each side:"
        f" {', '.join(rounds)}. Load average while measuring: {min(loads):.1f} to {max(loads):.1f}"
        " (of a process that is alone: its number of threads).\n\n| GFLOP/s of large matrix"
        " products | threads | float32, torch | float32, kernels | float64, torch | float64,"
        " kernels |"
    )
    lines = [header, "|---|---|---|---|---|---|"]
    for level, counts in facts["peaks"].items():
        for threads, types in counts.items():
            cells = [
                f"{types[kind][by]:.0f}"
                for kind in ("float32", "float64")
                for by in ("torch.mm", "kernels")
            ]
            lines.append(f"| {level} | {threads} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ordered(rows: Sequence[Row]) -> list[Row]:
    order = {name: at for at, name in enumerate(CASES)}
    return sorted(
        (row for row in rows if row["case"] in order),
        key=lambda row: (row["threads"], order[row["case"]]),
    )


def _table(rows: Sequence[Row], columns: Mapping[str, "Cell"]) -> str:
    used = {name: cell for name, cell in columns.items() if any(cell(row) != "-" for row in rows)}
    lines = ["| " + " | ".join(used) + " |", "|" + "---|" * len(used)]
    return "\n".join(
        [*lines, *("| " + " | ".join(cell(row) for cell in used.values()) + " |" for row in rows)]
    )


Cell = Callable[[Row], str]


def _sides(row: Row) -> list[Mapping[str, Any]]:
    return list(row["implementations"].values())


def _ratio(row: Row) -> str:
    low, middle, high = _sides(row)[1]["ratio"]
    return f"**{middle:.2f}** ({low:.2f} to {high:.2f})"


def _goal(row: Row) -> str:
    case = CASES[row["case"]]
    goal = case.goal_at(row["threads"], row["level"] != WIDE)
    if goal is None:
        return ""
    beyond = case.stretch if case.stretch is not None and goal == case.goal else None
    return f"{'≤' if case.at_most else '≥'} {goal:g}" + ("" if beyond is None else f" ({beyond:g})")


def _met(row: Row) -> str:
    case, middle = CASES[row["case"]], _sides(row)[1]["ratio"][1]
    goal = case.goal_at(row["threads"], row["level"] != WIDE)
    if goal is None:
        return ""
    if middle > goal if case.at_most else middle < goal:
        return "**not met**"
    return (
        "met, and beyond"
        if case.stretch is not None and goal == case.goal and middle >= case.stretch
        else "met"
    )


def _floor(row: Row) -> str:
    return f"{_sides(row)[0]['ms'][1] / row['floor_ms']:.1f}"


def _of(name: str) -> Cell:
    return lambda row: (
        f"{row['implementations'][name]['ratio'][1]:.2f}" if name in row["implementations"] else "-"
    )


def _beside(name: str) -> Cell:
    """How many times as fast as a implementation to which the ratio is a price."""
    return lambda row: (
        f"{1 / row['implementations'][name]['ratio'][1]:.2f}"
        if name in row["implementations"]
        else "-"
    )


def _ms(at: int) -> Cell:
    return lambda row: f"{_sides(row)[at]['ms'][1]:.3f}"


def _columns(ours: str, other: str, ratio: str, more: Mapping[str, Cell]) -> dict[str, Cell]:
    plain: dict[str, Cell] = {
        "case": lambda row: f"`{row['case']}`",
        "threads": lambda row: str(row["threads"]),
        other: _ms(1),
        ours: _ms(0),
    }
    return plain | {ratio: _ratio, "goal": _goal, "": _met} | dict(more)


def _wide(row: Row) -> bool:
    return row["level"] == WIDE


def _narrow(row: Row) -> bool:
    return row["level"] != WIDE


_FLOOR: dict[str, Cell] = {"times the floor": _floor}
_LIBRARIES: dict[str, Cell] = {
    "Ignite": _of("ignite"),
    "Lightning": _of("lightning"),
    "tsfast": _of("tsfast"),
    "JAX": _of("jax"),
}
_TRAIN = _columns("ms, throughtime", "ms, by hand", "times as fast", _FLOOR | _LIBRARIES)
_HORIZON = _columns(
    "ms, throughtime",
    "ms, graphs kept",
    "times as fast",
    _FLOOR | {"graphs of strides": _of(STRIDE_GRAPHS), "window run again": _of(RECOMPUTED)},
)
_PRICE = _columns(
    "ms, with",
    "ms, without",
    "times the time",
    {"times as fast as torch.nn": _beside(TORCH_WITH_RESETS)},
)
_EXACT = _columns("ms, tt.Exact", "ms, tt.Truncated(100)", "times the time", {})
_PARTS: Iterable[tuple[str, set[str], dict[str, Cell], Callable[[Row], bool]]] = (
    (
        "Whole updates, one thread",
        {"train"},
        _TRAIN,
        lambda row: _wide(row) and row["threads"] == 1,
    ),
    (
        "Whole updates, two threads",
        {"train"},
        _TRAIN,
        lambda row: _wide(row) and row["threads"] > 1,
    ),
    ("A horizon longer than the stride", {"horizon"}, _HORIZON, _wide),
    ("Resets", {"resets"}, _PRICE, _wide),
    ("Gradient norms of every state", {"trace"}, _PRICE, _wide),
    ("A net written as a class, beside the nn.Sequential", {"class"}, _PRICE, _wide),
    ("The exact gradient of 5,000 steps, beside strides of 100", {"exact"}, _EXACT, _wide),
    ("Without AVX-512", {"train", "horizon"}, _TRAIN, _narrow),
)
