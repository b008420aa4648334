"""EDF and BDF: the header when opened, then the data records that are read, memory-mapped.

A file is a header of text, then records of equal duration; a record holds the samples of each
signal in turn, integers of 16 bits (EDF) or 24 bits (BDF, BioSemi), little-endian (Kemp et al.
1992; Kemp & Olivan 2003 for EDF+).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import (
    Array,
    MappedFile,
    TableFile,
    refuse_shorter,
    unreadable,
)

_FIXED = 256  # bytes of the header that are not of a signal, and as many for each signal
_ANNOTATIONS = ("EDF Annotations", "BDF Annotations")
_UNREADABLE = (OSError, ValueError, IndexError, OverflowError, ZeroDivisionError)


class _Signal(NamedTuple):
    """A signal: its samples in a record, where they begin, and how integers become values."""

    label: str
    samples: int
    offset: int  # bytes from the start of a record
    gain: float
    shift: float


class EdfFile(TableFile):
    """Signals are columns by their labels, in their physical units (float64).

    A label that comes again is `label (2)`; annotations are left out. The steps are those of
    the signals of one rate that have most samples together. A signal of another sampling rate is
    listed, and refused when it is read: it has no value at each step. Leave it out, or resample the
    file.

    Raises:
        DataError: the file is neither EDF nor BDF, cut short, not continuous, or holds no signal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with unreadable(f"{path}: not a readable EDF or BDF file", _UNREADABLE):
            self._file = MappedFile(path)
            fixed = self._file.mapping[:_FIXED]
            count, records = _number(fixed, 252, 4), _number(fixed, 236, 8)
            duration = float(fixed[244:252])
            self._width = 3 if fixed[:1] == b"\xff" else 2
            self._begin = _FIXED * (count + 1)
            signals = _signals(self._file.mapping[_FIXED : self._begin], count, self._width)
            self._record = sum(signal.samples for signal in signals) * self._width
        if records < 0:
            raise DataError(f"{path}: its header leaves the number of records open; was it closed?")
        refuse_shorter(path, self._begin + records * self._record)
        if fixed[192:197] in (b"EDF+D", b"BDF+D"):
            raise DataError(
                f"{path}: has gaps in time ({fixed[192:197].decode()}), expected a recording"
                " without; split it at the gaps"
            )
        self._signals: dict[str, _Signal] = {}
        for signal in signals:
            if signal.label not in _ANNOTATIONS:
                again = sum(other.label == signal.label for other in self._signals.values())
                name = f"{signal.label} ({again + 1})" if again else signal.label
                self._signals[name] = signal
        if not self._signals or not duration > 0:
            raise DataError(f"{path}: holds no signal")
        self.columns, self._duration = tuple(self._signals), duration
        counts = Counter[int]()
        for signal in self._signals.values():
            counts[signal.samples] += signal.samples
        self._samples = counts.most_common(1)[0][0]
        self.rate, self.length = self._samples / duration, records * self._samples

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        size = self._samples
        others = [
            f"'{name}' has {signal.samples / self._duration:g} samples per second"
            for name, signal in self._signals.items()
            if name in columns and signal.samples != size
        ]
        if others:
            first = next(name for name, signal in self._signals.items() if signal.samples == size)
            what = "the first signal" if first == self.columns[0] else "most samples are those of"
            raise DataError(
                f"{self.path}: {listed(others)}, {what} '{first}' {self.rate:g}; choose columns of"
                " one rate, or resample it"
            )
        first, last = start // size, -(-stop // size)
        begin, end = (self._begin + record * self._record for record in (first, last))
        records = np.frombuffer(self._file.mapping[begin:end], np.uint8)
        self._file.count_read(end - begin)
        records = records.reshape(last - first, self._record)
        values = np.stack([self._physical(records, self._signals[n]) for n in columns], axis=1)
        return values[start - first * size : stop - first * size]

    def _physical(self, records: Array, signal: _Signal) -> Array:
        """The values of a signal in some records."""
        end = signal.offset + signal.samples * self._width
        data = np.ascontiguousarray(records[:, signal.offset : end]).reshape(-1, self._width)
        if self._width == 2:
            integers = data.view("<i2")[:, 0].astype(np.int32)
        else:
            high = data[:, 2].astype(np.int8).astype(np.int32)
            integers = data[:, 0] | (data[:, 1].astype(np.int32) << 8) | (high << 16)
        return (integers + signal.shift) * signal.gain


def _number(header: bytes, offset: int, width: int) -> int:
    return int(header[offset : offset + width])


def _signals(header: bytes, count: int, width: int) -> list[_Signal]:
    """The signals of a header; without a physical range the values are the integers."""

    def texts(offset: int, size: int) -> list[str]:
        begin = count * offset
        parts = [header[begin + i * size : begin + (i + 1) * size] for i in range(count)]
        return [part.decode("latin-1").strip() for part in parts]

    limits = [texts(offset, 8) for offset in (104, 112, 120, 128)]
    signals: list[_Signal] = []
    offset = 0
    for label, samples, *ranges in zip(texts(0, 16), texts(216, 8), *limits, strict=True):
        low, high, least, most = (float(text or "nan") for text in ranges)
        gain = (high - low) / (most - least) if most != least else np.nan
        shift = high / gain - most if gain else np.nan
        scaled = np.isfinite(gain) and np.isfinite(shift)
        signals.append(
            _Signal(label, int(samples), offset, *((gain, shift) if scaled else (1.0, 0.0)))
        )
        offset += int(samples) * width
    return signals
