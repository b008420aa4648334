"""JavaScript files of chains: one ES module, its weights inside, for browsers and Node.js.

Weights and state are float32, sums are double: the outputs agree with the net to its own rounding.
"""

import base64
from collections.abc import Mapping
from typing import Any

from throughtime.deploy.chain import Chain
from throughtime.deploy.source import render, template_values

_EXPRESSIONS = {
    "tanh": "Math.tanh(v)",
    "relu": "Math.max(0, v)",
    "sigmoid": "sigmoid(v)",
    "silu": "v * sigmoid(v)",
    "leaky_relu": "v < 0 ? v * {} : v",
    "elu": "v < 0 ? {} * Math.expm1(v) : v",
}


def write_javascript(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The module, by suffix; `name` is that of the file."""
    values = template_values(chain, description, name, _EXPRESSIONS)
    values["arrays"] = [
        {"name": key, "text": base64.b64encode(array.astype("<f4").tobytes()).decode()}
        for key, array in values["arrays"].items()
    ]
    return {".js": render("net.js.j2", values)}
