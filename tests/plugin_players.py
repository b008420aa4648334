"""Files of audio plug-ins, played as the plug-ins play them.

Written from NeuralAmpModelerCore, `NAM/lstm.cpp`, and RTNeural, `RTNeural/model_loader.h`.

Shapes: `T` steps, `D` input features.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from throughtime.deploy.chain import Array


def play_nam(content: bytes, x: Array) -> Array:
    """The outputs of a NAM plug-in for steps `(T, D)`."""
    file = json.loads(content)
    config, weights = file["config"], iter(file["weights"])
    hidden, width = config["hidden_size"], config["input_size"]

    def take(*shape: int) -> Array:
        numbers = [next(weights) for _ in range(int(np.prod(shape)))]
        return np.array(numbers, np.float32).reshape(shape)

    cells: list[list[Array]] = []
    for k in range(config["num_layers"]):
        columns = hidden + (hidden if k else width)
        cells.append([take(4 * hidden, columns), take(4 * hidden), take(hidden), take(hidden)])
    head, bias = take(config["out_channels"], hidden), take(config["out_channels"])
    if next(weights, None) is not None:
        raise ValueError("the .nam file has more weights than its layers need")

    def step(x: Array) -> Array:
        for matrix, offset, h, c in cells:
            x = _lstm_step(matrix @ np.concatenate([x, h]) + offset, h, c)
        return head @ x + bias

    return np.array([step(row) for row in x])


def play_rtneural(content: bytes, x: Array) -> Array:
    """The outputs of RTNeural for steps `(T, D)`."""
    layers = json.loads(content)["layers"]
    arrays = [[np.array(values, np.float32) for values in layer["weights"]] for layer in layers]
    states = [
        np.zeros(({"lstm": 2, "gru": 1}.get(layer["type"], 0), layer["shape"][-1]), np.float32)
        for layer in layers
    ]

    def step(x: Array) -> Array:
        for layer, weights, state in zip(layers, arrays, states, strict=True):
            x = _keras_step(layer, weights, state, x)
        return x

    return np.array([step(row) for row in x])


def _lstm_step(gates: Array, h: Array, c: Array) -> Array:
    """The outputs of a step; the state is changed."""
    i, f, g, o = np.split(gates, 4)
    c[:] = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    h[:] = _sigmoid(o) * np.tanh(c)
    return h.copy()


def _keras_step(
    layer: Mapping[str, Any], weights: Sequence[Array], state: Array, x: Array
) -> Array:
    """The outputs of one layer; its state, `h` and `c`, is changed."""
    if layer["type"] == "lstm":
        return _lstm_step(x @ weights[0] + state[0] @ weights[1] + weights[2], *state)
    if layer["type"] == "gru":
        (h,) = state
        a = np.split(x @ weights[0] + weights[2][0], 3)
        b = np.split(h @ weights[1] + weights[2][1], 3)
        z, r = _sigmoid(a[0] + b[0]), _sigmoid(a[1] + b[1])
        h[:] = z * h + (1 - z) * np.tanh(a[2] + r * b[2])
        return h.copy()
    if layer["activation"]:
        raise ValueError(layer["activation"])
    return x @ weights[0] + weights[1]


def _sigmoid(x: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * x)
