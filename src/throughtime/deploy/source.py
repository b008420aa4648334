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
    Dense,
    Lookup,
    Operation,
    Pointwise,
    Recurrence,
    Rescale,
)
from throughtime.kernels.cells import GRU, LSTM, RNN_RELU

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
    operations, last = _operations(chain, fields, expressions)
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
        "operations": operations,
        "last": last,
        "uses": _uses(chain),
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
    match operation:
        case Rescale(shift, scale):
            yield from (("shift", shift), ("scale", scale))
        case Lookup(table):
            yield "table", table
        case Dense(weight, bias):
            yield "weight", weight.T
            if bias is not None:
                yield "bias", bias
        case Pointwise():
            pass
        case _:
            yield from _layer_constants(operation)


def _layer_constants(layer: Recurrence) -> Iterator[tuple[str, Array]]:
    yield "ih", layer.ih.T
    yield "hh", layer.hh.T
    if layer.hr is not None:
        yield "hr", layer.hr.T
    if layer.b_ih is not None and layer.b_hh is not None:
        recurrent = layer.b_hh.copy()
        if layer.cell is GRU:  # the reset gate scales the bias of the candidate as well
            recurrent[2 * layer.hidden :] = 0
            yield "candidate", layer.b_hh[2 * layer.hidden :]
        yield "bias", layer.b_ih + recurrent


def _operations(
    chain: Chain, fields: Mapping[str, str], expressions: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """What the template needs of each operation, and the name of the last values."""
    result: list[dict[str, Any]] = []
    x, width = "x", chain.width
    for index, operation in enumerate(chain.operations):
        values = _operation(operation, width, fields, expressions)
        values |= {"id": f"op{index}", "x": x, "out": f"v{index}", "columns": width}
        result.append(values)
        x, width = values["out"], values["rows"]
    return result, x


def _operation(
    operation: Operation, width: int, fields: Mapping[str, str], expressions: Mapping[str, str]
) -> dict[str, Any]:
    match operation:
        case Rescale(_, _, inverse):
            return {"kind": "scale", "rows": width, "inverse": inverse}
        case Lookup(table):
            return {"kind": "lookup", "rows": table.shape[1]}
        case Dense(weight, bias):
            return {"kind": "dense", "rows": len(weight), "bias": bias is not None}
        case Pointwise(function, parameter):
            expression = expressions.get(function, "").replace("{}", repr(parameter))
            own = {"function": function, "expression": expression}
            return {"kind": "pointwise", "rows": width, **own}
        case _:
            leaves = [fields[leaf.name] for leaf in operation.leaves]
            return {
                "kind": "layer",
                "cell": operation.cell.name,
                "rows": operation.features,
                "hidden": operation.hidden,
                "gates": len(operation.cell.gates),
                "bias": operation.b_ih is not None,
                "projected": operation.hr is not None,
                "h": leaves[0],
                "c": leaves[-1],
            }


def _uses(chain: Chain) -> dict[str, bool]:
    """Which helpers are called: a compiler warns of others."""
    functions = {op.function for op in chain.operations if isinstance(op, Pointwise)}
    cells = {layer.cell for layer in chain.layers}
    sigmoid = bool(cells & {LSTM, GRU} or functions & {"sigmoid", "silu"})
    tangent = bool(cells - {RNN_RELU} or "tanh" in functions)
    decay = bool(functions & {"softmax", "log_softmax"})
    return {
        "sigmoid": sigmoid,
        "tangent": tangent,
        "decay": decay,
        "decay_less_1": "elu" in functions,
        "exponential": bool(sigmoid or tangent or decay or "elu" in functions),
        "logarithm": "log_softmax" in functions,
    }
