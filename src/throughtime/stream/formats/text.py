"""Plain text as tokens to predict: the target of each symbol is the one that follows.

Shapes: `n` symbols read.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from throughtime.errors import DataError
from throughtime.stream.formats.csv import encoding_hint
from throughtime.stream.formats.table import (
    Array,
    FileStamp,
    Handle,
    MappedFile,
    rows_between,
    unreadable,
)
from throughtime.stream.recording import StepArrays
from throughtime.stream.targets import IGNORE_INDEX


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

    Cost: bytes are memory-mapped. Characters are read at once and held in memory, a byte for each
    where there are at most 256 different ones, otherwise two or four.

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
    handle, what = Handle(path, MappedFile), f"{path}: cannot be read"
    with unreadable(what, "may you read it?", (OSError,)):
        content = bytes(handle.get().mapping) if unit == "characters" else b""
    if unit == "bytes":
        return Text(stamp, bytes(range(256)), handle)
    try:
        characters = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {encoding_hint(error, path)}; or take unit='bytes'") from error
    points = np.frombuffer(characters.encode("utf-32-le"), np.uint32)
    distinct, codes = np.unique(points, return_inverse=True)
    kind = np.min_scalar_type(len(distinct) - 1)
    return Text(stamp, "".join(map(chr, distinct.tolist())), codes.astype(kind))


@dataclass(frozen=True)
class Text:
    """The recording: each symbol, and the one to come.

    Attributes:
        stamp: of the file.
        symbols: what the numbers stand for: symbol `i` is `symbols[i]`.
        source: the numbers, or the file whose bytes they are.
    """

    stamp: FileStamp
    symbols: str | bytes = field(repr=False)
    source: Array | Handle[MappedFile] = field(repr=False)

    @property
    def name(self) -> str:
        return self.stamp.path.name

    def __len__(self) -> int:
        return self.stamp.size if isinstance(self.source, Handle) else len(self.source)

    def read(self, start: int, stop: int) -> StepArrays:
        self.stamp.check()
        start, stop = rows_between(start, stop, len(self))
        tokens = np.full(stop - start + 1, IGNORE_INDEX, dtype=np.int64)
        end = min(stop + 1, len(self))
        if isinstance(self.source, Handle):
            file = self.source.get()
            tokens[: end - start] = np.frombuffer(file.mapping[start:end], np.uint8)
            file.count_read(end - start)
        else:
            tokens[: end - start] = self.source[start:end]
        return StepArrays(tokens[:-1], tokens[1:].copy())
