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
import textwrap
from collections.abc import Callable, Iterator, Mapping
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


def write_c(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The source and the header, by suffix; `name` is that of the file."""
    values = _values(chain, description, name, _C_EXPRESSIONS, _hexadecimal)
    return {suffix: render(f"net{suffix}.j2", values).encode() for suffix in (".c", ".h")}


def write_javascript(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The module, by suffix; `name` is that of the file."""
    values = _values(chain, description, name, _JS_EXPRESSIONS, _encoded)
    return {".js": render("net.js.j2", values).encode()}


def _encoded(array: Array) -> str:
    return base64.b64encode(array.astype("<f4").tobytes()).decode()


def _hexadecimal(array: Array) -> str:
    numbers = ", ".join(f"{float(value).hex()}f" for value in array.ravel())
    return textwrap.fill(numbers, 100, initial_indent="  ", subsequent_indent="  ")


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
    """The beginning of a name that C and ONNX allow.

    Example:
        >>> identifier("my-net.2"), identifier("2nd")
        ('my_net_2', 'net_2nd')
    """
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    return f"net_{name}" if not name or name[0].isdigit() else name


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
        own = {"id": f"op{index}", "kind": type(operation).__name__, "of": operation}
        own |= {"x": x, "out": out, "columns": width, "rows": rows}
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
    chain: Chain,
    description: Mapping[str, Any],
    name: str,
    expressions: Mapping[str, str],
    text_of: Callable[[Array], str],
) -> dict[str, Any]:
    """The values of a template of C or JavaScript; `text_of` gives that of an array."""
    text = json.dumps(description, separators=(",", ":"))
    fields = {leaf.name: f"s{k}_{identifier(leaf.name)}" for k, leaf in enumerate(chain.leaves)}
    return {
        "file": name,
        "name": identifier(name),
        "chain": chain,
        "description": description,
        # JSON that ends no comment and no script of a page
        "json": text.replace("*/", "\\u002a/").replace("/*", "/\\u002a").replace("</", "<\\/"),
        "classes": [re.sub(r"[^\w .-]", "_", c) for c in description["outputs"]["classes"]],
        "fields": fields,
        "arrays": [
            {"name": key, "size": np.size(array), "text": text_of(np.array(array, np.float32))}
            for key, array in _arrays(chain, description, fields)
        ],
        "operations": [*operations(chain, fields, expressions)],
        "tolerance": TOLERANCE,
    }


def _arrays(
    chain: Chain, description: Mapping[str, Any], fields: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """The constants by name."""
    for index, operation in enumerate(chain.operations):
        yield from ((f"op{index}_{key}", array) for key, array in constants(operation))
    for leaf in chain.leaves:
        yield f"start_{fields[leaf.name]}", leaf.start
    vector = description["conformance"]
    yield from ((f"check_{key}", vector[key]) for key in ("inputs", "outputs"))
    yield from ((f"check_{fields[leaf]}", values) for leaf, values in vector["state"].items())
