"""The size that a classic netCDF file must have: netCDF-C reads zeros from one that is cut short.

The header is that of the netCDF Classic Format Specification (versions 1, 2 and 5): counts, then
lists of dimensions, attributes and variables, big-endian, all padded to four bytes.
"""

import math
from typing import BinaryIO

_SIZES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 4,
    6: 8,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 8,
}  # bytes of the types byte, char, short, int, ...


def expected_size(file: BinaryIO) -> int:
    """The size of the file by its header, read from just after the three letters `CDF`.

    Raises:
        ValueError: the header is cut short or is not that of a netCDF file.
    """
    header = _Header(file)
    records = header.number()
    streamed = records == 2 ** (8 * header.count) - 1  # the writer could not go back to count them
    dimensions = header.dimensions()
    header.attributes()
    ends, recorded = [0], list[tuple[int, int]]()
    for _ in range(header.entries()):
        shape, itemsize, begin = header.variable(dimensions)
        if shape[:1] == [0]:
            recorded.append((begin, math.prod(shape[1:]) * itemsize))
        else:
            ends.append(begin + math.prod(shape) * itemsize)
    step = (
        sum(_padded(size) for _, size in recorded)
        if len(recorded) > 1
        else sum(size for _, size in recorded)
    )
    if records and not streamed:
        ends += [begin + (records - 1) * step + size for begin, size in recorded]
    return max(ends)


def _padded(size: int) -> int:
    return -(-size // 4) * 4


class _Header:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        version = self._take(1)[0]
        if version not in (1, 2, 5):
            raise ValueError(f"version {version} of the classic format is unknown")
        self.count, self._offset = (8 if version == 5 else 4), (4 if version == 1 else 8)

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise ValueError("its header ends early")
        return data

    def _integer(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def number(self) -> int:
        return self._integer(self.count)

    def entries(self) -> int:
        """The number of entries of the list that begins here."""
        self._take(4)
        return self.number()

    def _name(self) -> None:
        self._take(_padded(self.number()))

    def dimensions(self) -> list[int]:
        lengths: list[int] = []
        for _ in range(self.entries()):
            self._name()
            lengths.append(self.number())
        return lengths

    def attributes(self) -> None:
        for _ in range(self.entries()):
            self._name()
            size = self._size()
            self._take(_padded(size * self.number()))

    def variable(self, dimensions: list[int]) -> tuple[list[int], int, int]:
        """Its shape (0 for the record dimension), the bytes of a value, and where it begins."""
        self._name()
        shape = [self._dimension(dimensions) for _ in range(self.number())]
        self.attributes()
        itemsize = self._size()
        self.number()
        return shape, itemsize, self._integer(self._offset)

    def _dimension(self, dimensions: list[int]) -> int:
        index = self.number()
        if index >= len(dimensions):
            raise ValueError(f"dimension {index} of {len(dimensions)}")
        return dimensions[index]

    def _size(self) -> int:
        kind = self._integer(4)
        if kind not in _SIZES:
            raise ValueError(f"type {kind} is unknown")
        return _SIZES[kind]
