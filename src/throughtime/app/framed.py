"""Frames: consecutive rows of a file as one step, as audio at 8,000 rows a second becomes 100 steps
of 80 numbers.

A frame is complete or none: rows at the end that fill no frame are left out. Its target is that of
its last row, where the net has seen all of it; so an interval of rows covers the steps whose last
row it covers.

Shapes: `N` rows per frame, `n` steps read, `D` columns.
"""

from dataclasses import dataclass

from throughtime.stream.formats.table import Array
from throughtime.stream.rows import Rows


@dataclass(frozen=True)
class Framed:
    """Every `frame` rows as one of `N * D` numbers, row after row."""

    rows: Rows
    frame: int

    @property
    def where(self) -> str:
        return self.rows.where

    def __len__(self) -> int:
        return len(self.rows) // self.frame

    def read(self, start: int, stop: int) -> Array:
        rows = self._rows(start, stop)
        return rows.reshape(len(rows) // self.frame, -1)

    def _rows(self, start: int, stop: int) -> Array:
        return self.rows.read(start * self.frame, min(stop, len(self)) * self.frame)


class FrameEnds(Framed):
    """Of every `frame` rows the last one."""

    def read(self, start: int, stop: int) -> Array:
        return self._rows(start, stop)[self.frame - 1 :: self.frame]
