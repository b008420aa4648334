"""Recordings whose values are checked as they are read: they are numbers."""

from dataclasses import dataclass
from shlex import quote
from typing import Any

from throughtime.app.views import RowsView
from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array, RowSource, is_number
from throughtime.stream.recording import RecordingView, StepArrays, TableRecording
from throughtime.stream.row_sources import ColumnRows

_EXCERPT = 64  # steps in which columns of text are looked for


@dataclass(frozen=True)
class NumericRecording(RecordingView[TableRecording]):
    """A recording whose inputs must be numbers, and the targets of a regression, too."""

    whole: TableRecording
    check_targets: bool

    def read(self, start: int, stop: int) -> StepArrays:
        steps = self.whole.read(start, stop)
        self._check("inputs", self.whole.inputs, steps.inputs, start)
        if self.check_targets and self.whole.targets is not None and steps.targets is not None:
            self._check("targets", self.whole.targets, steps.targets, start)
        return steps

    def _check(self, role: str, rows: RowSource, values: Array, start: int) -> None:
        if values.dtype.kind in "biuf":
            return
        values = rows.read(start, start + _EXCERPT)
        raise DataError(_text_fault(role, rows, values.reshape(len(values), -1), start))


def _text_fault(role: str, rows: RowSource, fields: Array, start: int) -> str:
    """Which columns hold text where numbers are expected, and what to do about it."""
    inner: Any = rows
    while not isinstance(inner, ColumnRows):
        inner = inner.rows if isinstance(inner, RowsView) else getattr(inner, "labels", None)
        if inner is None:
            return f"{rows.source}: the {role} hold text such as {fields[0, 0]!r}, expected numbers"
    return _text_columns_fault(role, inner, fields, start)


def _text_columns_fault(role: str, rows: ColumnRows, fields: Array, start: int) -> str:
    names = rows.columns
    steps = dict[str, list[int]]()
    texts = dict[str, str]()
    for step, row in enumerate(fields.tolist()):
        for index, text in enumerate(row):
            if text.strip() and not is_number(text):
                name = names[index % len(names)]
                steps.setdefault(name, []).append(start + step)
                texts.setdefault(name, text)
    first = next(iter(texts), names[0])
    where = f"{rows.source}: {listed(steps or names, quoted=True)}"
    what = f"of the {role} hold text, such as {texts.get(first, '')!r} in '{first}'"
    if start == 0 and len(fields) > 1 and any(at == [0] for at in steps.values()):
        return (
            f"{where} {what} in the first row and numbers after it; is the line after the header"
            " one of units? Delete it"
        )
    others = [name for name in rows.table.columns if name not in texts]
    return (
        f"{where} {what}, expected numbers; leave them out: --exclude {quote(','.join(steps))}"
        f" (or are they classes? --targets {quote(first)} --task classify)"
        + f". The other columns are {listed(others)}"
        * bool(others)
    )
