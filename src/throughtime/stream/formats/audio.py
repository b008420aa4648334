"""Sound files, by soundfile: the header when opened, then seek and read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, Handle, import_extra, rows_between

# The longest block of Vorbis, in samples. After a seek libsndfile 1.2.2 decodes up to one wrongly.
WARM_UP = 8192


def open_audio(path: Path) -> "AudioTable":
    """WAV, FLAC or Ogg Vorbis: channels are the columns `0`, `1`, ...

    Samples are float32 in [-1, 1).

    Raises:
        MissingExtraError: soundfile is not installed.
        DataError: the file is no sound file, holds fewer samples than its header promises, or
            cannot be read from the middle.

    Cost: after a seek in Ogg, 8192 samples before are decoded too, so that the samples are those of
    reading from the start.
    """
    handle = Handle(path, _opened)
    file = handle.get()
    return AudioTable(
        path,
        handle,
        tuple(map(str, range(file.channels))),
        file.frames,
        float(file.samplerate),
        file.format == "OGG",
    )


def _opened(path: Path) -> Any:
    soundfile = import_extra("soundfile", path, path.suffix[1:].upper(), "audio")
    _refuse_cut_short(path)
    try:
        file = soundfile.SoundFile(path)
    except (OSError, soundfile.LibsndfileError) as error:
        raise DataError(f"{path}: not a readable sound file ({error}); is it cut short?") from error
    if file.subtype == "OPUS":
        raise DataError(
            f"{path}: Opus gives other samples from the middle than from the start; convert it to"
            " WAV, FLAC or Vorbis"
        )
    if not file.seekable() or file.frames >= 2**62:
        raise DataError(
            f"{path}: {file.subtype_info} cannot be read from the middle; convert it to PCM"
        )
    return file


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
    if header[:4] == b"RIFF" and path.stat().st_size < expected != streamed:
        raise DataError(
            f"{path}: holds {path.stat().st_size} bytes, its header promises {expected}; the file"
            " is cut short"
        )
    if header[:4] == b"OggS" and not _ends_a_stream(tail):
        raise DataError(f"{path}: its last page does not end the stream; the file is cut short")


def _ends_a_stream(tail: bytes) -> bool:
    """Whether the last Ogg page is whole and marked as that of its stream (RFC 3533, section 6)."""
    page = tail[max(0, tail.rfind(b"OggS")) :]
    if len(page) < 27 or not page[5] & 4 or len(page) < 27 + page[26]:
        return False
    return len(page) >= 27 + page[26] + sum(page[27 : 27 + page[26]])


@dataclass
class AudioTable:
    """One open file; reading seeks only where it does not continue from its last position."""

    path: Path
    handle: Handle[Any]
    columns: tuple[str, ...]
    frames: int
    rate: float | None
    warm_up: bool

    def __len__(self) -> int:
        return self.frames

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        start, stop = rows_between(start, stop, self.frames)
        if start == stop:
            return np.empty((0, len(columns)), np.float32)
        samples = self._samples(start, stop)
        if len(samples) != stop - start:
            raise DataError(
                f"{self.path}: ends at sample {start + len(samples)}, its header promises"
                f" {self.frames}; the file is cut short"
            )
        return samples[:, [self.columns.index(c) for c in columns]]

    def _samples(self, start: int, stop: int) -> Array:
        import soundfile

        file, begin = self.handle.get(), start
        try:
            if file.tell() != start:
                begin = max(0, start - WARM_UP) if self.warm_up else start
                file.seek(begin)
            return file.read(stop - begin, dtype="float32", always_2d=True)[start - begin :]
        except soundfile.LibsndfileError as error:
            raise DataError(
                f"{self.path}: samples {start} to {stop} cannot be read ({error}); is the file cut"
                " short?"
            ) from error
