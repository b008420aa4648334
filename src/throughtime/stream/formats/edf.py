"""EDF and BDF: the header when opened, then the data records that are read, memory-mapped.

A file is a header of text, then records of equal duration; a record holds the samples of each
signal in turn, integers of 16 bits (EDF) or 24 bits (BDF, BioSemi), little-endian (Kemp et al.
1992; Kemp & Olivan 2003 for EDF+).

No library does it: pyedflib 0.1 refuses anonymised dates, edfio 0.4 reads the whole of a BDF file,
MNE converts to volts, and edfarray 1.2 knows no BDF and needs Python 3.12.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array, TableFile, unreadable

_SIGNAL = (16, 80, 8, 8, 8, 8, 8, 80, 8, 32)  # widths of the fields, each of all signals in turn


class EdfFile(TableFile):
    """Signals are columns by their labels, in their physical units (float64).

    A label that comes again is `label (2)`; annotations are left out. The steps are those of
    the signals of one rate that have most samples together. A signal of another sampling rate is
    listed, and refused when it is read: it has no value at each step. Leave it out, or resample the
    file.

    Raises:
        DataError: the file is neither EDF nor BDF, has more or fewer records than its header says,
            is not continuous, or holds no signal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with (
            unreadable(f"{path}: not a readable EDF or BDF file"),
            path.open("rb") as file,
        ):
            head = file.read(256)
            records, duration, count = int(head[236:244]), float(head[244:252]), int(head[252:])
            titles, _, _, *limits, _, counts, _ = (
                [file.read(width).strip() for _ in range(count)] for width in _SIGNAL
            )
            labels, sizes = [title.decode("latin-1") for title in titles], [*map(int, counts)]
            self._calibration = _calibration(*limits)
            form, *width = ("u1", 3) if head[:1] == b"\xff" else ("<i2",)
            record = np.dtype([("", form, (size, *width)) for size in sizes])
            begin, each = int(head[184:192]), record.itemsize
            if path.stat().st_size != begin + records * each:
                raise ValueError(
                    f"its header promises {records} data records of {each} bytes; copy it whole, or"
                    " write the true number into the header"
                )
            self._records: Array = np.memmap(path, record, "r", begin, (records,))
        if head[193:197] == b"DF+D":  # EDF+ or BDF+
            raise DataError(f"{path}: has gaps in time (EDF+D, BDF+D); split the recording there")
        signals = {
            f"{label} ({same + 1})" if (same := labels[:i].count(label)) else label: i
            for i, label in enumerate(labels)
            if label not in ("EDF Annotations", "BDF Annotations")
        }
        if not signals or not duration > 0:
            raise DataError(f"{path}: holds no signal")
        rates = [sizes[i] for i in signals.values()]
        self._size = max(rates, key=lambda size: size * rates.count(size))
        self._signals = {name: i for name, i in signals.items() if sizes[i] == self._size}
        self.columns, self.length = tuple(signals), records * self._size
        self.rate = self._size / duration

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        size = self._size
        if not self._signals.keys() >= {*columns}:
            raise DataError(
                f"{self.path}: {self.rate:g} samples per second have"
                f" {listed(self._signals, quoted=True)}, not all of {listed(columns, quoted=True)};"
                " choose columns of one rate, or resample the file"
            )
        first, last = start // size, -(-stop // size)
        records = self._records[first:last]
        values = [self._values(records, self._signals[name]) for name in columns]
        return np.stack(values, axis=1)[start - first * size : stop - first * size]

    def _values(self, records: Array, signal: int) -> Array:
        samples = records[f"f{signal}"]
        if samples.ndim > 2:  # the upper 24 of 32 bits
            wide = np.zeros((*samples.shape[:2], 4), np.uint8)
            wide[..., 1:] = samples
            samples = wide.view("<i4") >> 8
        gain, shift = self._calibration[:, signal]
        return (samples.reshape(-1) + shift) * gain


def _calibration(*limits: Sequence[bytes]) -> Array:
    """How integers become values, `(2, signals)`; without a physical range they are the values."""
    numbers = [[float(text or b"nan") for text in texts] for texts in limits]
    low, high, least, most = np.array(numbers)
    with np.errstate(all="ignore"):
        gain = (high - low) / (most - least)
        shift = high / gain - most
    return np.where(np.isfinite(gain + shift), (gain, shift), ((1.0,), (0.0,)))
