"""WFDB records (PhysioNet), by wfdb: the header when opened, then the samples that are read."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.stream.formats.table import Array, TableFile, import_extra, unreadable

_HINT = "is a file missing or cut short, or does a frame have several samples?"


class WfdbFile(TableFile):
    """A record of PhysioNet: the signals of a `.hea` header, in physical units (float64).

    Columns have the names of signals. An invalid sample is NaN, and so are those of a signal that a
    segment of the record lacks. wfdb opens the signal files at each read.

    Raises:
        MissingExtraError: wfdb is not installed.
        DataError: the header cannot be read, signals have several samples per frame or the same
            name, or the signal files are missing or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._record = path, str(path.with_suffix(""))
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self._library = import_extra("wfdb", path, "WFDB", "wfdb")  # it warns with pandas 3
        with unreadable(f"{path}: not a readable WFDB record", _HINT):
            header: Any = self._library.rdheader(self._record)
            self.length, self.rate = int(header.sig_len), float(header.fs)
            last: Any = self._library.rdrecord(self._record, self.length - 1)
            self.columns = tuple(last.sig_name)
            if len(set(self.columns)) < len(self.columns):
                raise ValueError(f"it names signals twice: {self.columns}")
        self.read(self.length - 1, self.length, self.columns)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        channels = sorted({self.columns.index(name) for name in columns})
        what = f"{self.path}: samples {start} to {stop} cannot be read"
        with unreadable(what, _HINT):
            record: Any = self._library.rdrecord(
                self._record, start, stop, channels, smooth_frames=False
            )
            signals = dict(zip(record.sig_name, record.e_p_signal, strict=True))
            values = np.stack([signals[name] for name in columns], axis=1)
            return values.reshape(stop - start, len(columns))


def wfdb_files(path: Path) -> tuple[Path, ...]:
    """The files that must not change: the header, and the signal files and segments it names."""
    files = [path]
    with unreadable(f"{path}: not a readable WFDB header"):
        for file in files:  # of which more are added: a segment has a header, which names files
            words = file.read_text("latin-1").split() if file.suffix == path.suffix else ()
            named = (path.parent / name for word in words for name in (word, f"{word}.hea"))
            files += [other for other in named if other.is_file() and other not in files]
    return tuple(files)
