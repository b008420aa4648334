"""The tables of the report, which the commands print as well."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from throughtime.diagnose import Audit
from throughtime.errors import DataError, counted

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


@dataclass(frozen=True)
class DataTable:
    """Rows of text and numbers; the first cell of a row is its heading.

    Args:
        columns: the column headings.
        rows: one cell per column; the numbers of a column get the same number of decimals.
        caption: what the table shows.
        numeric: indices of the columns to align right; default: the columns without text.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str
    numeric: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise DataError(
                    f"row {i} of table {self.caption!r} has {len(row)} cells, expected one for each"
                    f" of {list(self.columns)}"
                )

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        return list(zip(*map(_as_text, zip(*self.rows, strict=True)), strict=True))

    @property
    def numeric_columns(self) -> Sequence[int]:
        """Indices of the columns aligned right."""
        if self.numeric is not None:
            return self.numeric
        columns = enumerate(zip(*self.rows, strict=True))
        return [i for i, cells in columns if not any(isinstance(cell, str) for cell in cells)]


def _as_text(cells: Sequence[Cell]) -> list[str]:
    """A column as text, its numbers with the decimals that the largest needs for four digits."""
    sizes = [abs(c) for c in cells if not isinstance(c, str) and math.isfinite(c) and c]
    digits = 3 - math.floor(math.log10(max(sizes, default=1.0)))
    even = bool(sizes) and min(sizes) >= 0.5 * 10.0**-digits and 0 <= digits <= 6
    return [c if isinstance(c, str) else _number(c, digits if even else None) for c in cells]


def _number(value: float, decimals: int | None) -> str:
    """A number with these decimals, or with four digits; a dash for one that is not finite."""
    if not math.isfinite(value):
        return "\u2013"
    whole = decimals is None and float(value).is_integer() and abs(value) < 1e9
    text = f"{value:,.{decimals or 0}f}" if whole or decimals is not None else f"{value:.4g}"
    return text.replace("-", "\u2212")


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


def audit_table(audit: Audit) -> DataTable:
    """The figures of every horizon and of the exact gradient."""
    rows: list[list[Cell]] = []
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
