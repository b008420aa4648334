"""EDF, by edfio: the header when opened, then the data records that are read."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array, TableFile, import_extra, unreadable

_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    OverflowError,
    ZeroDivisionError,
    UserWarning,
)


class EdfFile(TableFile):
    """Signals are columns by their labels, in their physical units (float64).

    A label that comes again is `label (2)`. The steps are those of the first signal. A signal of
    another sampling rate is listed, and refused when it is read: it has no value at each step.
    Leave it out, or resample the file.

    Raises:
        MissingExtraError: edfio is not installed.
        DataError: the file is no EDF file, cut short, not continuous, or holds no signal.
    """

    def __init__(self, path: Path) -> None:
        edfio = import_extra("edfio", path, "EDF", "edf")
        with (
            unreadable(f"{path}: not a readable EDF file", _UNREADABLE),
            warnings.catch_warnings(),
        ):
            # edfio warns of a file cut short and reads the rest
            warnings.simplefilter("error", UserWarning)
            file = edfio.read_edf(path, lazy_load_data=True, header_encoding="latin-1")
            continuous = file.is_continuous
        if not continuous:
            raise DataError(
                f"{path}: has gaps in time (EDF+D), expected a recording without; split it at the"
                " gaps"
            )
        signals: dict[str, Any] = {}
        for signal in file.signals:
            again = sum(other.label == signal.label for other in signals.values())
            signals[f"{signal.label} ({again + 1})" if again else signal.label] = signal
        if not signals:
            raise DataError(f"{path}: holds no signal")
        first = next(iter(signals.values()))
        self.path, self._signals, self.columns = path, signals, tuple(signals)
        self.rate = float(first.sampling_frequency)
        self.length = file.num_data_records * first.samples_per_data_record

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        others = [
            f"'{name}' has {rate:g} samples per second"
            for name, signal in self._signals.items()
            if name in columns and (rate := float(signal.sampling_frequency)) != self.rate
        ]
        if others:
            raise DataError(
                f"{self.path}: {listed(others)}, the first signal '{self.columns[0]}'"
                f" {self.rate:g}; choose columns of one rate, or resample it"
            )
        return np.stack([_physical(self._signals[name], start, stop) for name in columns], axis=1)


def _physical(signal: Any, start: int, stop: int) -> Array:
    with warnings.catch_warnings():
        # without a physical range the digital values are returned
        warnings.simplefilter("ignore", UserWarning)
        return signal.get_data_slice(
            start / signal.sampling_frequency, stop / signal.sampling_frequency
        )
