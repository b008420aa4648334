"""C99 files of chains: one source and its header, without heap and without libm.

Weights are constants, written in hexadecimal, so no digit is lost; the state is a struct of the
caller's. With `-ffp-contract=off` every optimisation level gives the same bits, since each sum has
one order and each function is computed from additions, products and quotients alone.

Functions: e^x by its series after a reduction by powers of 2, tanh by Lambert's continued fraction
near 0, ln by the series of artanh; each within 2 units in the last place of float32.
"""

from collections.abc import Mapping
from typing import Any

from throughtime.deploy.chain import Array, Chain
from throughtime.deploy.source import render, template_values

_EXPRESSIONS = {
    "tanh": "tangent(v)",
    "relu": "v < 0.f ? 0.f : v",
    "sigmoid": "sigmoid(v)",
    "silu": "v * sigmoid(v)",
    "leaky_relu": "v < 0.f ? v * (float){} : v",
    "elu": "v < 0.f ? (float){} * (exponential(v) - 1.f) : v",
}
_LINE = 8  # numbers


def write_c(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The source and the header, by suffix; `name` is that of the file."""
    values = template_values(chain, description, name, _EXPRESSIONS)
    values |= {
        "header": f"{name}.h",
        "kind": "int32_t" if chain.is_indexed else "float",
        "arrays": [
            {"name": key, "size": array.size, "text": _numbers(array)}
            for key, array in values["arrays"].items()
        ],
    }
    return {suffix: render(f"net{suffix}.j2", values) for suffix in (".c", ".h")}


def _numbers(array: Array) -> str:
    """Hexadecimal constants, some of them a line."""
    texts = [f"{float(value).hex()}f" for value in array.ravel()]
    rows = (texts[at : at + _LINE] for at in range(0, len(texts), _LINE))
    return ",\n".join("  " + ", ".join(row) for row in rows)
