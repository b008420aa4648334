"""The parts of a net whose layers are run by the compiled core: front, recurrent layers, readout.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from throughtime import state as trees
from throughtime.carry._adapter import Adapter
from throughtime.carry.carried import MISFIT_ERRORS, Carried
from throughtime.carry.layers import ChainAdapter, LayerAdapter, StatelessAdapter
from throughtime.gradient._memory import generators, preserve_rng_and_buffers, set_generators
from throughtime.gradient._segments import tolerance
from throughtime.gradient._structure import (
    Guards,
    Operation,
    Structure,
    is_foreign,
    is_identity,
    read_structure,
)
from throughtime.nn.layers import Recurrent
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a net, as they were when they were read.

    Attributes:
        adapter: of the net.
        holds: whether the modules are still put together in this way.
        names: the keys of the state, in order.
        layers: the recurrent layers, from the inputs to the outputs, by their names in the state.
        readout: reads the outputs of the last layer; None if the tail does.
        tail: maps the outputs of the last layer, for so many inputs, to those of the net.
        others: all other modules that run.
        front: maps inputs to those of the first layer; None if they are the same.
        front_modules: those of the front.
        foreign_front: whether the front runs code that is none of torch's.
        argument: whether the net's state is that of the only layer, or a tuple of those of several,
            not a dict.
        log_probabilities: whether the outputs are the log-softmax of the readout.
        random_tail: whether the tail draws random numbers.
        zero_start: whether recordings start from a state of zeros.
    """

    adapter: Adapter
    holds: Callable[[], bool]
    names: tuple[str, ...]
    layers: Mapping[str, Recurrent]
    readout: nn.Linear | None
    tail: Callable[[Tensor, Tensor], Tensor]
    others: tuple[nn.Module, ...] = ()
    front: Callable[[Tensor], Tensor] | None = None
    front_modules: tuple[nn.Module, ...] = ()
    foreign_front: bool = False
    argument: bool = False
    log_probabilities: bool = False
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
    adapter = net.adapter
    parts = (
        _chain_parts(adapter)
        if isinstance(adapter, ChainAdapter)
        else _module_parts(net, net.module, adapter, inputs)
    )
    if parts is None:
        return None
    for lower, upper in pairwise(parts.layers.values()):
        if upper.input_size != (lower.proj_size or lower.hidden_size):
            return None
    return parts


def _chain_parts(adapter: ChainAdapter) -> Parts | None:
    """Those of an `nn.Sequential`."""
    guards, children = Guards(), adapter.module._modules
    links = {
        name: link
        for name, link in adapter.links.items()
        if not (isinstance(link, StatelessAdapter) and is_identity(link.module, guards))
    }
    recurrent = [name for name, link in links.items() if not isinstance(link, StatelessAdapter)]
    layers = {
        name: link.module
        for name, link in links.items()
        if isinstance(link, LayerAdapter) and isinstance(link.module, Recurrent)
    }
    names = [*links]
    first, stop = names.index(recurrent[0]), names.index(recurrent[-1]) + 1
    if [*layers] != names[first:stop]:
        return None
    before, after = (
        {name: link for name, link in links.items() if name in part}
        for part in (names[:first], names[stop:])
    )
    modules = [
        tuple(link.module for link in part.values() if isinstance(link, StatelessAdapter))
        for part in (before, after)
    ]
    front, tail = (
        ChainAdapter(nn.Sequential(*part), part, part_links)
        for part, part_links in zip(modules, (before, after), strict=True)
    )
    others = tuple(part for module in (*modules[0], *modules[1]) for part in module.modules())
    readout, log_probabilities = _readout([Operation(module) for module in modules[1]])
    if readout is None and not _may_be_tail(modules[1]):
        return None
    no_state, is_whole = dict.fromkeys(links, ()), len(links) == len(adapter.links)
    return Parts(
        adapter,
        lambda: tuple(children.values()) == adapter.children and (is_whole or guards.hold()),
        tuple(adapter.links),
        layers,
        readout,
        lambda y, _: tail.run(y, no_state)[0],
        (adapter.module, *(part for part in others if part is not readout)),
        (lambda x: front.run(x, no_state)[0]) if before else None,
        modules[0],
        any(module._modules or is_foreign(module) for module in modules[0]),
        log_probabilities=log_probabilities,
        random_tail=_draws(modules[1]),
    )


def _module_parts(
    net: Carried, module: nn.Module, adapter: Adapter, inputs: Tensor
) -> Parts | None:
    """Those of a module of the user's, whose forward is read and then tried."""
    arguments = adapter.forward_arguments(inputs[:1], ())
    if arguments is None:
        return None
    structure = read_structure(module, takes_state=len(arguments) == 2)
    if structure is None:
        return None
    readout, log_probabilities = _readout(structure.tail)
    layers = _layers_by_name(module, structure)
    front, tail = (
        tuple(op.target for op in part if isinstance(op.target, nn.Module))
        for part in (structure.front, structure.tail)
    )
    others = [called for called, _ in structure.guards.methods]
    others += [part for target in (*front, *tail) for part in target.modules()]
    in_place = any(getattr(part, "inplace", False) for part in front)
    if in_place or (readout is None and not _may_be_tail(tail)):
        return None
    batch_first = structure.layers[0].batch_first, structure.layers[-1].batch_first
    parts = Parts(
        adapter,
        structure.guards.hold,
        tuple(layers),
        layers,
        readout,
        partial(_run_tail, adapter, structure.tail, batch_first[1]),
        tuple(part for part in others if part is not readout),
        partial(_run_front, adapter, structure.front, batch_first[0]) if structure.front else None,
        front,
        argument=bool(structure.paths),
        log_probabilities=log_probabilities,
        random_tail=_draws(tail),
        zero_start=adapter.starts_from_zeros(),
    )
    return parts if _computes_the_same(net, parts, inputs) else None


def _may_be_tail(modules: Sequence[nn.Module]) -> bool:
    """Whether modules may run by autograd on the outputs of a kernel, as often as by a graph."""
    return not any(
        is_foreign(part) or getattr(part, "inplace", False) or bool(part._buffers)
        for module in modules
        for part in module.modules()
    )


def _draws(modules: Sequence[nn.Module]) -> bool:
    """Whether modules draw random numbers: `p` of dropouts, those of RReLU."""
    parts = [part for module in modules for part in module.modules()]
    return any(hasattr(part, "p") or isinstance(part, nn.RReLU) for part in parts)


def _run_tail(
    adapter: Adapter, operations: Sequence[Operation], batch_first: bool, y: Tensor, x: Tensor
) -> Tensor:
    """The outputs of the net, time first."""
    y = y.transpose(0, 1) if batch_first else y
    for operation in operations:
        y = operation(y)
    return adapter.read_outputs(y, x)


def _run_front(
    adapter: Adapter, operations: Sequence[Operation], batch_first: bool, inputs: Tensor
) -> Tensor:
    """The inputs of the first layer, time first."""
    arguments = adapter.forward_arguments(inputs, ())
    x: Tensor = inputs if arguments is None else arguments[0]
    for operation in operations:
        x = operation(x)
    return x.transpose(0, 1) if batch_first else x


def _layers_by_name(module: nn.Module, structure: Structure) -> dict[str, Recurrent]:
    """The layers by their names in the state: those of the module, where hooks set the state."""
    if structure.paths:
        return {str(i): layer for i, layer in enumerate(structure.layers)}
    names = {layer: name for name, layer in module.named_modules()}
    return {names[layer]: layer for layer in structure.layers}


def _readout(tail: Sequence[Operation]) -> tuple[nn.Linear | None, bool]:
    """The linear readout, if only the log-softmax of its outputs may follow; whether that does."""
    if not tail or type(tail[0].target) is not nn.Linear or len(tail) > 2:
        return None, False
    if len(tail) == 1:
        return tail[0].target, False
    target, args, kwargs = tail[1]
    dims = (*args, *kwargs.values())
    if isinstance(target, nn.LogSoftmax):
        dims = (target.dim,)
    elif target not in (functional.log_softmax, torch.log_softmax, "log_softmax"):
        return None, False
    return (tail[0].target, True) if dims in {(-1,), (2,)} else (None, False)


def _computes_the_same(net: Carried, parts: Parts, inputs: Tensor) -> bool:
    """Whether the net gives the outputs and the state that its parts give, in a trial."""
    lanes = inputs.shape[1]
    steps = 2 if lanes == 3 else 3  # another number than lanes, so that they are told apart
    x, device = inputs[:1].expand(steps, *inputs.shape[1:]), inputs.device
    with torch.no_grad(), preserve_rng_and_buffers(net, device):
        state = net.initial_state(lanes, like=x)
        if not all(map(trees.differentiable, trees.tensors(state))):
            return False
        state = trees.map_leaves(torch.randn_like, state)
        own = parts.by_name(state) if parts.argument else state
        if type(own) is not dict or tuple(own) != parts.names:
            return False
        random = generators(device)
        try:
            y, after = net(x, state)
        except MISFIT_ERRORS:  # a graph will raise the same
            return False
        set_generators(random, device)
        z = x if parts.front is None else parts.front(x)
        ends: dict[str, State] = {}
        for name, layer in parts.layers.items():
            z, ends[name] = LayerAdapter(layer).run(z, own[name])
        z = parts.tail(z, x)
        pairs = zip([y, *trees.tensors(after)], [z, *trees.tensors(ends)], strict=True)
        return all(
            a.shape == b.shape and torch.allclose(a, b, atol=tolerance(a), rtol=tolerance(a))
            for a, b in pairs
        )
