"""The wire format of Protocol Buffers, as far as ONNX files need it.

References: Protocol Buffers, Encoding.
"""

import numpy as np

_VARINT, _LENGTH, _FLOAT = 0, 2, 5  # wire types
_METADATA = 14  # ModelProto.metadata_props
_DIGITS = 6  # of a varint below 2**35


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
        ValueError: the last field is another one, or cut short.
    """
    before_text = field(1, key) + varint(2 << 3 | _LENGTH)
    at = content.rfind(before_text)
    body = content[
        : max(0, at - len(varint(_METADATA << 3 | _LENGTH)) - len(varint(len(content) - at)))
    ]
    for digits in range(1, _DIGITS):  # of the length of the text
        text = content[at + len(before_text) + digits :].decode(errors="replace")
        if at >= 0 and body + metadata_entry(key, text) == content:
            return body, text
    raise ValueError(f"its last field is no property '{key}'")
