"""EDF, by edfio: the header when opened, then the data records that are read."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, Handle, import_extra, rows_between


def open_edf(path: Path) -> "EdfTable":
    """Signals are columns by their labels, in their physical units (float64).

    A label that comes again is `label (2)`. The steps are those of the first signal. A signal of
    another sampling rate is listed, and refused when it is read: it has no value at each step.
    Leave it out, or resample the file.

    Raises:
        MissingExtraError: edfio is not installed.
        DataError: the file is no EDF file, cut short, not continuous, or holds no signal.
    """
    handle = Handle(path, _opened)
    opened = handle.get()
    if not opened.signals:
        raise DataError(f"{path}: holds no signal")
    rates = tuple(float(signal.sampling_frequency) for signal in opened.signals.values())
    length = opened.records * next(iter(opened.signals.values())).samples_per_data_record
    return EdfTable(path, handle, tuple(opened.signals), rates, length)


class EdfFile(NamedTuple):
    """The signals by column, and the number of data records."""

    signals: dict[str, Any]
    records: int


def _opened(path: Path) -> EdfFile:
    edfio = import_extra("edfio", path, "EDF", "bio")
    try:
        with warnings.catch_warnings():
            # edfio warns of a file cut short and reads the rest
            warnings.simplefilter("error", UserWarning)
            file = edfio.read_edf(path, lazy_load_data=True, header_encoding="latin-1")
            continuous = file.is_continuous
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        OverflowError,
        ZeroDivisionError,
        UserWarning,
    ) as error:
        raise DataError(f"{path}: not a readable EDF file ({error}); is it cut short?") from error
    if not continuous:
        raise DataError(
            f"{path}: has gaps in time (EDF+D), expected a recording without; split it at the gaps"
        )
    signals: dict[str, Any] = {}
    for signal in file.signals:
        again = sum(other.label == signal.label for other in signals.values())
        signals[f"{signal.label} ({again + 1})" if again else signal.label] = signal
    return EdfFile(signals, file.num_data_records)


@dataclass(frozen=True)
class EdfTable:
    """Signals, read row by row in physical units."""

    path: Path
    handle: Handle[EdfFile]
    columns: tuple[str, ...]
    rates: tuple[float, ...]
    length: int

    @property
    def rate(self) -> float | None:
        return self.rates[0]

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, self.length)
        others = [
            (name, rate)
            for name, rate in zip(self.columns, self.rates, strict=True)
            if name in columns and rate != self.rates[0]
        ]
        if others:
            rates = ", ".join(f"'{name}' has {rate:g} samples per second" for name, rate in others)
            raise DataError(
                f"{self.path}: {rates}, the first signal '{self.columns[0]}' {self.rates[0]:g};"
                " choose columns of one rate, or resample it"
            )
        if start == stop:
            return np.empty((0, len(columns)))
        signals = self.handle.get().signals
        return np.stack([_physical(signals[name], start, stop) for name in columns], axis=1)


def _physical(signal: Any, start: int, stop: int) -> Array:
    with warnings.catch_warnings():
        # without a physical range the digital values are returned
        warnings.simplefilter("ignore", UserWarning)
        return signal.get_data_slice(
            start / signal.sampling_frequency, stop / signal.sampling_frequency
        )
