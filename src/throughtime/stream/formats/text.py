"""Plain text as tokens to predict: the target of each symbol is the one that follows.

Shapes: `n` symbols read.
"""

import codecs
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.table import (
    Array,
    FileStamp,
    Handle,
    MappedFile,
    block_slices,
    other_encoding,
    rows_between,
)
from throughtime.stream.labels import IGNORE_INDEX
from throughtime.stream.recording import StepArrays

BLOCK = 64 * 1024  # bytes between two known positions in a text of characters


def text(path: str | Path, unit: Literal["bytes", "characters"] = "bytes") -> "Text":
    """A recording of a text file: inputs and targets are indices of symbols, `(n,)` int64.

    The target of the last symbol is missing.

    Args:
        path: a file, in UTF-8 if the unit is characters.
        unit: `"bytes"`, 256 symbols whatever the file holds; or `"characters"`, the distinct ones
            of the file in order of their code points (`symbols`), so that another file may number
            them otherwise. Nothing is translated: the end of a line may be two characters, and a
            byte order mark is one.

    Raises:
        DataError: no such file, an empty one, an unknown unit, or bytes that are not UTF-8
            (characters only).

    Cost: bytes are memory-mapped. Characters cost one pass when opened and 16 bytes for each 64 kB.

    Example:
        >>> import tempfile, pathlib
        >>> import throughtime as tt
        >>> from throughtime.stream import text
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "abra.txt"
        >>> _ = path.write_text("abracadabra")
        >>> recording = text(path, unit="characters")
        >>> steps = recording.read(0, 4)
        >>> recording.symbols, steps.inputs.tolist(), steps.targets.tolist()
        ('abcdr', [0, 1, 4, 0], [1, 4, 0, 2])
    """
    path = Path(path)
    if unit not in ("bytes", "characters"):
        raise DataError(f"unit={unit!r}: expected 'bytes' or 'characters'")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    stamp = FileStamp.of(path)
    if stamp.size == 0:
        raise DataError(f"{path}: the file is empty, expected text")
    handle = Handle(path, _mapped)
    return Text(stamp, Bytes(handle, stamp.size) if unit == "bytes" else _characters(handle))


@dataclass(frozen=True)
class Text:
    """The recording: each symbol, and the one to come."""

    stamp: FileStamp
    source: "Bytes | Characters" = field(repr=False)

    @property
    def name(self) -> str:
        return self.stamp.path.name

    @property
    def symbols(self) -> str | bytes:
        """What the numbers stand for: symbol `i` is `symbols[i]`."""
        return self.source.symbols

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, stop: int) -> StepArrays:
        self.stamp.check()
        start, stop = rows_between(start, stop, len(self))
        tokens = np.full(stop - start + 1, IGNORE_INDEX, dtype=np.int64)
        values = self.source.read(start, min(stop + 1, len(self)))
        tokens[: len(values)] = values
        return StepArrays(tokens[:-1], tokens[1:].copy())


@dataclass(frozen=True)
class Bytes:
    """A text of bytes, memory-mapped."""

    handle: Handle[MappedFile]
    length: int

    @property
    def symbols(self) -> bytes:
        return bytes(range(256))

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, stop: int) -> Array:
        file = self.handle.get()
        values = np.frombuffer(file.mapping[start:stop], np.uint8)
        file.count_read(len(values))
        return values


@dataclass(frozen=True)
class Characters:
    """A text of characters, indexed every 64 kB: `starts[i]` characters precede byte `offsets[i]`.

    A block of ASCII is not decoded.
    """

    content: Bytes
    symbols: str
    starts: "array[int]"
    offsets: "array[int]"

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> Array:
        parts = [self._codes(*part) for part in block_slices(self.starts, start, stop)]
        codes = np.concatenate(parts) if parts else np.empty(0, np.uint32)
        return np.searchsorted(_codes(self.symbols), codes)

    def _codes(self, block: int, start: int, stop: int) -> Array:
        """The code points of the characters `start` to before `stop` of a block."""
        offset, end = self.offsets[block : block + 2]
        if end - offset == self.starts[block + 1] - self.starts[block]:
            return self.content.read(offset + start, offset + stop).astype(np.uint32)
        return _codes(self.content.read(offset, end).tobytes().decode())[start:stop]


def _codes(characters: str) -> Array:
    return np.frombuffer(characters.encode("utf-32-le"), np.uint32)


def _mapped(path: Path) -> MappedFile:
    try:
        return MappedFile(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def _characters(handle: Handle[MappedFile]) -> Characters:
    size = len(handle.get().mapping)
    content = Bytes(handle, size)
    decoder = codecs.getincrementaldecoder("utf-8")()
    starts, offsets, distinct = array("q", [0]), array("q", [0]), set[str]()
    for begin in range(0, size, BLOCK):
        end = min(begin + BLOCK, size)
        try:
            decoded = decoder.decode(content.read(begin, end).tobytes(), final=end == size)
        except UnicodeDecodeError as error:
            reason = other_encoding(error, handle.path) or error.reason
            raise DataError(
                f"{handle.path}: is not UTF-8 between the bytes {begin} and {end} ({reason}),"
                " expected text; or take unit='bytes'"
            ) from error
        distinct.update(decoded)
        starts.append(starts[-1] + len(decoded))
        offsets.append(end - len(decoder.getstate()[0]))
    return Characters(content, "".join(sorted(distinct)), starts, offsets)
