"""A net as a chain of operations on arrays, which the writers of the formats translate.

A chain is what most deployed recurrent nets are: standardisation or an embedding, LSTM, GRU or RNN
layers, a readout with what stands around it. It is read from the structure of the module, whether
an `nn.Sequential` or a class, and holds NumPy arrays of float32 alone.

Shapes: `D` input features, `H` hidden, `P` = `H` or the size of a projection, `G` gates, `C`
outputs, `L` layers, `V` entries of an embedding.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from throughtime import state as trees
from throughtime.carry.carried import Carried, carry
from throughtime.carry.structure import (
    Structure,
    TensorCall,
    UnknownError,
    layer_states,
    require_structure,
)
from throughtime.errors import ModelError
from throughtime.kernels.cells import BY_MODE, Cell
from throughtime.nn.affine import Affine, Difference, Standardise
from throughtime.nn.layers import layer_weights
from throughtime.state import State

Array: TypeAlias = np.ndarray[Any, Any]


class Leaf(NamedTuple):
    """A tensor of the state: its name and the values of a lane before its first step, `(P,)`."""

    name: str
    start: Array


class Rescale(NamedTuple):
    """`(x - shift) / scale`, or `x * scale + shift` where it is the inverse; both `(D,)`."""

    shift: Array
    scale: Array
    inverse: bool


class Standardisation(NamedTuple):
    """Standardisation by the first steps of a recording: see `nn.affine.Standardise`.

    The leaves are how many were counted, `(1,)`, the first step, the sums and the squares, `(D,)`.
    """

    steps: int
    leaves: tuple[Leaf, ...]


class AddInputs(NamedTuple):
    """The values and those inputs of the net, by their columns: see `nn.affine.Difference`."""

    columns: tuple[int, ...]


class Lookup(NamedTuple):
    """The rows of an embedding, `(V, D)`, by index."""

    table: Array


class Dense(NamedTuple):
    """`weight @ x + bias`, `(C, H)` and `(C,)`; zeros where the net has none."""

    weight: Array
    bias: Array


class Pointwise(NamedTuple):
    """A function of each value, or of the values of a step: a name of `POINTWISE`."""

    function: str
    parameter: float = 0.0


class Recurrence(NamedTuple):
    """A recurrent layer: `(G*H, D)`, `(G*H, P)`, `(G*H,)` twice, `(P, H)`; gates as torch's.

    Biases are zeros where the net has none.
    """

    cell: Cell
    ih: Array
    hh: Array
    b_ih: Array
    b_hh: Array
    hr: Array | None
    leaves: tuple[Leaf, ...]

    @property
    def hidden(self) -> int:
        """H."""
        return self.ih.shape[0] // len(self.cell.gates)

    @property
    def features(self) -> int:
        """P, the width of `h` and of the outputs."""
        return self.hh.shape[1]


Operation: TypeAlias = (
    Rescale | Standardisation | AddInputs | Lookup | Dense | Pointwise | Recurrence
)
# The functions that writers know, the values of `parameter` being a slope or an alpha
POINTWISE = ("tanh", "relu", "sigmoid", "leaky_relu", "elu", "silu", "softmax", "log_softmax")
_MODULES: dict[type[nn.Module], tuple[str, str]] = {
    nn.Tanh: ("tanh", ""),
    nn.ReLU: ("relu", ""),
    nn.Sigmoid: ("sigmoid", ""),
    nn.LeakyReLU: ("leaky_relu", "negative_slope"),
    nn.ELU: ("elu", "alpha"),
    nn.SiLU: ("silu", ""),
    nn.Softmax: ("softmax", ""),  # of each step: over lanes or time it could not be carried
    nn.LogSoftmax: ("log_softmax", ""),
}
_DEFAULTS = {"leaky_relu": 0.01, "elu": 1.0}
# methods that only arrange steps and lanes: a chain computes a step of a lane at a time
_ARRANGING = {"contiguous", "transpose", "view", "reshape", "flatten"}


@dataclass(frozen=True)
class Chain:
    """Operations in order; each gets the values of the one before it.

    Attributes:
        operations: see the module.
        width: D, or V where the inputs are indices.
        outputs: C.
        names: of the state's leaves in the net, for each leaf of the chain: the name there, and
            the index of the layer in it, if it has layers.
    """

    operations: tuple[Operation, ...]
    width: int
    outputs: int
    names: Mapping[str, tuple[str, int | None]]

    @property
    def is_indexed(self) -> bool:
        """Whether the inputs are indices of an embedding."""
        return isinstance(self.operations[0], Lookup)

    @property
    def layers(self) -> tuple[Recurrence, ...]:
        """The recurrent operations."""
        return tuple(op for op in self.operations if isinstance(op, Recurrence))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """All leaves of the state, in order."""
        stateful = (op for op in self.operations if isinstance(op, (Recurrence, Standardisation)))
        return tuple(leaf for operation in stateful for leaf in operation.leaves)

    def state_of(self, state: State, leaf_names: Sequence[str]) -> dict[str, Tensor]:
        """A state of the net `(B, L, P)` by the leaves of the chain, `(B, P)`."""
        tensors = dict(zip(leaf_names, trees.tensors(state), strict=True))
        return {
            name: tensors[own] if k is None else tensors[own][:, k]
            for name, (own, k) in self.names.items()
        }


def read_chain(net: Carried, inputs: Tensor) -> Chain:
    """The chain of a net.

    Args:
        net: made by `tt.carry`; its weights are copied.
        inputs: an example, `(T, B, ...)`.

    Raises:
        ModelError: the net is none; the child in the way is named where there is one.
    """
    if isinstance(net.module, Difference):
        chain = read_chain(carry(net.module.module), inputs)
        added = AddInputs(tuple(net.module.columns.tolist()))
        return replace(chain, operations=(*chain.operations, added))
    name, first = next(iter(net.module.named_children()), ("", None))
    if isinstance(net.module, nn.Sequential) and isinstance(first, Standardise):
        rest = OrderedDict([*net.module.named_children()][1:])
        chain = read_chain(carry(nn.Sequential(rest)), inputs)
        state = first.initial_state(1)
        leaves = tuple(Leaf(f"{name}.{key}", _array(value[0])) for key, value in state.items())
        own = {**{leaf.name: (leaf.name, None) for leaf in leaves}, **chain.names}
        return replace(
            chain, operations=(Standardisation(first.steps, leaves), *chain.operations), names=own
        )
    with torch.no_grad():
        net.prepare(inputs)
        try:
            structure = require_structure(net, inputs)
        except UnknownError as error:
            raise _refusal(str(error)) from error
        states = net.initial_state(1, like=inputs)
        names = {child: name for name, child in net.module.named_modules()}
        reader = _Translator(names)
        layers, own = reader.layers(net, structure, states)
        operations: list[Operation] = []
        for call in structure.operations:
            operations += layers.get(call.target) or reader.operations(call)
    width = inputs.shape[2] if inputs.is_floating_point() else _entries(operations)
    outputs = reduce(lambda size, operation: columns(operation, size), operations, width)
    return Chain(tuple(operations), width, outputs, own)


def _entries(operations: Sequence[Operation]) -> int:
    first = operations[0]
    if not isinstance(first, Lookup):
        raise ModelError("the example inputs are integers and the net has no nn.Embedding first")
    return len(first.table)


def columns(operation: Operation, width: int) -> int:
    """The numbers that an operation makes of so many."""
    match operation:
        case Lookup(table):
            return table.shape[1]
        case Dense(weight):
            return len(weight)
        case Recurrence():
            return operation.features
        case _:
            return width


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"{what} stands in the way: this format has nn.Linear, nn.Embedding, standardisation"
        " (throughtime.nn.affine.Affine), layers of LSTM, GRU or RNN one on another, and"
        f" {', '.join(POINTWISE)}. An .onnx file takes any net"
    )


def _array(values: Tensor) -> Array:
    """A copy in float32."""
    return values.detach().cpu().to(torch.float32, copy=True).numpy()


class _Translator:
    """Translates calls of a structure into operations."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self._names = names

    def operations(self, call: TensorCall) -> Iterator[Operation]:
        """Those of a call on a tensor, none for one that only arranges steps and lanes."""
        target = call.target
        if isinstance(target, nn.Module):
            yield from self._of_module(target)
        elif target.__name__ not in _ARRANGING:
            yield self._of_function(call)

    def _of_module(self, module: nn.Module) -> Iterator[Operation]:
        kind = type_before_parametrizations(module)
        if kind is nn.Sequential:
            for child in module.children():
                yield from self._of_module(child)
        elif isinstance(module, Affine):
            yield Rescale(_array(module.shift), _array(module.scale), module.inverse)
        elif kind is nn.Linear:
            weight, bias = (getattr(module, name) for name in ("weight", "bias"))
            yield Dense(_array(weight), _array(weight[:, 0] * 0 if bias is None else bias))
        elif isinstance(module, nn.Embedding) and kind is nn.Embedding and module.max_norm is None:
            yield Lookup(_array(module.weight))
        elif kind in _MODULES:
            function, setting = _MODULES[kind]
            yield Pointwise(function, float(getattr(module, setting)) if setting else 0.0)
        elif not isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd)):
            raise self._in_the_way(module)

    def _of_function(self, call: TensorCall) -> Operation:
        function: str = call.target.__name__
        if function not in POINTWISE:
            raise self._in_the_way(function)
        values = [*call.args, *(v for k, v in call.kwargs.items() if k != "inplace")]
        default = _DEFAULTS.get(function, 0.0)
        return Pointwise(function, float(values[0]) if values and default else default)

    def _in_the_way(self, source: object, why: str = "") -> ModelError:
        if not isinstance(source, nn.Module):
            return _refusal(f"'{source}'")
        return _refusal(f"'{self._names[source]}', a {type(source).__name__}{why},")

    def layers(
        self, net: Carried, structure: Structure, start: State
    ) -> tuple[dict[object, list[Recurrence]], dict[str, tuple[str, int]]]:
        """The operations of each recurrent layer, and the leaves of the net's state."""
        known = dict(zip(map(id, trees.tensors(start)), net.leaf_names(start), strict=True))
        result: dict[object, list[Recurrence]] = {}
        own: dict[str, tuple[str, int]] = {}
        states = layer_states(net, structure, start)
        for layer, state in zip(structure.layers, states, strict=True):
            cell = BY_MODE[layer.mode]
            result[layer], tensors = [], trees.tensors(state)
            if any(leaf.dim() != 3 or leaf.shape[1] != layer.num_layers for leaf in tensors):
                raise self._in_the_way(layer, " whose state has another shape than (B, L, H)")
            for k, weights in enumerate(layer_weights(layer)):
                leaves: list[Leaf] = []
                for tensor in tensors:
                    name = known[id(tensor)] + (f".{k}" if layer.num_layers > 1 else "")
                    leaves.append(Leaf(name, _array(tensor[0, k])))
                    own[name] = known[id(tensor)], k
                *others, hr = weights
                ih, hh, b_ih, b_hh = (
                    _array(weights.ih[:, 0] * 0 if w is None else w) for w in others
                )
                projection = None if hr is None else _array(hr)
                result[layer].append(
                    Recurrence(cell, ih, hh, b_ih, b_hh, projection, tuple(leaves))
                )
        return result, own
