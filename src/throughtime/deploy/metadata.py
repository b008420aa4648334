"""What an exported file says of itself: its inputs, outputs and state, and a vector to check it by.

The description is JSON. Its digest covers the rest of the file and the description itself, so that
a file that was edited or cut short is refused. The conformance vector is the outputs and the state
after some steps of generated inputs: a runtime that computes something else is found when it loads
the file.

An ONNX file is a message of Protocol Buffers, whose last field is the description.

This module and `session` import no torch.

References: Protocol Buffers, Encoding.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from throughtime.errors import ModelError, counted

KEY, FORMAT = "throughtime", "throughtime.export/1"
STEPS = 64  # of the conformance vector, at most
TOLERANCE = 1e-4  # of it, relative to values above 1
GENERATOR = (
    "s = 1; for each step, for each column: s = (1664525*s + 1013904223) mod 2**32;"
    " v = (s >> 8) / 2**23 - 1; x = shift + scale*v, or (s >> 8) mod width for indices"
)
_VARINT, _LENGTH, _FLOAT = 0, 2, 5  # wire types
_METADATA = 14  # ModelProto.metadata_props
_DIGITS = 6  # of a varint below 2**35
Array: TypeAlias = np.ndarray[Any, Any]


def generated(steps: int, width: int, *, indexed: bool) -> Array:
    """Values of the generator, `(steps, width)` from -1 to below 1, or indices below `width`.

    Example:
        >>> generated(1, 2, indexed=False).round(3).tolist()
        [[-0.527, -0.261]]
    """
    numbers, state = np.empty(steps * (1 if indexed else width), dtype=np.int64), 1
    for k in range(len(numbers)):
        state = (1664525 * state + 1013904223) % 2**32
        numbers[k] = state >> 8
    return numbers % width if indexed else (numbers / 2**23 - 1).reshape(steps, width)


def vector_inputs(description: Mapping[str, Any], steps: int) -> Array:
    """The inputs of the conformance vector, `(steps, 1, ...)` or `(steps, 1)` indices."""
    inputs = description["inputs"]
    values = generated(steps, inputs["width"], indexed=inputs["indexed"])
    if inputs["indexed"]:
        return values[:, None]
    shift, scale = (np.array(inputs[name]) for name in ("shift", "scale"))
    return (shift + scale * values).reshape(steps, 1, *inputs["shape"]).astype(inputs["dtype"])


def check_vector(
    description: Mapping[str, Any], outputs: Array, state: Mapping[str, Array], source: str
) -> None:
    """Compare the last outputs `(C,)` and the state's leaves with the conformance vector.

    Raises:
        ModelError: they differ; the message has the largest difference.
    """
    vector = description["conformance"]
    pairs = [("outputs", outputs, vector["outputs"])]
    pairs += [(f"state '{name}'", state[name], values) for name, values in vector["state"].items()]
    for name, got, expected in pairs:
        reference = np.array(expected, dtype=np.float64).ravel()
        error = np.abs(np.asarray(got).ravel() - reference) / np.maximum(1, np.abs(reference))
        if not (error <= TOLERANCE).all():
            raise ModelError(
                f"{source}: this runtime computes other {name} than the net that was exported, by"
                f" {float(np.nanmax(error)):.2g} after {counted(vector['steps'], 'step')}; expected"
                f" at most {TOLERANCE:g}. Try another version of the runtime, or export again"
            )


def seal(description: Mapping[str, Any], body: bytes) -> dict[str, Any]:
    """The description with the digest of it and of the rest of the file."""
    return {**description, "sha256": _digest(description, body)}


def check_seal(description: Mapping[str, Any], body: bytes, source: str) -> None:
    """Check the version and the digest of a file.

    Raises:
        ModelError: another version, or a file that was changed after it was written.
    """
    if description.get("format") != FORMAT:
        raise ModelError(
            f"{source}: its format is {description.get('format')!r}, this version reads {FORMAT!r};"
            " export it again with this version"
        )
    unsealed = {key: value for key, value in description.items() if key != "sha256"}
    if description.get("sha256") != _digest(unsealed, body):
        raise ModelError(
            f"{source}: it was changed after throughtime wrote it (its SHA-256 differs); copy it"
            " again, or export it again"
        )


def initial_state(description: Mapping[str, Any], lanes: int) -> dict[str, Array]:
    """The leaves of the state before the first step, for so many lanes; new arrays."""
    return {
        leaf["name"]: np.array(
            np.broadcast_to(
                np.array(leaf["start"], dtype=leaf["dtype"]),
                [lanes if size == "B" else size for size in leaf["shape"]],
            ),
            order="C",
        )
        for leaf in description["state"]
    }


def plain_numbers(values: Array) -> Any:
    """Values as JSON has them; one number where all are the same."""
    array = np.asarray(values)
    return array.flat[0].item() if (array == array.flat[0]).all() else array.tolist()


def _digest(description: Mapping[str, Any], body: bytes) -> str:
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(body + text.encode()).hexdigest()


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
