"""The size that a classic netCDF file must have: netCDF-C reads zeros from one that is cut short.

The header is that of the netCDF Classic Format Specification (versions 1, 2 and 5): counts, then
lists of dimensions, attributes and variables, big-endian, all padded to four bytes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import BinaryIO

_SIZES = (0, 1, 1, 2, 4, 4, 8, 1, 2, 4, 8, 8)  # bytes of the types byte (1), char, short, int, ...


def expected_size(file: BinaryIO) -> int:
    """The size of the file by its header, read from just after the three letters `CDF`.

    Raises:
        ValueError: the header is cut short or is not that of a netCDF file.
    """
    header = _Header(file)
    records = header.number()
    streamed = records == 2 ** (8 * header.count) - 1  # the writer could not go back to count them
    dimensions = [header.number() for _ in header.entries()]
    header.attributes()
    ends, recorded = [0], list[tuple[int, int]]()
    for _ in header.entries():
        shape = [header.choice(dimensions) for _ in range(header.number())]
        header.attributes()
        size = header.choice(_SIZES, 4)
        header.number()
        begin = header.number(header.offset)
        if shape[:1] == [0]:  # the record dimension
            recorded.append((begin, math.prod(shape[1:]) * size))
        else:
            ends.append(begin + math.prod(shape) * size)
    pad = _padded if len(recorded) > 1 else int
    step = sum(pad(size) for _, size in recorded)
    if records and not streamed:
        ends += [begin + (records - 1) * step + size for begin, size in recorded]
    return max(ends)


def _padded(size: int) -> int:
    return -(-size // 4) * 4


class _Header:
    """Numbers and lists in the order of the file; `count` and `offset` are bytes of theirs."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        version = self.number(1)
        if version not in (1, 2, 5):
            raise ValueError(f"version {version} of the classic format is unknown")
        self.count, self.offset = (8 if version == 5 else 4), (4 if version == 1 else 8)

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ValueError("its header ends early")
        return data

    def number(self, size: int = 0) -> int:
        return int.from_bytes(self._take(size or self.count), "big")

    def choice(self, values: Sequence[int], size: int = 0) -> int:
        """The value at the index that is next in the file."""
        index = self.number(size)
        if index >= len(values):
            raise ValueError(f"number {index} of {len(values)}")
        return values[index]

    def entries(self) -> Iterator[None]:
        """The entries of the list that begins here, each from after its name."""
        self._take(4)
        for _ in range(self.number()):
            self._take(_padded(self.number()))
            yield

    def attributes(self) -> None:
        for _ in self.entries():
            self._take(_padded(self.choice(_SIZES, 4) * self.number()))
