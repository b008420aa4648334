"""The tables of the report, which the commands print as well."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
        rows: one cell per column.
        caption: what the table shows.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        return [tuple(map(_text, row)) for row in self.rows]

    @property
    def numeric_columns(self) -> list[int]:
        """Indices of the columns with numbers, which are aligned right."""
        columns = enumerate(zip(*self.rows, strict=True))
        return [i for i, cells in columns if not all(isinstance(cell, str) for cell in cells)]


def _text(value: Cell) -> str:
    """Numbers with four digits or decimals and a minus sign; a dash for one that is not finite."""
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "\u2013"
    form = "," if isinstance(value, int) else ".4f" if 1e-3 < abs(value) < 10 else ".4g"
    return format(value, form).replace("-", "\u2212")


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
