"""Files of named arrays that a library slices: HDF5, Zarr and netCDF.

The longest arrays are the columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, Handle, rows_between

_DAMAGED = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    IndexError,
)  # what the libraries raise on damaged files


class FileArray(Protocol):
    """An array in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Steps first."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its values."""
        ...

    def __getitem__(self, rows: slice, /) -> Any:
        """Reads these rows."""
        ...


Arrays = Mapping[str, FileArray]


@dataclass(frozen=True)
class ArrayFileTable:
    """Columns that are read by slices of rows; a matrix is one wide column."""

    path: Path
    handle: Handle[Arrays]
    columns: tuple[str, ...]
    length: int
    rate: float | None = None

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, self.length)
        arrays = self.handle.get()
        parts = [self._rows(arrays[name], start, stop, name) for name in columns]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _rows(self, array: FileArray, start: int, stop: int, name: str) -> Array:
        try:
            rows = np.asarray(array[start:stop])
        except _DAMAGED as error:
            raise DataError(
                f"{self.path}: steps {start} to {stop} of '{name}' cannot be read ({error}); is the"
                " file damaged?"
            ) from error
        return (
            rows.reshape(stop - start, -1)
            if stop > start
            else np.empty((0, int(np.prod(array.shape[1:]))))
        )


def open_array_file(path: Path, opener: Callable[[Path], Arrays]) -> ArrayFileTable:
    """The table of the longest numeric vectors and matrices of a file.

    Shorter arrays (means, names of channels) and those of more dimensions are no columns.

    Raises:
        DataError: there is none.
    """
    handle = Handle(path, opener)
    arrays = handle.get()
    lengths = {
        name: array.shape[0]
        for name, array in arrays.items()
        if len(array.shape) in (1, 2) and array.dtype.kind in "biuf"
    }
    if not lengths:
        contents = (
            ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
            or "no array"
        )
        raise DataError(
            f"{path}: holds {contents}, expected arrays of numbers with one row per step"
        )
    longest = max(lengths.values())
    return ArrayFileTable(
        path, handle, tuple(name for name, length in lengths.items() if length == longest), longest
    )
