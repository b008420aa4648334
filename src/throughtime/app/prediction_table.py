"""The predictions of a recording as a table of columns, and what writes it to a file.

Shapes: `T` steps, `n` of a chunk, `C` classes or output columns.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from throughtime.app.model import ModelSpec
from throughtime.stream import Recording
from throughtime.stream.formats.table import Array, is_number
from throughtime.stream.formats.times import time_texts
from throughtime.stream.recording import step_times
from throughtime.stream.shift import later_times

Columns: TypeAlias = dict[str, Array]
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # the first character of one


@dataclass(frozen=True)
class PredictedSteps:
    """The table of the predictions of a recording.

    Its columns are the step, its time stamp if the recording has some, the time or the row that a
    single forecast is for, the class, and a probability of each class or a value of each target.
    """

    recording: Recording
    spec: ModelSpec

    def columns(self, steps: slice, outputs: Array) -> Columns:
        """The columns of some steps; `outputs` `(n, C)` are probabilities, or values."""
        spec = self.spec
        table: Columns = {"step": np.arange(steps.start, steps.stop)}
        times = step_times(self.recording, steps.start, steps.stop)
        if times is not None:
            table["time"] = times.astype("M8[ns]")
        if len(spec.layout.steps_ahead) == 1:
            table["forecast_for"] = self._later(steps)
        if spec.classes:
            names = np.array([*spec.classes, ""])  # none where a step was left out
            missing = np.isnan(outputs).any(axis=1)
            table["class"] = names[np.where(missing, -1, outputs.argmax(axis=1))]
        table |= dict(zip(self._names(), outputs.T, strict=True))
        return table

    def _names(self) -> list[str]:
        names = [f"p[{name}]" for name in self.spec.classes]
        sign = "p" if self.spec.is_multilabel else "y"
        names = names or [f"{sign}[{name}]" for name in self.spec.target_names]
        return names or [f"y[{i}]" for i in range(self.spec.outputs)]

    def _later(self, steps: slice) -> Array:
        """The time stamps that the forecasts of some steps are for, or the rows of the file."""
        layout = self.spec.layout
        (ahead,) = layout.steps_ahead
        times = later_times(self.recording, steps.start, steps.stop, ahead)
        if times is not None:
            return times.astype("M8[ns]")
        size = layout.frame_size  # the target of a frame is that of its last row
        return np.arange(steps.start, steps.stop) * size + size - 1 + ahead * size


class _NpyWriter:
    """A `.npy` of shape `(T, C)`, appended to; mapping it would keep its pages in memory."""

    def __init__(self, file: Any, table: PredictedSteps) -> None:
        self._file, spec = file, table.spec
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(spec.dtype)),
            "fortran_order": False,
            "shape": (len(table.recording), spec.outputs),
        }
        np.lib.format.write_array_header_2_0(file, header)

    def write(self, steps: slice, outputs: Array) -> None:
        del steps
        self._file.write(np.ascontiguousarray(outputs).tobytes())


class _CsvWriter:
    """A `.csv` with a header and a line per step."""

    def __init__(self, file: Any, table: PredictedSteps) -> None:
        self._file, self._table, self._header = file, table, False

    def write(self, steps: slice, outputs: Array) -> None:
        columns = self._table.columns(steps, outputs)
        rows = csv.writer(self._file)
        if not self._header:
            rows.writerow(map(plain_text, columns))
            self._header = True
        rows.writerows(zip(*map(_texts, columns.values()), strict=True))


def _texts(values: Array) -> Sequence[Any]:
    if values.dtype.kind == "M":
        return time_texts(values)
    if values.dtype.kind == "U":
        return [plain_text(v) for v in values.tolist()]
    return [f"{v:.6g}" for v in values.tolist()] if values.dtype.kind == "f" else values.tolist()


def plain_text(text: str) -> str:
    """The text with an apostrophe before it where a spreadsheet would compute it as a formula.

    Example:
        >>> plain_text("=1+1"), plain_text("-5"), plain_text("beat")
        ("'=1+1", '-5', 'beat')
    """
    return f"'{text}" if text.startswith(_FORMULA) and not is_number(text) else text


class _ParquetWriter:
    """A `.parquet` with a row group for each chunk; a time without a value is null."""

    def __init__(self, file: Any, table: PredictedSteps) -> None:
        self._file, self._table = file, table
        self._writer: Any = None

    def write(self, steps: slice, outputs: Array) -> None:
        from pyarrow import array, parquet, table

        columns = self._table.columns(steps, outputs)
        rows = table({name: array(values) for name, values in columns.items()})
        self._writer = self._writer or parquet.ParquetWriter(self._file, rows.schema)
        self._writer.write_table(rows)
        if steps.stop >= len(self._table.recording):
            self._writer.close()


WRITERS = {
    ".npy": (_NpyWriter, {"mode": "wb"}),
    ".csv": (_CsvWriter, {"mode": "w", "newline": "", "encoding": "utf-8"}),
    ".parquet": (_ParquetWriter, {"mode": "wb"}),
}
