"""What the writers of source code share: names, constants and operations for their templates.

A template gets the same operations in every language, each with the names of its inputs, outputs
and constants. Matrices are stored column by column, so that a product adds columns to the biases.
"""

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
    Scale,
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


def template_values(
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
        "summary": _summary(chain),
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
        "steps": metadata.STEPS,
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


def identifier(text: str) -> str:
    """A name that C and JavaScript allow.

    Example:
        >>> identifier("my-net.2"), identifier("2nd"), identifier("float")
        ('my_net_2', 'net_2nd', 'net_float')
    """
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    return f"net_{name}" if not name or name[0].isdigit() or name in _KEYWORDS else name


def _summary(chain: Chain) -> str:
    """The layers in a line: `3 -> lstm 50 -> 2`."""
    layers = " -> ".join(f"{layer.cell} {layer.hidden}" for layer in chain.layers)
    return f"{chain.width} -> {layers} -> {chain.outputs}"


def _comment(description: Mapping[str, Any], weights: bytes) -> str:
    """The description as JSON that neither begins nor ends a comment."""
    text = json.dumps(metadata.seal(description, weights), separators=(",", ":"))
    return text.replace("*/", "\\u002a/").replace("/*", "/\\u002a")


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
        case Scale(shift, scale):
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
        case Scale(_, _, inverse):
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
    others = functions & {"elu", "softmax", "log_softmax"}
    return {
        "product": True,
        "sigmoid": sigmoid,
        "tangent": tangent,
        "exponential": bool(sigmoid or tangent or others),
        "logarithm": "log_softmax" in functions,
    }
