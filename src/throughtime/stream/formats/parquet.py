"""Parquet through pyarrow: the footer when opened, then one row group at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, MissingExtraError
from throughtime.stream.formats.table import Array

KEPT_BYTES = 128 * 2**20  # of decoded row groups for each file, and at least one group


def open_parquet(path: Path) -> "ParquetTable":
    """Opens the file's footer.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: the file is no Parquet file, or cut short.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(f"{path}: Parquet needs pyarrow; pip install 'throughtime[arrow]'") from error
    try:
        file = parquet.ParquetFile(path, memory_map=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}); is it cut short?") from error
    groups = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    return ParquetTable(path, file, tuple(file.schema_arrow.names), (0, *accumulate(groups)))


@dataclass
class ParquetTable:
    """Keeps the row groups it read last, so that a stream decodes each of them once."""

    path: Path
    file: Any
    columns: tuple[str, ...]
    starts: tuple[int, ...]
    _kept: dict[tuple[int, tuple[str, ...]], Array] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        parts = [
            self._group(group, tuple(columns))[max(0, start - begin) : stop - begin]
            for group, (begin, end) in enumerate(zip(self.starts, self.starts[1:], strict=False))
            if begin < stop and end > start
        ]
        if not parts:
            return np.empty((0, len(columns)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _group(self, group: int, columns: tuple[str, ...]) -> Array:
        """Decoded once, and kept while there is room: lanes play different parts of the same file."""
        key = (group, columns)
        rows = self._kept.pop(key, None)
        if rows is None:
            table = self.file.read_row_group(group, columns=list(columns))
            rows = np.stack([_values(self.path, name, table.column(name)) for name in columns], axis=1)
            while self._kept and sum(kept.nbytes for kept in self._kept.values()) + rows.nbytes > KEPT_BYTES:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = rows
        return rows


def _values(path: Path, name: str, column: Any) -> Array:
    values = column.to_numpy()
    if values.dtype.kind == "O":
        values = np.array(["" if value is None else value for value in values], dtype=object)
        if any(not isinstance(value, str) for value in values):
            raise DataError(f"{path}: column '{name}' has the type {column.type}, expected numbers or text")
        return values.astype(np.str_)
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path}: column '{name}' has the type {column.type}, expected numbers or text")
    return values
