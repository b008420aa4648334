"""Templates of chains: C99, an ES module of JavaScript, and the text of an ONNX graph.

C: one source and its header, without heap and without libm. Weights are constants, written in
hexadecimal, so no digit is lost; the state is a struct of the caller's. With `-ffp-contract=off`
every optimisation level gives the same bits, since each sum has one order and each function is
computed from additions, products and quotients alone: e^x by its series after a reduction by powers
of 2, tanh and the logistic function from it, ln by the series of artanh.

JavaScript: weights and state are float32, sums are double.

All templates get the same operations, each with the names of its inputs, outputs and constants.
Matrices are stored column by column, so that a product adds columns to the biases.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from throughtime.deploy.chain import (
    Array,
    Chain,
    Operation,
    Pointwise,
    Recurrence,
    Standardisation,
    columns,
)
from throughtime.deploy.session import TOLERANCE
from throughtime.kernels.cells import GRU

_KEYWORDS = frozenset(
    [
        "auto",
        "break",
        "case",
        "char",
        "const",
        "continue",
        "default",
        "do",
        "double",
        "else",
        "enum",
        "extern",
        "float",
        "for",
        "goto",
        "if",
        "inline",
        "int",
        "long",
        "main",
        "register",
        "restrict",
        "return",
        "short",
        "signed",
        "sizeof",
        "static",
        "struct",
        "switch",
        "typedef",
        "union",
        "unsigned",
        "void",
        "volatile",
        "while",
    ]
)
# Of functions of each value v, {p} being their parameter
_C_EXPRESSIONS = {
    "tanh": "tangent(v)",
    "relu": "v < 0.f ? 0.f : v",
    "sigmoid": "sigmoid(v)",
    "silu": "v * sigmoid(v)",
    "leaky_relu": "v < 0.f ? v * (float){p} : v",
    "elu": "v < 0.f ? (float){p} * decay_less_1(v) : v",
}
_JS_EXPRESSIONS = {
    "tanh": "Math.tanh(v)",
    "relu": "Math.max(0, v)",
    "sigmoid": "sigmoid(v)",
    "silu": "v * sigmoid(v)",
    "leaky_relu": "v < 0 ? v * {p} : v",
    "elu": "v < 0 ? {p} * Math.expm1(v) : v",
}
_LINE = 8  # numbers


def write_c(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The source and the header, by suffix; `name` is that of the file."""
    values = _values(chain, description, name, _C_EXPRESSIONS)
    values |= {"header": f"{name}.h", "kind": "int32_t" if chain.is_indexed else "float"}
    for array in values["arrays"]:
        array["text"] = _numbers(array["values"])
    return {suffix: render(f"net{suffix}.j2", values).encode() for suffix in (".c", ".h")}


def write_javascript(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The module, by suffix; `name` is that of the file."""
    values = _values(chain, description, name, _JS_EXPRESSIONS)
    for array in values["arrays"]:
        array["text"] = base64.b64encode(array["values"].astype("<f4").tobytes()).decode()
    return {".js": render("net.js.j2", values).encode()}


def render(template: str, values: Mapping[str, Any]) -> str:
    """The text that a template gives."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # no HTML; names of the user's are escaped in _values
    )
    return environment.get_template(template).render(values)


def identifier(text: str) -> str:
    """A name that C, JavaScript and ONNX allow.

    Example:
        >>> identifier("my-net.2"), identifier("2nd"), identifier("float")
        ('my_net_2', 'net_2nd', 'net_float')
    """
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    return f"net_{name}" if not name or name[0].isdigit() or name in _KEYWORDS else name


def operations(
    chain: Chain, fields: Mapping[str, str], expressions: Mapping[str, str], x: str = "x"
) -> Iterator[dict[str, Any]]:
    """The operations with the names of their inputs `x`, outputs and constants.

    Args:
        chain: of the net.
        fields: names of the state's leaves.
        expressions: of functions of each value.
        x: name of the inputs.
    """
    width = chain.width
    for index, operation in enumerate(chain.operations):
        rows, out = columns(operation, width), f"v{index}"
        own = {"id": f"op{index}", "x": x, "out": out, "columns": width, "rows": rows}
        own |= {"kind": type(operation).__name__, "of": operation}
        if isinstance(operation, (Recurrence, Standardisation)):
            leaves = [fields[leaf.name] for leaf in operation.leaves]
            names = ("count", "first", "sum", "squares") if len(leaves) > 2 else ("h", "c")
            own |= dict(zip(names, leaves, strict=False))
        elif isinstance(operation, Pointwise):
            text = expressions.get(operation.function, "")
            own["expression"] = text.format(x=x, p=repr(operation.parameter))
        yield own
        x, width = out, rows


def constants(operation: Operation) -> Iterator[tuple[str, Array]]:
    """The arrays of an operation by name. Matrices are transposed: a product adds columns."""
    arrays = operation._asdict()
    if isinstance(operation, Recurrence):
        b_ih, b_hh = arrays.pop("b_ih"), arrays.pop("b_hh").copy()
        if operation.cell is GRU:  # the reset gate scales the bias of the candidate as well
            arrays["candidate"] = b_hh[2 * operation.hidden :].copy()
            b_hh[2 * operation.hidden :] = 0
        arrays["bias"] = b_ih + b_hh
    for name, value in arrays.items():
        if isinstance(value, np.ndarray):
            yield name, value if name == "table" else value.T


def _values(
    chain: Chain, description: Mapping[str, Any], name: str, expressions: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a template of C or JavaScript."""
    layers = " -> ".join(f"{layer.cell} {layer.hidden}" for layer in chain.layers)
    text = json.dumps(description, separators=(",", ":"))
    outputs = description["outputs"]
    classes = ", ".join(re.sub(r"[^\w .-]", "_", label) for label in outputs["classes"])
    fields = _fields(chain)
    return {
        "name": identifier(name),
        "NAME": identifier(name).upper(),
        "summary": f"{chain.width} -> {layers} -> {chain.outputs}",
        # JSON that ends no comment and no script of a page
        "json": text.replace("*/", "\\u002a/").replace("/*", "/\\u002a").replace("</", "<\\/"),
        "indexed": chain.is_indexed,
        "width": chain.width,
        "outputs": chain.outputs,
        "outputs_are": outputs["meaning"] + (f" of {classes}" if classes else ""),
        "leaves": [{"field": fields[leaf.name], "size": len(leaf.start)} for leaf in chain.leaves],
        "arrays": [
            {"name": key, "size": np.size(array), "values": np.asarray(array, np.float32)}
            for key, array in _arrays(chain, description, fields)
        ],
        "operations": [*operations(chain, fields, expressions)],
        "last": f"v{len(chain.operations) - 1}",
        "steps": description["conformance"]["steps"],
        "tolerance": TOLERANCE,
    }


def _numbers(array: Array) -> str:
    """Hexadecimal constants, some of them a line."""
    texts = [f"{float(value).hex()}f" for value in array.ravel()]
    rows = (texts[at : at + _LINE] for at in range(0, len(texts), _LINE))
    return ",\n".join("  " + ", ".join(row) for row in rows)


def _fields(chain: Chain) -> dict[str, str]:
    """A field of the state for each leaf, no two alike."""
    fields: dict[str, str] = {}
    for leaf in chain.leaves:
        field = identifier(leaf.name)
        while field in fields.values():
            field += "_"
        fields[leaf.name] = field
    return fields


def _arrays(
    chain: Chain, description: Mapping[str, Any], fields: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """The constants by name."""
    for index, operation in enumerate(chain.operations):
        yield from ((f"op{index}_{key}", array) for key, array in constants(operation))
    for leaf in chain.leaves:
        yield f"start_{fields[leaf.name]}", leaf.start
    vector, inputs = description["conformance"], description["inputs"]
    if not chain.is_indexed:
        yield from ((f"check_{key}", inputs[key]) for key in ("shift", "scale"))
    yield "check_outputs", vector["outputs"]
    yield from ((f"check_{fields[leaf]}", values) for leaf, values in vector["state"].items())
