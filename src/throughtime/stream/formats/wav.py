"""WAV through soundfile: the header when opened, then seek and read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throughtime.errors import DataError, MissingExtraError
from throughtime.stream.formats.table import Array


def open_wav(path: Path) -> "WavTable":
    """Channels are the columns `0`, `1`, ...; samples are float32 in [-1, 1).

    Raises:
        MissingExtraError: soundfile is not installed.
        DataError: the file is no audio, or its header promises more samples than it holds.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise MissingExtraError(f"{path}: WAV needs soundfile; pip install 'throughtime[audio]'") from error
    _refuse_cut_short(path)
    try:
        file = soundfile.SoundFile(path)
    except (OSError, soundfile.LibsndfileError) as error:
        raise DataError(f"{path}: not a readable WAV file ({error}); is it cut short?") from error
    return WavTable(path, file, tuple(map(str, range(file.channels))), file.frames)


def _refuse_cut_short(path: Path) -> None:
    """Libsndfile plays what is left of a file cut short; its RIFF header tells how long it was."""
    with path.open("rb") as file:
        header = file.read(8)
    promised = 8 + int.from_bytes(header[4:8], "little")
    streamed = 8 + 0xFFFFFFFF  # written by programs that could not seek back
    if header[:4] == b"RIFF" and path.stat().st_size < promised != streamed:
        raise DataError(f"{path}: holds {path.stat().st_size} bytes, its header promises {promised}; the file is cut short")


@dataclass
class WavTable:
    """One open file; reading seeks only where a lane does not go on from its last position."""

    path: Path
    file: Any
    columns: tuple[str, ...]
    frames: int

    def __len__(self) -> int:
        return self.frames

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        stop = min(stop, self.frames)
        if self.file.tell() != start:
            self.file.seek(start)
        samples = self.file.read(stop - start, dtype="float32", always_2d=True)
        if len(samples) != stop - start:
            raise DataError(f"{self.path}: ends at sample {start + len(samples)}, its header promises {self.frames}; the file is cut short")
        return samples[:, [self.columns.index(c) for c in columns]]
