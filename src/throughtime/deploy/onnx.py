"""ONNX files of chains, written as protobuf by hand: no exporter, no dependency.

Inputs `x` `(T, B, D)`, or `(T, B)` indices, and `state.<leaf>` `(1, B, P)` for each leaf; outputs
`y` `(T, B, C)` and `next.<leaf>`. T and B are dynamic. The state is not hidden in the file: a
runtime passes it in and gets it back, and recurrent nodes take it from the graph's inputs
directly, by which some runtimes recognise a state that the caller keeps.

References: Open Neural Network Exchange, onnx.proto3 of IR version 8, operator set 14; Protocol
Buffers, Encoding.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from throughtime.deploy.chain import (
    AddInputs,
    Chain,
    Dense,
    Lookup,
    Pointwise,
    Recurrence,
    Rescale,
    Standardisation,
)
from throughtime.deploy.metadata import KEY, field, metadata_entry, seal
from throughtime.kernels.cells import GRU, LSTM, RNN_RELU, RNN_TANH, Cell

OPSET, IR_VERSION = 14, 8
_DATA_TYPES = {"float32": 1, "int64": 7, "float64": 11}
_BLOCKS: dict[Cell, tuple[int, ...]] = {  # of our gates, in the order of ONNX
    LSTM: (0, 3, 1, 2),
    GRU: (1, 0, 2),
    RNN_TANH: (0,),
    RNN_RELU: (0,),
}
_OPERATORS = {
    "tanh": "Tanh",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "leaky_relu": "LeakyRelu",
    "elu": "Elu",
    "softmax": "Softmax",
    "log_softmax": "LogSoftmax",
}
Array: TypeAlias = np.ndarray[Any, Any]
Dims: TypeAlias = Sequence[int | str]


def write_onnx(chain: Chain, description: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """The file of a chain, by suffix, with its description as a metadata property."""
    graph = _Graph(chain, name)
    body = b"".join(
        [
            field(1, IR_VERSION),
            field(2, "throughtime"),
            field(7, graph.encoded()),
            field(8, field(1, "") + field(2, OPSET)),
        ]
    )
    described = seal(description, body)
    text = json.dumps(described, separators=(",", ":"))
    return {".onnx": body + metadata_entry(KEY, text)}


class _Graph:
    """Nodes, constants, inputs and outputs of a graph as they are added."""

    def __init__(self, chain: Chain, name: str) -> None:
        self._name = name
        self._nodes: list[bytes] = []
        self._constants: dict[str, bytes] = {}
        real = chain.layers[0].ih.dtype.name
        dims: Dims = ("T", "B") if chain.is_indexed else ("T", "B", chain.width)
        self._inputs = [_value_info("x", "int64" if chain.is_indexed else real, dims)]
        outputs: list[bytes] = []
        for leaf in chain.leaves:
            shape = (1, "B", len(leaf.start))
            self._inputs.append(_value_info(f"state.{leaf.name}", real, shape))
            outputs.append(_value_info(f"next.{leaf.name}", real, shape))
        self._outputs = [_value_info("y", real, ("T", "B", chain.outputs)), *outputs]
        value = "x"
        for index, operation in enumerate(chain.operations):
            last = index == len(chain.operations) - 1
            value = self._add(operation, value, f"op{index}", "y" if last else f"v{index}")

    def encoded(self) -> bytes:
        """The message GraphProto."""
        return b"".join(
            [
                *(field(1, node) for node in self._nodes),
                field(2, self._name),
                *(field(5, constant) for constant in self._constants.values()),
                *(field(11, value) for value in self._inputs),
                *(field(12, value) for value in self._outputs),
            ]
        )

    def _node(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any
    ) -> None:
        self._nodes.append(
            b"".join(
                [
                    *(field(1, name) for name in inputs),
                    *(field(2, name) for name in outputs),
                    field(4, operator),
                    *(field(5, _attribute(k, v)) for k, v in attributes.items()),
                ]
            )
        )

    def _constant(self, name: str, values: Array) -> str:
        self._constants[name] = _tensor(name, values)
        return name

    def _add(self, operation: Any, x: str, name: str, y: str) -> str:
        """Add the nodes that map the value `x` to `y`."""
        match operation:
            case Rescale(shift, scale, inverse):
                first, second = (scale, shift) if inverse else (shift, scale)
                operators = ("Mul", "Add") if inverse else ("Sub", "Div")
                self._node(operators[0], [x, self._constant(f"{name}.a", first)], [f"{name}.t"])
                self._node(operators[1], [f"{name}.t", self._constant(f"{name}.b", second)], [y])
            case Standardisation(steps, leaves):
                self._running(steps, [leaf.name for leaf in leaves], x, name, y)
            case AddInputs(columns):
                index = self._constant(f"{name}.columns", np.array(columns, np.int64))
                self._node("Gather", ["x", index], [f"{name}.now"], axis=2)
                self._node("Add", [x, f"{name}.now"], [y])
            case Lookup(table):
                self._node("Gather", [self._constant(f"{name}.table", table), x], [y])
            case Dense(weight, bias):
                self._node("MatMul", [x, self._constant(f"{name}.weight", weight.T)], [f"{name}.p"])
                self._node("Add", [f"{name}.p", self._constant(f"{name}.bias", bias)], [y])
            case Pointwise("silu"):
                self._node("Sigmoid", [x], [f"{name}.s"])
                self._node("Mul", [x, f"{name}.s"], [y])
            case Pointwise(function, parameter):
                extra: dict[str, Any] = {}
                if function.endswith("softmax"):
                    extra = {"axis": -1}
                elif function in {"leaky_relu", "elu"}:
                    extra = {"alpha": parameter}
                self._node(_OPERATORS[function], [x], [y], **extra)
            case _:
                self._recurrence(operation, x, name, y)
        return y

    def _running(self, steps: int, leaves: Sequence[str], x: str, name: str, y: str) -> None:
        """Standardise by the steps so far, as `nn.affine.Standardise` does."""
        count, first, total, squares = (f"state.{leaf}" for leaf in leaves)
        following = [f"next.{leaf}" for leaf in leaves]
        one, limit, none = (
            self._constant(f"{name}.{key}", np.array(value, np.float32))
            for key, value in {"one": 1, "limit": steps, "none": 0}.items()
        )
        begin, end, last, beyond, time, column = (
            self._constant(f"{name}.{key}", np.array([value], np.int64))
            for key, value in zip("abcdef", (0, 1, -1, 2**31 - 1, 0, 2), strict=True)
        )
        axis = self._constant(f"{name}.axis", np.array(0, np.int64))

        def add(operator: str, *inputs: str, **attributes: Any) -> str:
            out = f"{name}.{len(self._nodes)}"
            self._node(operator, inputs, [out], **attributes)
            return out

        def running(values: str, before: str) -> str:
            return add("Add", add("CumSum", values, axis), before)

        zeros = add("ConstantOfShape", add("Shape", add("Slice", x, begin, end, column)))
        reached = running(add("Add", zeros, one), count)
        counted = add("Cast", add("LessOrEqual", reached, limit), to=1)
        counts = add("Min", reached, limit)
        started = add("Greater", count, none)
        self._node("Where", [started, first, add("Slice", x, begin, end, time)], [following[1]])
        away = add("Sub", x, following[1])
        moved = add("Mul", away, counted)
        sums, powers = running(moved, total), running(add("Mul", moved, moved), squares)
        mean = add("Div", sums, counts)
        spread = add("Sub", add("Div", powers, counts), add("Mul", mean, mean))
        scale = add("Sqrt", add("Where", add("Greater", spread, none), spread, one))
        self._node("Div", [add("Sub", away, mean), scale], [y])
        for values, out in zip((counts, sums, powers), (following[0], *following[2:]), strict=True):
            self._node("Slice", [values, last, beyond, time], [out])

    def _recurrence(self, layer: Recurrence, x: str, name: str, y: str) -> None:
        rows = _BLOCKS[layer.cell]

        def arranged(values: Array) -> Array:
            blocks = np.split(values, len(rows))
            return np.concatenate([blocks[row] for row in rows])[None]

        biases = np.concatenate([arranged(layer.b_ih), arranged(layer.b_hh)], axis=1)
        inputs = [
            x,
            self._constant(f"{name}.W", arranged(layer.ih)),
            self._constant(f"{name}.R", arranged(layer.hh)),
            self._constant(f"{name}.B", biases),
            "",  # all sequences have the same length
            *(f"state.{leaf.name}" for leaf in layer.leaves),
        ]
        operator = "RNN" if layer.cell in (RNN_TANH, RNN_RELU) else layer.cell.mode
        attributes: dict[str, Any] = {"hidden_size": layer.hidden}
        if layer.cell is GRU:
            attributes["linear_before_reset"] = 1
        if layer.cell is RNN_RELU:
            attributes["activations"] = ["Relu"]
        following = [f"next.{leaf.name}" for leaf in layer.leaves]
        self._node(operator, inputs, [f"{name}.Y", *following], **attributes)
        axis = self._constant("direction", np.array([1], dtype=np.int64))
        self._node("Squeeze", [f"{name}.Y", axis], [y])


def _tensor(name: str, values: Array) -> bytes:
    """The message TensorProto."""
    array = np.ascontiguousarray(values)
    return b"".join(
        [
            *(field(1, size) for size in array.shape),
            field(2, _DATA_TYPES[array.dtype.name]),
            field(8, name),
            field(9, array.astype(array.dtype.newbyteorder("<")).tobytes()),
        ]
    )


def _attribute(name: str, value: int | float | Sequence[str]) -> bytes:
    """The message AttributeProto: an integer, a float or strings."""
    if isinstance(value, int):
        kind, content = 2, field(3, value)
    elif isinstance(value, float):
        kind, content = 1, field(2, value)
    else:
        kind, content = 8, b"".join(field(9, text) for text in value)
    return field(1, name) + content + field(20, kind)


def _value_info(name: str, dtype: str, dims: Dims) -> bytes:
    """The message ValueInfoProto: a tensor with fixed and named dimensions."""
    shape = b"".join(field(1, field(1 if isinstance(n, int) else 2, n)) for n in dims)
    tensor_type = field(1, _DATA_TYPES[dtype]) + field(2, shape)
    return field(1, name) + field(2, field(1, tensor_type))
