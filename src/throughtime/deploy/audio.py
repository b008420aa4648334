"""Files of audio plug-ins: NAM (`.nam`), and the JSON that RTNeural and AIDA-X read.

NAM: layers of LSTM and an `nn.Linear`. RTNeural: layers of LSTM and GRU, `nn.Linear` and functions,
from a state of zeros; standardisation is a matrix there, which costs digits where a shift is many
times its scale.

The package does not play these files: its tests read them as the plug-ins do.

References: NeuralAmpModelerCore, `NAM/lstm.cpp`, file version 0.5.4; RTNeural,
`RTNeural/model_loader.h`, and `python/model_utils.py` for the layout of Keras.

Shapes: `T` steps, `D` input features, `H` hidden, `C` outputs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from throughtime.deploy.chain import (
    AddInputs,
    Array,
    Chain,
    Dense,
    Lookup,
    Normalise,
    Operation,
    Pointwise,
    Recurrence,
    Rescale,
)
from throughtime.errors import ModelError
from throughtime.kernels.cells import GRU, LSTM

_RTNEURAL_FUNCTIONS = ("tanh", "relu", "sigmoid", "softmax", "elu")
_MOST_RATIO = 2e4  # of shift to scale: a matrix loses 6e-8 of it, in standardised inputs
_NAMES: dict[type, str] = {
    AddInputs: "tt.nn.Difference",
    Dense: "nn.Linear",
    Lookup: "nn.Embedding",
    Normalise: "nn.LayerNorm",
}
_KERAS_GATES = {LSTM: (0, 1, 2, 3), GRU: (1, 0, 2)}  # of our gates


def write_nam(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The file of a chain, by suffix.

    Raises:
        ModelError: NAM does not have this chain.
    """
    *layers, head = chain.operations
    cells = [op for op in chain.layers if op.cell is LSTM and op.hr is None]
    widths = {cell.hidden for cell in cells}
    if len(cells) < len(layers) or not isinstance(head, Dense) or len(widths) > 1:
        raise ModelError(
            "a .nam file has layers of LSTM of one width, without projection, and an nn.Linear;"
            f" this net has {', '.join(map(_name, chain.operations))}. Write .c, or train such a"
            " net on the signal as it is, with --standardise none"
        )
    weights: list[Array] = []
    for layer in cells:
        h, c = layer.leaves
        matrix, biases = np.concatenate([layer.ih, layer.hh], axis=1), layer.b_ih + layer.b_hh
        weights += [matrix, biases, h.start, c.start]
    weights += head
    config = {
        "input_size": chain.width,
        "hidden_size": cells[0].hidden,
        "num_layers": len(cells),
        "in_channels": chain.width,
        "out_channels": chain.outputs,
    }
    content: dict[str, Any] = {
        "version": "0.5.4",
        "architecture": "LSTM",
        "config": config,
        "metadata": {"name": name, "throughtime": description},
        "weights": [number for array in weights for number in array.ravel().tolist()],
    }
    if description["rate"] is not None:
        content["sample_rate"] = description["rate"]
    return {".nam": json.dumps(content).encode()}


def write_rtneural(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The file of a chain, by suffix.

    Raises:
        ModelError: RTNeural does not have this chain.
    """
    del name
    layers: list[dict[str, Any]] = []
    width = chain.width
    for operation in chain.operations:
        layers.append(_keras_layer(operation, width))
        width = layers[-1]["shape"][-1]
    content = {
        "in_shape": [None, None, chain.width],
        "in_skip": 0,
        "layers": layers,
        "metadata": {"throughtime": description},
    }
    if description["rate"] is not None:
        content["samplerate"] = description["rate"]
    return {".json": json.dumps(content).encode()}


def _keras_layer(operation: Operation, width: int) -> dict[str, Any]:
    """The layer in the layout of Keras: matrices `(inputs, outputs)`, gates i f g o or z r n."""
    match operation:
        case Dense(weight, bias):
            return _entry("dense", len(weight), [weight.T, bias])
        case Rescale(shift, scale, inverse):
            ratio = float(np.abs(shift / scale).max())
            if inverse or ratio < _MOST_RATIO:
                factor = scale if inverse else 1 / scale.astype(np.float64)
                matrix, bias = np.diag(factor), shift if inverse else -shift * factor
                return _entry("dense", width, [matrix, bias])
            raise ModelError(
                f"RTNeural has standardisation as a matrix only, and a shift is {ratio:.2g} times"
                " its scale, which would lose too many digits: write .c, or take the mean off the"
                " signal before the net, in training too"
            )
        case Pointwise(function, parameter):
            if function in _RTNEURAL_FUNCTIONS and parameter in {0.0, 1.0}:
                return {**_entry("activation", width, []), "activation": function}
        case Recurrence():
            known = operation.cell in _KERAS_GATES and operation.hr is None
            if known and not any(leaf.start.any() for leaf in operation.leaves):
                return _entry(operation.cell.name, operation.hidden, _keras_weights(operation))
        case _:
            pass
    raise ModelError(
        f"RTNeural has no {_name(operation)}: expected layers of LSTM and GRU without projection,"
        f" from a state of zeros, nn.Linear and {', '.join(_RTNEURAL_FUNCTIONS)}"
    )


def _entry(kind: str, width: int, weights: Sequence[Array]) -> dict[str, Any]:
    return {
        "type": kind,
        "activation": "",
        "shape": [None, None, width],
        "weights": [array.tolist() for array in weights],
    }


def _keras_weights(layer: Recurrence) -> list[Array]:
    own = layer.arranged(_KERAS_GATES[layer.cell])
    biases = np.stack([own.b_ih, own.b_hh])
    return [own.ih.T, own.hh.T, biases.sum(axis=0) if layer.cell is LSTM else biases]


def _name(operation: Operation) -> str:
    match operation:
        case Recurrence():
            return operation.cell.name + " with a projection" * (operation.hr is not None)
        case Pointwise(function):
            return function
        case _:
            return _NAMES.get(type(operation), "standardisation")
