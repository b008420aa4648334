"""WFDB records (PhysioNet), by wfdb: the header when opened, then the samples that are read."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, import_extra, rows_between

_DAMAGED = (
    OSError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    ZeroDivisionError,
)  # wfdb checks little


def open_wfdb(path: Path) -> "WfdbTable":
    """Signals of a `.hea` header are columns by name, in physical units (float64).

    An invalid sample is NaN.

    Raises:
        MissingExtraError: wfdb is not installed.
        DataError: the header cannot be read, signals have several samples per frame or the same
            name, or the signal files are missing or cut short.
    """
    library = _library(path)
    with _quiet():
        try:
            header: Any = library.rdheader(str(path.with_suffix("")))
            names, frames = (
                tuple(header.sig_name or ()),
                set(header.samps_per_frame or [1] * len(header.sig_name or ())),
            )
            length, rate = header.sig_len, float(header.fs)
        except _DAMAGED as error:
            raise DataError(
                f"{path}: not a readable WFDB header ({error}); is it cut short?"
            ) from error
    if not names or not length or len(set(names)) < len(names):
        raise DataError(
            f"{path}: its header has the signals {list(names)} of {length} samples, expected"
            " distinct names and a length"
        )
    if frames != {1}:
        raise DataError(
            f"{path}: its signals have {sorted(frames)} samples per frame, expected one rate;"
            " resample the record"
        )
    table = WfdbTable(path, names, int(length), rate)
    table.read(length - 1, length, names)  # a signal file cut short lacks its last sample
    return table


def files(path: Path) -> tuple[Path, ...]:
    """The files that must not change: the header, and the signal files that it names."""
    lines = [
        line.split()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line[:1] not in ("", "#")
    ]
    files = [path.parent / words[0] for words in lines[1:] if words]
    return (path, *dict.fromkeys(file for file in files if file.is_file()))


def _library(path: Path) -> Any:
    with _quiet():
        return import_extra("wfdb", path, "WFDB", "bio")


def _quiet() -> Any:
    """Without the warnings that pandas 3 gives for wfdb 4.3."""
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)


@dataclass(frozen=True)
class WfdbTable:
    """A record by name; wfdb opens its files at each read."""

    path: Path
    columns: tuple[str, ...]
    length: int
    rate: float | None

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, self.length)
        if start == stop:
            return np.empty((0, len(columns)))
        channels = [self.columns.index(name) for name in columns]
        library = _library(self.path)
        with _quiet():
            try:
                record: Any = library.rdrecord(
                    str(self.path.with_suffix("")),
                    sampfrom=start,
                    sampto=stop,
                    channels=sorted(set(channels)),
                )
                values: Array = record.p_signal
            except _DAMAGED as error:
                raise DataError(
                    f"{self.path}: samples {start} to {stop} cannot be read ({error}); is a signal"
                    " file missing or cut short?"
                ) from error
        if values.shape[0] != stop - start:
            raise DataError(
                f"{self.path}: gave {values.shape[0]} samples of {stop - start} from {start} on; is"
                " a signal file cut short?"
            )
        return values[:, [record.sig_name.index(name) for name in columns]]
