"""Sound files, by soundfile: the header when opened, then seek and read."""

from collections.abc import Sequence
from pathlib import Path

from throughtime.errors import DataError
from throughtime.stream.formats.table import (
    Array,
    TableFile,
    import_extra,
    refuse_shorter,
    unreadable,
)

# The longest block of Vorbis, in samples. After a seek libsndfile 1.2.2 decodes up to one wrongly.
WARM_UP = 8192


class AudioFile(TableFile):
    """WAV, FLAC or Ogg Vorbis: channels are the columns `0`, `1`, ...

    Samples are in [-1, 1), float32, or float64 where they have 32 bits or more. Reading seeks only
    where it does not continue from its last position.

    Raises:
        MissingExtraError: soundfile is not installed.
        DataError: the file is no sound file, holds fewer samples than its header promises, or
            cannot be read from the middle.

    Cost: after a seek in Ogg, 8192 samples before are decoded too, so that the samples are those of
    reading from the start.
    """

    def __init__(self, path: Path) -> None:
        soundfile = import_extra("soundfile", path, path.suffix[1:].upper(), "audio")
        _refuse_cut_short(path)
        with unreadable(f"{path}: not a readable sound file"):
            self._file = file = soundfile.SoundFile(path)
        if file.subtype == "OPUS" or not file.seekable() or file.frames >= 2**62:
            raise DataError(
                f"{path}: {file.subtype_info} cannot be read from the middle; convert it to PCM"
            )
        self.path, self.columns = path, tuple(map(str, range(file.channels)))
        self.length, self.rate = file.frames, float(file.samplerate)
        self._type = "float64" if file.subtype in ("PCM_32", "DOUBLE") else "float32"

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        what, begin = f"{self.path}: samples {start} to {stop} cannot be read", start
        with unreadable(what, "is the file cut short?"):
            if self._file.tell() != start:
                begin = max(0, start - WARM_UP) if self._file.format == "OGG" else start
                self._file.seek(begin)
            samples = self._file.read(stop - begin, dtype=self._type, always_2d=True)
            if len(samples) != stop - begin:
                raise ValueError(f"it ends at sample {begin + len(samples)}")
        return samples[start - begin :, list(map(int, columns))]


def _refuse_cut_short(path: Path) -> None:
    """Refuse a file that is cut short: libsndfile reads what is left.

    A header of RIFF or RF64 holds the size, and the last page of Ogg is marked (RFC 3533, 6).
    """
    with path.open("rb") as file:
        header = file.read(28)
        file.seek(-min(path.stat().st_size, 2**16 + 2**10), 2)
        page = file.read().rpartition(b"OggS")[2].ljust(23, b"\0")
    sizes = {b"RIFF": header[4:8], b"RF64": header[20:28]}
    size = int.from_bytes(sizes.get(header[:4], b""), "little")
    if size != 0xFFFFFFFF:  # written by programs that could not seek back
        refuse_shorter(path, 8 + size)
    end = 23 + page[22]
    if header[:4] == b"OggS" and not (page[1] & 4 and len(page) >= end + sum(page[23:end])):
        raise DataError(f"{path}: its last page does not end the stream; the file is cut short")
