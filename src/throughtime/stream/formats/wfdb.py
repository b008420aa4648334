"""WFDB records (PhysioNet), by wfdb: the header when opened, then the samples that are read."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array, TableFile, import_extra, unreadable

_DAMAGED = (
    OSError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    ZeroDivisionError,
)  # wfdb checks little


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
        with _quiet():
            self._library = import_extra("wfdb", path, "WFDB", "wfdb")
            with unreadable(f"{path}: not a readable WFDB header", _DAMAGED):
                header: Any = self._library.rdheader(str(path.with_suffix("")), rd_segments=True)
                segments = getattr(header, "segments", None)
                names = tuple((header.get_sig_name() if segments else header.sig_name) or ())
                records = [segment for segment in segments or [header] if segment is not None]
                frames = {count for one in records for count in one.samps_per_frame or [1]}
                length, rate = header.sig_len, float(header.fs)
        if not names or not length or len(set(names)) < len(names):
            raise DataError(
                f"{path}: its header has the signals {listed(names, quoted=True)} of {length}"
                " samples, expected distinct names and a length"
            )
        if frames != {1}:
            raise DataError(
                f"{path}: its signals have {sorted(frames)} samples per frame, expected one rate;"
                " resample the record"
            )
        self.path, self.columns, self.length, self.rate = path, names, int(length), rate
        self.read(length - 1, length, names)  # a signal file cut short lacks its last sample

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        channels = {self.columns.index(name) for name in columns}
        what = f"{self.path}: samples {start} to {stop} cannot be read"
        hint = "is a signal file missing or cut short?"
        with _quiet(), unreadable(what, _DAMAGED, hint):
            record: Any = self._library.rdrecord(
                str(self.path.with_suffix("")),
                sampfrom=start,
                sampto=stop,
                channels=sorted(channels),
            )
            values: Array = record.p_signal
        if values.shape[0] != stop - start:
            raise DataError(
                f"{self.path}: gave {values.shape[0]} samples of {stop - start} from {start} on; is"
                " a signal file cut short?"
            )
        return values[:, [record.sig_name.index(name) for name in columns]]


def wfdb_files(path: Path) -> tuple[Path, ...]:
    """The files that must not change: the header, and the signal files and segments it names."""
    lines = [
        line.split()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line[:1] not in ("", "#")
    ]
    names = [words[0] for words in lines[1:] if words]
    files = [path.parent / name for name in names]
    segments = [path.with_name(f"{name}.hea") for name in names]  # of a record that has some
    parts = [part for one in segments if one.is_file() for part in wfdb_files(one)]
    return (path, *dict.fromkeys(file for file in files if file.is_file()), *dict.fromkeys(parts))


def _quiet() -> Any:
    """Without the warnings that pandas 3 gives for wfdb 4.3."""
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)
