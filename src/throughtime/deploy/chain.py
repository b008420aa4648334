"""A net as a chain of operations on arrays, which the writers of all formats walk.

A chain is what most deployed recurrent nets are: standardisation or an embedding, LSTM, GRU or RNN
layers, a readout with what stands around it. It is read from the structure of the module, whether
an `nn.Sequential` or a class, and holds NumPy arrays of float32 alone.

A new kind of operation is a class here, a case of `_of_module` where it is a module, one of
`columns` where it changes the width, and a branch in each template: `net.c.j2`, `net.js.j2` and
`net.onnx.j2`. The formats of audio plug-ins (`audio.py`) refuse what they do not know.

Shapes: `D` input features, `H` hidden, `P` = `H` or the size of a projection, `G` gates, `C`
outputs, `L` layers, `V` entries of an embedding.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
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
    structure_of,
)
from throughtime.errors import ModelError
from throughtime.kernels.cells import BY_MODE, Cell
from throughtime.nn.affine import Affine, Difference, Standardise
from throughtime.nn.layers import layer_weights
from throughtime.state import State

Array: TypeAlias = np.ndarray[Any, Any]


class Leaf(NamedTuple):
    """A tensor of the state: its name and the values of a lane before its first step, `(P,)`.

    In the state of the net it is the leaf `source`, of which it is one layer, or the whole of one
    that has no layers.
    """

    name: str
    start: Array
    source: str
    layer: Any = ...


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


class Normalise(NamedTuple):
    """`nn.LayerNorm` of each step: `(x - mean) / sqrt(variance + eps) * weight + bias`, `(D,)`."""

    weight: Array
    bias: Array
    eps: float


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
        return len(self.ih) // len(self.cell.gates)

    def arranged(self, order: Sequence[int]) -> "Recurrence":
        """The same with its gates in another order."""
        names = ("ih", "hh", "b_ih", "b_hh")
        blocks = (np.split(getattr(self, name), len(order)) for name in names)
        arrays = (np.concatenate([parts[k] for k in order]) for parts in blocks)
        return self._replace(**dict(zip(names, arrays, strict=True)))


Operation: TypeAlias = (
    Rescale | Standardisation | AddInputs | Lookup | Dense | Normalise | Pointwise | Recurrence
)
# The functions that writers know, and the attribute that is their parameter
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
POINTWISE = tuple(name for name, _ in _MODULES.values())
_DEFAULTS = {"leaky_relu": 0.01, "elu": 1.0}
# methods that only arrange steps and lanes: a chain computes a step of a lane at a time
_ARRANGING = {"contiguous", "transpose", "view", "reshape", "flatten"}


@dataclass(frozen=True)
class Chain:
    """Operations in order; each gets the values of the one before it.

    Attributes:
        operations: see the module.
        width: D, or V where the inputs are indices.
    """

    operations: tuple[Operation, ...]
    width: int

    @property
    def outputs(self) -> int:
        """C."""
        return reduce(lambda size, operation: columns(operation, size), self.operations, self.width)

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


def state_of(net: Carried, leaves: Sequence[Leaf], state: State) -> dict[str, Tensor]:
    """The leaves, `(B, P)`, in a state of the net."""
    tensors = dict(zip(net.leaf_names(state), trees.tensors(state), strict=True))
    return {leaf.name: tensors[leaf.source][:, leaf.layer] for leaf in leaves}


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
        return Chain((*chain.operations, added), chain.width)
    name, first = next(iter(net.module.named_children()), ("", None))
    if isinstance(net.module, nn.Sequential) and isinstance(first, Standardise):
        rest = OrderedDict([*net.module.named_children()][1:])
        chain = read_chain(carry(nn.Sequential(rest)), inputs)
        state = first.initial_state(1)
        leaves = tuple(
            Leaf(f"{name}.{key}", _array(value[0]), f"{name}.{key}") for key, value in state.items()
        )
        return Chain((Standardisation(first.steps, leaves), *chain.operations), chain.width)
    with torch.no_grad():
        net.prepare(inputs)
        try:
            structure = structure_of(net)
        except UnknownError as error:
            raise _refusal(str(error)) from error
        translator = _Translator({child: name for name, child in net.module.named_modules()})
        layers = translator.layers(net, structure, net.initial_state(1, like=inputs))
        operations: list[Operation] = []
        for call in structure.operations:
            operations += layers.get(call.target) or translator.operations(call)
    if inputs.is_floating_point():
        return Chain(tuple(operations), prod(inputs.shape[2:]))
    if not isinstance(first := operations[0], Lookup):
        raise ModelError("the example inputs are integers and the net has no nn.Embedding first")
    return Chain(tuple(operations), len(first.table))


def columns(operation: Operation, width: int) -> int:
    """The numbers that an operation makes of so many."""
    match operation:
        case Lookup(table):
            return table.shape[1]
        case Dense(weight):
            return len(weight)
        case Recurrence():
            return operation.hh.shape[1]
        case _:
            return width


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"{what} stands in the way: this format has nn.Linear, nn.LayerNorm, nn.Embedding,"
        " standardisation (throughtime.nn.affine.Affine), layers of LSTM, GRU or RNN one on"
        f" another, and {', '.join(POINTWISE)}. An .onnx file takes any net"
    )


def _array(values: Tensor) -> Array:
    """A copy in float32."""
    return values.detach().cpu().to(torch.float32, copy=True).numpy()


class _Translator:
    """Translates the calls of a structure into operations; `names` are those of its modules."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self._names = names

    def operations(self, call: TensorCall) -> Iterator[Operation]:
        """Those of a call on a tensor, none for one that only arranges steps and lanes."""
        target = call.target
        if isinstance(target, nn.Module):
            yield from self._of_module(target)
        elif target.__name__ not in _ARRANGING:
            yield self._of_function(call)

    def _of_module(self, module: Any) -> Iterator[Operation]:
        kind = type_before_parametrizations(module)
        if kind is nn.Sequential:
            for child in module.children():
                yield from self._of_module(child)
        elif isinstance(module, Affine):
            yield Rescale(_array(module.shift), _array(module.scale), module.inverse)
        elif kind is nn.Linear:
            weight, bias = module.weight, module.bias
            yield Dense(_array(weight), _array(weight[:, 0] * 0 if bias is None else bias))
        elif kind is nn.LayerNorm and len(module.normalized_shape) == 1:
            ones = torch.ones(module.normalized_shape, device="cpu")
            weight, bias = module.weight, module.bias
            yield Normalise(
                _array(ones if weight is None else weight),
                _array(ones * 0 if bias is None else bias),
                module.eps,
            )
        elif kind is nn.Embedding and module.max_norm is None:
            yield Lookup(_array(module.weight))
        elif kind in _MODULES:
            function, setting = _MODULES[kind]
            yield Pointwise(function, float(getattr(module, setting)) if setting else 0.0)
        elif not isinstance(module, (nn.Identity, nn.Flatten, nn.modules.dropout._DropoutNd)):
            raise self._in_the_way(module)

    def _of_function(self, call: TensorCall) -> Operation:
        function: str = call.target.__name__
        if function not in POINTWISE:
            raise _refusal(f"'{function}'")
        values = [*call.args, *(v for k, v in call.kwargs.items() if k != "inplace")]
        default = _DEFAULTS.get(function, 0.0)
        return Pointwise(function, float(values[0]) if values and default else default)

    def _in_the_way(self, module: nn.Module, why: str = "") -> ModelError:
        return _refusal(f"'{self._names[module]}', a {type(module).__name__}{why},")

    def layers(
        self, net: Carried, structure: Structure, start: State
    ) -> dict[object, list[Recurrence]]:
        """The operations of each recurrent layer."""
        known = dict(zip(map(id, trees.tensors(start)), net.leaf_names(start), strict=True))
        result: dict[object, list[Recurrence]] = {}
        states = layer_states(net, structure, start)
        for layer, state in zip(structure.layers, states, strict=True):
            tensors, result[layer] = trees.tensors(state), []
            if any(leaf.dim() != 3 or leaf.shape[1] != layer.num_layers for leaf in tensors):
                raise self._in_the_way(layer, " whose state has another shape than (B, L, H)")
            for k, weights in enumerate(layer_weights(layer)):
                suffix = f".{k}" if layer.num_layers > 1 else ""
                leaves = tuple(
                    Leaf(known[id(t)] + suffix, _array(t[0, k]), known[id(t)], k) for t in tensors
                )
                *others, hr = weights
                arrays = [_array(weights.ih[:, 0] * 0 if w is None else w) for w in others]
                projection = None if hr is None else _array(hr)
                values = (BY_MODE[layer.mode], *arrays, projection, leaves)
                result[layer].append(Recurrence._make(values))
        return result
