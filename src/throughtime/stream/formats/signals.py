"""Recorders' files: sound, EDF and BDF, WFDB. The header when opened, then the samples read.

Sound is read by soundfile, records of PhysioNet by wfdb. EDF and BDF are a header of text, then
records of equal duration; a record holds the samples of each signal in turn, integers of 16 bits
(EDF) or 24 bits (BDF, BioSemi), little-endian (Kemp et al. 1992; Kemp & Olivan 2003 for EDF+). They
are memory-mapped, since no library does it: pyedflib 0.1 refuses anonymised dates, edfio 0.4 reads
the whole of a BDF file, MNE converts to volts, and edfarray 1.2 knows no BDF and needs Python 3.12.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import Array, Table, import_extra, unreadable

_SIGNAL = (16, 80, 8, 8, 8, 8, 8, 80, 8, 32)  # widths of the fields, each of all signals in turn
_HINT = "is a file missing or cut short, or does a frame have several samples?"


class AudioFile(Table):
    """WAV or FLAC: channels are the columns `0`, `1`, ...

    Samples are in [-1, 1), float32, or float64 where they have 32 bits or more. Reading seeks only
    where it does not continue from its last position.

    Raises:
        MissingExtraError: soundfile is not installed.
        DataError: the file is no such file, or holds fewer samples than its header promises.
    """

    def __init__(self, path: Path) -> None:
        soundfile = import_extra("soundfile", path, "audio")
        with path.open("rb") as file:
            header = file.read(28)
        # libsndfile reads what is left of a file that is cut short
        sizes = {b"RIFF": header[4:8], b"RF64": header[20:28]}
        size = int.from_bytes(sizes.get(header[:4], b""), "little")
        promised, length = 8 + size, path.stat().st_size
        # 2**32 - 1: written by programs that could not seek back
        if size != 0xFFFFFFFF and length < promised:
            raise DataError(
                f"{path}: holds {length} bytes, its header promises {promised}; copy it again"
            )
        with unreadable(f"{path}: not a readable sound file"):
            self._file = file = soundfile.SoundFile(path)
        if file.format == "OGG" or not file.seekable() or file.frames >= 2**62:
            raise DataError(
                f"{path}: {file.subtype_info} cannot be read from the middle; convert it to FLAC"
            )
        self.path, self.columns = path, tuple(map(str, range(file.channels)))
        self.length, self.rate = file.frames, float(file.samplerate)
        self._type = "float64" if file.subtype in ("PCM_32", "DOUBLE") else "float32"

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        what = f"{self.path}: samples {start} to {stop} cannot be read"
        with unreadable(what, "is the file cut short?"):
            if self._file.tell() != start:
                self._file.seek(start)
            samples = self._file.read(stop - start, dtype=self._type, always_2d=True)
            if len(samples) != stop - start:
                raise ValueError(f"it ends at sample {start + len(samples)}")
        return samples[:, list(map(int, columns))]


class EdfFile(Table):
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
                    f"its header promises {records} data records of {each} bytes; copy it again"
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
            raise DataError(f"{path}: holds no signal, or records without duration")
        rates = [sizes[i] for i in signals.values()]
        self._size = max(rates, key=lambda size: size * rates.count(size))
        self._signals = {name: i for name, i in signals.items() if sizes[i] == self._size}
        self.columns, self.length = tuple(signals), records * self._size
        self.rate = self._size / duration

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
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


class WfdbFile(Table):
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
        # the header, the signal files and segments, which must not change
        self.files = tuple(f for f in path.parent.iterdir() if f.name.startswith(path.stem))
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            self._library = import_extra("wfdb", path, "wfdb")  # it warns with pandas 3
        with unreadable(f"{path}: not a readable WFDB record", _HINT):
            header: Any = self._library.rdheader(self._record)
            self.length, self.rate = int(header.sig_len), float(header.fs)
            last: Any = self._library.rdrecord(self._record, self.length - 1)
            self.columns = tuple(last.sig_name)
            if len(set(self.columns)) < len(self.columns):
                raise ValueError(f"it names signals twice: {self.columns}")
        self.rows(self.length - 1, self.length, self.columns)

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        channels = sorted({self.columns.index(name) for name in columns})
        what = f"{self.path}: samples {start} to {stop} cannot be read"
        with unreadable(what, _HINT):
            record: Any = self._library.rdrecord(
                self._record, start, stop, channels, smooth_frames=False
            )
            signals = dict(zip(record.sig_name, record.e_p_signal, strict=True))
            values = np.stack([signals[name] for name in columns], axis=1)
            return values.reshape(stop - start, len(columns))
