"""The wire format of Protocol Buffers, as far as ONNX files need it.

References: Protocol Buffers, Encoding.
"""

from collections.abc import Iterator
from operator import itemgetter

import numpy as np

_VARINT, _LENGTH, _FLOAT = 0, 2, 5  # wire types
_METADATA = 14  # ModelProto.metadata_props


def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64 bits.

    Example:
        >>> varint(300).hex()
        'ac02'
    """
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def field(number: int, value: float | str | bytes) -> bytes:
    """A field of a message: its number with the wire type, then its value."""
    if isinstance(value, int):
        return varint(number << 3 | _VARINT) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | _FLOAT) + np.float32(value).tobytes()
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | _LENGTH) + varint(len(content)) + content


def metadata_entry(key: str, text: str) -> bytes:
    """A property of a model, as the file has it."""
    return field(_METADATA, field(1, key) + field(2, text))


def split_metadata(content: bytes, key: str) -> tuple[bytes, str]:
    """What stands before the last field of a model, and the text of this field, a property.

    Raises:
        ValueError: the file is no message, or its last field is another one.
    """
    number, start, value = max(_fields(content), key=itemgetter(1))
    entry = {n: content[value:][v:] for n, _, v in _fields(content[value:])}
    text = entry.get(2, b"").decode()
    if number != _METADATA or content[start:] != metadata_entry(key, text):
        raise ValueError(f"its last field is no property '{key}'")
    return content[:start], text


def _fields(message: bytes) -> Iterator[tuple[int, int, int]]:
    """The number of each field of a message, where it starts and where its value starts."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        if tag & 7 == _VARINT:
            value, (_, at) = at, _read_varint(message, at)
        elif tag & 7 == _FLOAT:
            value, at = at, at + 4
        elif tag & 7 == _LENGTH:
            size, value = _read_varint(message, at)
            at = value + size
        else:
            raise ValueError(f"wire type {tag & 7} at byte {start}")
        if at > len(message):
            raise ValueError(f"{at - len(message)} bytes are missing at the end")
        yield tag >> 3, start, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next byte is."""
    number = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    raise ValueError("a number is cut short")
