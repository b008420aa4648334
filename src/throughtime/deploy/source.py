"""Source code of chains: C99, and an ES module of JavaScript.

C: one source and its header, without heap and without libm. Weights are constants, written in
hexadecimal, so no digit is lost; the state is a struct of the caller's. With `-ffp-contract=off`
every optimisation level gives the same bits, since each sum has one order and each function is
computed from additions, products and quotients alone: e^x by its series after a reduction by powers
of 2, tanh and the logistic function from it, ln by the series of artanh.

JavaScript: weights and state are float32, sums are double.

The templates of both get the same operations, each with the names of its inputs, outputs and
constants. Matrices are stored column by column, so that a product adds columns to the biases.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from throughtime.deploy import metadata
from throughtime.deploy.chain import (
    Array,
    Chain,
    Operation,
    Pointwise,
    Recurrence,
    Standardisation,
    columns,
)
from throughtime.kernels.cells import GRU

_KEYWORDS = frozenset(
    [
        *("auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else"),
        *("enum", "extern", "float", "for", "goto", "if", "inline", "int", "long", "main"),
        *("register", "restrict", "return", "short", "signed", "sizeof", "static", "struct"),
        *("switch", "typedef", "union", "unsigned", "void", "volatile", "while"),
    ]
)
# Of functions of each value v, {} being their parameter
_C_EXPRESSIONS = {
    "tanh": "tangent(v)",
    "relu": "v < 0.f ? 0.f : v",
    "sigmoid": "sigmoid(v)",
    "silu": "v * sigmoid(v)",
    "leaky_relu": "v < 0.f ? v * (float){} : v",
    "elu": "v < 0.f ? (float){} * decay_less_1(v) : v",
}
_JS_EXPRESSIONS = {
    "tanh": "Math.tanh(v)",
    "relu": "Math.max(0, v)",
    "sigmoid": "sigmoid(v)",
    "silu": "v * sigmoid(v)",
    "leaky_relu": "v < 0 ? v * {} : v",
    "elu": "v < 0 ? {} * Math.expm1(v) : v",
}
_LINE = 8  # numbers


def write_c(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The source and the header, by suffix; `name` is that of the file."""
    values = _template_values(chain, description, name, _C_EXPRESSIONS)
    values |= {
        "header": f"{name}.h",
        "kind": "int32_t" if chain.is_indexed else "float",
        "arrays": [
            {"name": key, "size": array.size, "text": _numbers(array)}
            for key, array in values["arrays"].items()
        ],
    }
    return {suffix: render(f"net{suffix}.j2", values) for suffix in (".c", ".h")}


def write_javascript(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The module, by suffix; `name` is that of the file."""
    values = _template_values(chain, description, name, _JS_EXPRESSIONS)
    values["arrays"] = [
        {"name": key, "text": base64.b64encode(array.astype("<f4").tobytes()).decode()}
        for key, array in values["arrays"].items()
    ]
    return {".js": render("net.js.j2", values)}


def _template_values(
    chain: Chain, description: Mapping[str, Any], name: str, expressions: Mapping[str, str]
) -> dict[str, Any]:
    """The values of a template.

    Args:
        chain: of the net.
        description: of the file.
        name: of the file, without its suffix.
        expressions: of functions of each value `v`, `{}` being their parameter.
    """
    own = identifier(name)
    fields = _fields(chain)
    arrays = dict(_arrays(chain, description, fields))
    return {
        "name": own,
        "NAME": own.upper(),
        "summary": summary(chain),
        "json": _comment(description, b"".join(array.tobytes() for array in arrays.values())),
        "indexed": chain.is_indexed,
        "width": chain.width,
        "outputs": chain.outputs,
        "outputs_are": _meaning(description),
        "leaves": [
            {
                "field": fields[leaf.name],
                "size": len(leaf.start),
                "start": f"start_{fields[leaf.name]}" if leaf.start.any() else "",
            }
            for leaf in chain.leaves
        ],
        "arrays": arrays,
        "operations": [*_operations(chain, fields, expressions)],
        "last": f"v{len(chain.operations) - 1}",
        "steps": description["conformance"]["steps"],
        "tolerance": metadata.TOLERANCE,
    }


def render(template: str, values: Mapping[str, Any]) -> bytes:
    """The file that a template gives."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # no HTML; names of the user's are escaped in _comment
    )
    return environment.get_template(template).render(values).encode()


def _numbers(array: Array) -> str:
    """Hexadecimal constants, some of them a line."""
    texts = [f"{float(value).hex()}f" for value in array.ravel()]
    rows = (texts[at : at + _LINE] for at in range(0, len(texts), _LINE))
    return ",\n".join("  " + ", ".join(row) for row in rows)


def identifier(text: str) -> str:
    """A name that C and JavaScript allow.

    Example:
        >>> identifier("my-net.2"), identifier("2nd"), identifier("float")
        ('my_net_2', 'net_2nd', 'net_float')
    """
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    return f"net_{name}" if not name or name[0].isdigit() or name in _KEYWORDS else name


def summary(chain: Chain) -> str:
    """The layers in a line: `3 -> lstm 50 -> 2`."""
    layers = " -> ".join(f"{layer.cell} {layer.hidden}" for layer in chain.layers)
    return f"{chain.width} -> {layers} -> {chain.outputs}"


def _comment(description: Mapping[str, Any], weights: bytes) -> str:
    """The description as JSON that ends no comment and no script of a page."""
    text = json.dumps(metadata.seal(description, weights), separators=(",", ":"))
    return text.replace("*/", "\\u002a/").replace("/*", "/\\u002a").replace("</", "<\\/")


def _meaning(description: Mapping[str, Any]) -> str:
    """The meaning of the outputs, for a comment."""
    outputs = description["outputs"]
    classes = [re.sub(r"[^\w .-]", "_", name) for name in outputs["classes"]]
    return outputs["meaning"] + (f" of {', '.join(classes)}" if classes else "")


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
) -> Iterator[tuple[str, Array]]:
    """The constants by name. Matrices are transposed, so that a product adds columns."""
    for index, operation in enumerate(chain.operations):
        for key, array in _constants(operation):
            yield f"op{index}_{key}", array
    for leaf in chain.leaves:
        if leaf.start.any():
            yield f"start_{fields[leaf.name]}", leaf.start
    vector, inputs = description["conformance"], description["inputs"]
    real = chain.layers[0].ih.dtype
    if not chain.is_indexed:
        yield from ((f"check_{key}", np.array(inputs[key], real)) for key in ("shift", "scale"))
    yield "check_outputs", np.array(vector["outputs"], real)
    for leaf, values in vector["state"].items():
        yield f"check_{fields[leaf]}", np.array(values, real)


def _constants(operation: Operation) -> Iterator[tuple[str, Array]]:
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


def _operations(
    chain: Chain, fields: Mapping[str, str], expressions: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """The operations with the names of their inputs `x`, outputs and constants."""
    x, width = "x", chain.width
    for index, operation in enumerate(chain.operations):
        rows, out = columns(operation, width), f"v{index}"
        own = {"id": f"op{index}", "x": x, "out": out, "columns": width, "rows": rows}
        own |= {"kind": type(operation).__name__, "of": operation}
        if isinstance(operation, Recurrence):
            leaves = [fields[leaf.name] for leaf in operation.leaves]
            own |= {"gates": len(operation.cell.gates), "h": leaves[0], "c": leaves[-1]}
        elif isinstance(operation, Standardisation):
            names = (fields[leaf.name] for leaf in operation.leaves)
            own |= dict(zip(("count", "first", "sum", "squares"), names, strict=True))
        elif isinstance(operation, Pointwise):
            text = expressions.get(operation.function, "")
            own["expression"] = text.replace("{}", repr(operation.parameter))
        yield own
        x, width = out, rows
