"""What commands share on the terminal: where they print, and the table of scores."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from throughtime.metrics import Metrics

_SHOWN = 40  # recordings in a table of scores
out = Console(
    soft_wrap=True, markup=False, highlight=False
)  # names of columns and files may hold brackets


def print_scores(
    split: str, together: Metrics, recordings: dict[str, Metrics], where: Path
) -> None:
    """Those of each recording, as far as a screen holds them, and of all together."""
    many = f" ({len(recordings)}, each of them in {where})" if len(recordings) > _SHOWN else ""
    table = Table(title=f"scores on the unbroken recordings of '{split}'{many}")
    table.add_column("recording")
    for name in together:
        table.add_column(name, justify="right")
    for recording, figures in () if many else recordings.items():
        table.add_row(recording, *_cells(figures.values()))
    table.add_section()
    table.add_row("all steps together", *_cells(together.values()))
    out.print(table)


def _cells(values: Iterable[float]) -> Sequence[str]:
    return ["-" if value != value else f"{value:.4f}" for value in values]  # NaN is unlike itself
