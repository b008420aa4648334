"""The parts of a net whose layers are run by the compiled core: front, recurrent layers, readout.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import fork_rng
from throughtime.carry._calls import Adapter, LayerAdapter, ModuleAdapter
from throughtime.carry.carried import MISFIT_ERRORS, Carried
from throughtime.carry.layers import ChainAdapter
from throughtime.carry.structure import (
    Around,
    Guards,
    Structure,
    UnknownError,
    is_foreign,
    structure_of,
)
from throughtime.gradient.segment import preserve_rng_and_buffers, tolerance
from throughtime.nn.layers import Recurrent
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a net, as they were when they were read.

    Attributes:
        adapter: of the net.
        guards: of what was read in a forward.
        names: the keys of the state, in order.
        layers: the recurrent layers, from the inputs to the outputs, by their names in the state.
        readout: reads the outputs of the last layer; None if the tail does.
        tail: maps the outputs of the last layer, for so many inputs, to those of the net.
        front: maps inputs to those of the first layer; None if they are the same.
        argument: whether the net's state is that of the only layer, or a tuple of those of several,
            not a dict.
        random_tail: whether the tail draws random numbers.
        zero_start: whether recordings start from a state of zeros.
    """

    adapter: Adapter
    guards: Guards
    names: tuple[str, ...]
    layers: Mapping[str, Recurrent]
    readout: nn.Linear | None
    tail: Callable[[Tensor, Tensor], Tensor]
    front: Callable[[Tensor], Tensor] | None = None
    argument: bool = False
    random_tail: bool = False
    zero_start: bool = True

    def by_name(self, state: State) -> State:
        """A state that is an argument of the net, by the names of its layers."""
        if len(self.names) == 1:
            return {self.names[0]: state}
        several = type(state) is tuple and len(state) == len(self.names)
        return dict(zip(self.names, state, strict=True)) if several else None

    def of_net(self, state: State) -> State:
        """The inverse of `by_name`."""
        return state[self.names[0]] if len(self.names) == 1 else tuple(state.values())


def match(net: Carried, inputs: Tensor) -> Parts | None:
    """The parts of a net; None for a net of others, or one whose forward may do something else.

    Args:
        net: made by `tt.carry`.
        inputs: of some steps, for a trial of a module of the user's.
    """
    try:
        structure = structure_of(net)
    except UnknownError:
        return None
    around = structure.around_layers()
    if around is None or isinstance(net.adapter, LayerAdapter):
        return None
    if not all(isinstance(layer, Recurrent) for layer in structure.layers):
        return None
    chain = net.adapter if isinstance(net.adapter, ChainAdapter) else None
    parts = _parts(net, structure, around, chain)
    if parts is None or chain is not None or _computes_the_same(net, parts, inputs):
        return parts
    return None


def _parts(
    net: Carried, structure: Structure, around: Around, chain: ChainAdapter | None
) -> Parts | None:
    """The parts of a structure, that of a `chain` or of a module of the user's."""
    adapter = net.adapter
    layers = [layer for layer in structure.layers if isinstance(layer, Recurrent)]
    for lower, upper in pairwise(layers):
        if upper.input_size != (lower.proj_size or lower.hidden_size):
            return None
    front, tail = (
        tuple(op.target for op in part if isinstance(op.target, nn.Module)) for part in around
    )
    own = [operation.target for operation in around[1]]
    readout = own[0] if len(own) == 1 and type(own[0]) is nn.Linear else None
    inside = [part for module in front for part in module.modules()]
    in_place = any(getattr(part, "inplace", False) for part in inside)
    foreign = [part for part in inside if not type(part).__module__.startswith("throughtime.")]
    unfit = any(map(is_foreign, foreign)) or (chain is None and in_place)
    if unfit or (readout is None and not _may_be_tail(tail)):
        return None
    batch_first = [chain is None and layer.batch_first for layer in (layers[0], layers[-1])]
    names = {layer: name for name, layer in net.module.named_modules()}
    if structure.argument:  # else hooks set the states
        names = {layer: str(i) for i, layer in enumerate(layers)}

    def run_front(x: Tensor) -> Tensor:
        steps_and_lanes = x.shape[:2]
        x = adapter.convention.arrange(x)[0] if isinstance(adapter, ModuleAdapter) else x
        for operation in around[0]:
            x = operation(x)
            if chain is not None and x.shape[:2] != steps_and_lanes:
                return x.new_empty(0)  # a graph will refuse it
        return x.transpose(0, 1) if batch_first[0] else x

    def run_tail(y: Tensor, x: Tensor) -> Tensor:
        y = y.transpose(0, 1) if batch_first[1] else y
        for operation in around[1]:
            y = operation(y)
        result = (y,) if structure.argument else y
        return adapter.read(result, x) if isinstance(adapter, ModuleAdapter) else y

    return Parts(
        adapter,
        structure.guards,
        tuple(names[layer] for layer in layers) if chain is None else tuple(chain.links),
        {names[layer]: layer for layer in layers},
        readout,
        run_tail,
        run_front if around[0] else None,
        bool(structure.argument),
        any(hasattr(part, "p") for module in tail for part in module.modules()),
        adapter.zero_start,
    )


def _may_be_tail(modules: Sequence[nn.Module]) -> bool:
    """Whether modules may run by autograd on the outputs of a kernel, as often as by a graph."""
    return not any(
        is_foreign(part)
        or getattr(part, "inplace", False)
        or bool(part._buffers)
        or isinstance(part, nn.RReLU)
        for module in modules
        for part in module.modules()
    )


def _computes_the_same(net: Carried, parts: Parts, inputs: Tensor) -> bool:
    """Whether the net gives the outputs and the state that its parts give, in a trial."""
    lanes = inputs.shape[1]
    steps = 2 if lanes == 3 else 3  # another number than lanes, so that they are told apart
    x, device = inputs[:1].expand(steps, *inputs.shape[1:]), inputs.device
    with torch.no_grad(), preserve_rng_and_buffers(net, device):
        state = net.initial_state(lanes, like=x)
        state = trees.map_leaves(torch.randn_like, state)
        own = parts.by_name(state) if parts.argument else state
        if type(own) is not dict or tuple(own) != parts.names:
            return False
        try:
            with fork_rng(device):
                y, after = net(x, state)
        except MISFIT_ERRORS:  # a graph will raise the same
            return False
        z = x if parts.front is None else parts.front(x)
        ends: dict[str, State] = {}
        for name, layer in parts.layers.items():
            z, ends[name] = LayerAdapter(layer).run(z, own[name])
        z = parts.tail(z, x)
        pairs = zip([y, *trees.tensors(after)], [z, *trees.tensors(ends)], strict=True)
        return all(
            a.shape == b.shape and torch.allclose(a, b, atol=tolerance([a]), rtol=tolerance([a]))
            for a, b in pairs
        )
