"""The tables of the report, which the commands print as well."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from throughtime.app.config import Config
from throughtime.errors import listed

Cell: TypeAlias = str | float

METRIC_NAMES = {
    "rmse": "RMSE",
    "r2": "R²",
    "esr": "ESR",
    "macro_f1": "macro-F1",
    "f1": "F1",
    "auroc": "AUROC",
    "auprc": "AUPRC",
}
MODEL = "model"
_FORECASTS = {
    MODEL: "model",
    "persistence": "value now",
    "season": "value one season before",
}


@dataclass(frozen=True)
class DataTable:
    """Rows of text and numbers; the first cell of a row is its heading.

    Args:
        columns: the column headings.
        rows: one cell per column; floats of a column get the same number of decimals.
        caption: what the table shows.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        return list(zip(*map(_as_text, zip(*self.rows, strict=True)), strict=True))

    @property
    def numeric_columns(self) -> list[int]:
        """Indices of the columns with numbers, which are aligned right."""
        columns = enumerate(zip(*self.rows, strict=True))
        return [i for i, cells in columns if not all(isinstance(cell, str) for cell in cells)]


def _as_text(cells: Sequence[Cell]) -> list[str]:
    """A column as text, its floats with the decimals that the largest needs for four digits."""
    sizes = [abs(c) for c in cells if isinstance(c, float) and math.isfinite(c) and c]
    digits = 3 - math.floor(math.log10(max(sizes, default=1.0)))
    even = 0 <= digits <= 6 and min(sizes, default=1.0) >= 0.5 * 10.0**-digits
    form = f",.{digits}f" if even else ".4g"
    return [c if isinstance(c, str) else _number(c, form) for c in cells]


def _number(value: float, form: str) -> str:
    """A number with a minus sign; a dash for one that is not finite."""
    if not math.isfinite(value):
        return "\u2013"
    return format(value, form if isinstance(value, float) else ",").replace("-", "\u2212")


def scores_table(
    names: Sequence[str],
    overall: Mapping[str, float],
    recordings: Mapping[str, Mapping[str, float]],
    caption: str = "",
) -> DataTable:
    """The metrics of these names, of each recording and of all steps together."""
    rows = {**recordings, "all steps together": overall}
    cells = [[name, *(row[n] for n in names)] for name, row in rows.items()]
    return DataTable(["recording", *(METRIC_NAMES.get(n, n) for n in names)], cells, caption)


def is_comparison(name: str) -> bool:
    """Whether a metric of a forecast is one of the comparison with the baselines."""
    return name.partition("/")[0] in {"compared", *_FORECASTS} and "/" in name


def baseline_table(metrics: Mapping[str, float]) -> DataTable | None:
    """Model and baselines of the metrics of a forecast; `None` where there are none."""
    if "compared/steps" not in metrics:
        return None
    kind = "accuracy" if "model/accuracy" in metrics else "rmse"
    rows: list[list[Cell]] = []
    for key, value in metrics.items():
        name, _, score = key.partition("/")
        if score.startswith(kind):
            target = score[len(kind) :]
            skill = metrics.get(f"{name}/skill{target}", math.nan)
            rows.append([_FORECASTS[name], target.strip("[]"), value, skill])
    steps = f"forecasts on the same {metrics['compared/steps']:,.0f} steps"
    caption = f"{METRIC_NAMES.get(kind, 'Accuracy')} of {steps}. A skill above 0: the model has"
    columns = ["forecast", "target", METRIC_NAMES.get(kind, kind), "skill of the model"]
    return DataTable(columns, rows, f"{caption} the smaller error")


def skill_advice(metrics: Mapping[str, float], config: Config) -> str:
    """What to try where a baseline is the better forecast; empty where none is.

    Example:
        >>> config = Config(data="a.csv", targets=("y",), ahead=24)
        >>> skill_advice({"persistence/skill[y]": -0.5}, config)[:67]
        'y: the value now is the better forecast. Try --difference, by which'
    """
    worse = {name: list[str]() for name in _FORECASTS}
    for key, value in metrics.items():
        name, _, score = key.partition("/skill")
        if name in worse and value < 0:
            worse[name].append(score.strip("[]") or "the class")
    better = [
        f"{listed(t)}: the {_FORECASTS[n]} is the better forecast" for n, t in worse.items() if t
    ]
    if not better:
        return ""
    change = "--difference, by which the net learns the change from now; or "
    return (
        f"{'; '.join(better)}. Try {change * (config.task != 'classify' and not config.difference)}"
        "more --updates, a longer --horizon, or inputs that lead the target"
    )
