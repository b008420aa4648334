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

    Samples are float32 in [-1, 1). Reading seeks only where it does not continue from its last
    position.

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
        self.path, self._error = path, soundfile.LibsndfileError
        with unreadable(f"{path}: not a readable sound file", (OSError, self._error)):
            self._file = file = soundfile.SoundFile(path)
        if file.subtype == "OPUS":
            raise DataError(
                f"{path}: Opus gives other samples from the middle than from the start; convert it"
                " to WAV, FLAC or Vorbis"
            )
        if not file.seekable() or file.frames >= 2**62:
            raise DataError(
                f"{path}: {file.subtype_info} cannot be read from the middle; convert it to PCM"
            )
        self.columns = tuple(map(str, range(file.channels)))
        self.length, self.rate = file.frames, float(file.samplerate)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        begin = start
        what = f"{self.path}: samples {start} to {stop} cannot be read"
        with unreadable(what, (self._error,), "is the file cut short?"):
            if self._file.tell() != start:
                begin = max(0, start - WARM_UP) if self._file.format == "OGG" else start
                self._file.seek(begin)
            samples = self._file.read(stop - begin, dtype="float32", always_2d=True)
        samples = samples[start - begin :]
        if len(samples) != stop - start:
            raise DataError(
                f"{self.path}: ends at sample {start + len(samples)}, its header promises"
                f" {self.length}; the file is cut short"
            )
        return samples[:, list(map(int, columns))]


def _refuse_cut_short(path: Path) -> None:
    """Refuse a file that is cut short: libsndfile reads what is left.

    A RIFF header holds the size, and the last page of Ogg is marked.
    """
    with path.open("rb") as file:
        header = file.read(8)
        file.seek(-min(path.stat().st_size, 2**16 + 2**10), 2)
        tail = file.read()
    expected = 8 + int.from_bytes(header[4:8], "little")
    streamed = 8 + 0xFFFFFFFF  # written by programs that could not seek back
    if header[:4] == b"RIFF" and expected != streamed:
        refuse_shorter(path, expected)
    if header[:4] == b"OggS" and not _ends_a_stream(tail):
        raise DataError(f"{path}: its last page does not end the stream; the file is cut short")


def _ends_a_stream(tail: bytes) -> bool:
    """Whether the last Ogg page is whole and marked as that of its stream (RFC 3533, section 6)."""
    page = tail[max(0, tail.rfind(b"OggS")) :]
    if len(page) < 27 or not page[5] & 4 or len(page) < 27 + page[26]:
        return False
    return len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])
