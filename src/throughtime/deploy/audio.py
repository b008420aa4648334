"""Files of audio plug-ins: NAM (`.nam`), and the JSON that RTNeural and AIDA-X read.

NAM: layers of LSTM and an `nn.Linear`. RTNeural: layers of LSTM and GRU, `nn.Linear` and functions,
from a state of zeros. Neither has a place for standardisation, so it is folded into the weights
next to it, which costs digits where a shift is many times its scale.

The package does not play these files: its tests read them as the plug-ins do.

References: NeuralAmpModelerCore, `NAM/lstm.cpp`, file version 0.5.4; RTNeural,
`RTNeural/model_loader.h`, and `python/model_utils.py` for the layout of Keras.

Shapes: `T` steps, `D` input features, `H` hidden, `C` outputs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from throughtime.deploy.chain import Array, Chain, Dense, Operation, Pointwise, Recurrence, Rescale
from throughtime.errors import ModelError
from throughtime.kernels.cells import GRU, LSTM

_NAM_VERSION = "0.5.4"
_RTNEURAL_FUNCTIONS = ("tanh", "relu", "sigmoid", "softmax", "elu")
_COST, _MOST_COST = 6e-8, 1e-3  # of folding, by shift / scale, in standardised inputs
_KERAS_BLOCKS = {LSTM: (0, 1, 2, 3), GRU: (1, 0, 2)}  # of our gates


def write_nam(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The file of a chain, by suffix.

    Raises:
        ModelError: NAM does not have this chain.
    """
    *layers, head = _folded(chain).operations
    if not isinstance(head, Dense) or any(
        not isinstance(layer, Recurrence) or layer.cell is not LSTM or layer.hr is not None
        for layer in layers
    ):
        raise ModelError(
            "a .nam file has layers of LSTM, without projection, and an nn.Linear; this net has"
            f" {_names(chain)}"
        )
    cells = [layer for layer in layers if isinstance(layer, Recurrence)]
    if len({layer.hidden for layer in cells}) > 1:
        raise ModelError("the LSTM layers of a .nam file have one width, hidden_size")
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
        "version": _NAM_VERSION,
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
    for operation in _folded(chain).operations:
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
        case Pointwise(function, parameter):
            if function in _RTNEURAL_FUNCTIONS and parameter in {0.0, 1.0}:
                return {**_entry("activation", width, []), "activation": function}
        case Recurrence():
            known = operation.cell in _KERAS_BLOCKS and operation.hr is None
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
    def arranged(values: Array) -> Array:
        blocks = np.split(values, len(layer.cell.gates))
        return np.concatenate([blocks[k] for k in _KERAS_BLOCKS[layer.cell]])

    biases = np.stack([arranged(layer.b_ih), arranged(layer.b_hh)])
    if layer.cell is LSTM:
        biases = biases.sum(axis=0)
    return [arranged(layer.ih).T, arranged(layer.hh).T, biases]


def _folded(chain: Chain) -> Chain:
    """The chain with its standardisation in the weights beside it.

    Raises:
        ModelError: it has none beside it, or the inputs are indices.
    """
    operations = list(chain.operations)
    if isinstance(first := operations[0], Rescale):
        if _COST * _ratio(first) > _MOST_COST:
            raise ModelError(
                f"an input's shift is {_ratio(first):.2g} times its scale: folded into weights of"
                " float32, the standardisation would lose too many digits. Take the mean off the"
                " signal before the net, in training too, or write .c"
            )
        operations[:2] = [_behind(first, operations[1])]
    if isinstance(last := operations[-1], Rescale):
        operations[-2:] = [_before(operations[-2], last)]
    if any(isinstance(operation, Rescale) for operation in operations) or chain.is_indexed:
        raise ModelError(
            "this format has no nn.Embedding, and standardisation only before the first layer and"
            f" after an nn.Linear at the end; this net has {_names(chain)}"
        )
    return replace(chain, operations=tuple(operations))


def folding(chain: Chain) -> list[str]:
    """A remark on what it costs that standardisation is in the weights."""
    first = chain.operations[0]
    if not isinstance(first, Rescale):
        return []
    cost = f"{_COST * _ratio(first):.1g} of a standardised input"
    return [f"the standardisation is folded into the weights, which costs about {cost} in float32"]


def _ratio(first: Rescale) -> float:
    return float(np.abs(first.shift / first.scale).max())


def _behind(first: Rescale, operation: Operation) -> Operation:
    """An operation whose inputs were standardised, for raw inputs."""
    factor = first.scale if first.inverse else 1 / first.scale.astype(np.float64)
    offset = first.shift if first.inverse else -first.shift * factor
    if isinstance(operation, Dense):
        weight, bias = operation
        return Dense(weight * factor, weight @ offset + bias)
    if isinstance(operation, Recurrence):
        bias = operation.ih @ offset + operation.b_ih
        return operation._replace(ih=operation.ih * factor, b_ih=bias)
    raise ModelError(f"standardisation stands before {_name(operation)}, expected a layer")


def _before(operation: Operation, last: Rescale) -> Operation:
    """An operation whose outputs are put into units."""
    if not isinstance(operation, Dense) or not last.inverse:
        raise ModelError(f"standardisation stands after {_name(operation)}, expected an nn.Linear")
    bias = operation.bias * last.scale + last.shift
    return Dense(operation.weight * last.scale[:, None], bias)


def _name(operation: Operation) -> str:
    match operation:
        case Recurrence():
            return operation.cell.name + (" with a projection" if operation.hr is not None else "")
        case Pointwise(function):
            return function
        case _:
            return {
                "Dense": "nn.Linear",
                "Lookup": "nn.Embedding",
                "Normalise": "nn.LayerNorm",
            }.get(type(operation).__name__, "standardisation")


def _names(chain: Chain) -> str:
    return ", ".join(map(_name, chain.operations))
