"""The parts of a net that can be updated in one call: front, recurrent layers, linear readout.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile

import torch
from torch import Tensor, nn
from torch.nn import functional

from throughtime import state as trees
from throughtime.carry._adapter import Adapter
from throughtime.carry.carried import Carried
from throughtime.carry.layers import ChainAdapter, LayerAdapter, StatelessAdapter
from throughtime.gradient._memory import generators, preserve_rng_and_buffers, set_generators
from throughtime.gradient._segments import tolerance
from throughtime.gradient._structure import Operation, Structure, is_foreign, read_structure
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
        readout: reads the outputs of the last layer.
        others: all other modules that run.
        front: maps inputs to those of the first layer; None if they are the same.
        front_modules: those of the front.
        foreign_front: whether the front runs code that is none of torch's.
        argument: whether the net's state is that of the only layer, or a tuple of those of several,
            not a dict.
        log_probabilities: whether the outputs are the log-softmax of the readout.
        zero_start: whether recordings start from a state of zeros.
    """

    adapter: Adapter
    holds: Callable[[], bool]
    names: tuple[str, ...]
    layers: Mapping[str, Recurrent]
    readout: nn.Linear
    others: tuple[nn.Module, ...] = ()
    front: Callable[[Tensor], Tensor] | None = None
    front_modules: tuple[nn.Module, ...] = ()
    foreign_front: bool = False
    argument: bool = False
    log_probabilities: bool = False
    zero_start: bool = True

    def by_name(self, state: State) -> State:
        """The state of the net by the names of its layers."""
        if not self.argument:
            return state
        if len(self.names) == 1:
            return {self.names[0]: state}
        several = type(state) is tuple and len(state) == len(self.names)
        return dict(zip(self.names, state, strict=True)) if several else None

    def of_net(self, state: State) -> State:
        """The inverse of `by_name`."""
        if not self.argument:
            return state
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
    *below, (_, top) = adapter.links.items()
    front = {
        name: link
        for name, link in takewhile(lambda pair: isinstance(pair[1], StatelessAdapter), below)
        if isinstance(link, StatelessAdapter)
    }
    layers = {
        name: link.module
        for name, link in below
        if isinstance(link, LayerAdapter) and isinstance(link.module, Recurrent)
    }
    if not layers or len(front) + len(layers) < len(below):
        return None
    if not isinstance(top, StatelessAdapter) or not isinstance(top.module, nn.Linear):
        return None
    before, children = tuple(link.module for link in front.values()), adapter.module._modules
    chain, no_state = ChainAdapter(nn.Sequential(*before), before, front), dict.fromkeys(front, ())
    return Parts(
        adapter,
        lambda: tuple(children.values()) == adapter.children,
        tuple(adapter.links),
        layers,
        top.module,
        (adapter.module, *before),
        (lambda x: chain.run(x, no_state)[0]) if front else None,
        before,
        any(module._modules or is_foreign(module) for module in before),
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
    readout = _readout(structure.tail)
    operations = (*structure.front, *structure.tail)
    targets = [op.target for op in operations if isinstance(op.target, nn.Module)]
    others = (*(called for called, _ in structure.guards.methods), *targets)
    others += tuple(part for target in targets for part in target.modules() if part is not target)
    if readout is None or any(getattr(part, "inplace", False) for part in others):
        return None
    layers = _layers_by_name(module, structure)
    front = None
    if structure.front:
        batch_first = structure.layers[0].batch_first
        front = partial(_run_front, adapter, structure.front, batch_first)
    parts = Parts(
        adapter,
        structure.guards.hold,
        tuple(layers),
        layers,
        readout,
        tuple(part for part in others if part is not readout),
        front,
        tuple(op.target for op in structure.front if isinstance(op.target, nn.Module)),
        argument=bool(structure.paths),
        log_probabilities=len(structure.tail) > 1,
        zero_start=adapter.starts_from_zeros(),
    )
    return parts if _computes_the_same(net, parts, inputs) else None


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


def _readout(tail: Sequence[Operation]) -> nn.Linear | None:
    """The linear readout, if nothing follows but the log-softmax of its outputs."""
    if not tail or not isinstance(tail[0].target, nn.Linear) or len(tail) > 2:
        return None
    if len(tail) == 2:
        target, args, kwargs = tail[1]
        functions = (functional.log_softmax, torch.log_softmax, "log_softmax")
        is_last = ((*args, *kwargs.values()) in {(-1,), (2,)}) and not {*kwargs} - {"dim"}
        if isinstance(target, nn.LogSoftmax):
            is_last = target.dim in {-1, 2}
        elif not any(target is function or target == function for function in functions):
            return None
        if not is_last:
            return None
    return tail[0].target


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
        own = parts.by_name(state)
        if type(own) is not dict or tuple(own) != parts.names:
            return False
        random = generators(device)
        y, after = net(x, state)
        set_generators(random, device)
        z = x if parts.front is None else parts.front(x)
        ends: dict[str, State] = {}
        for name, layer in parts.layers.items():
            z, ends[name] = LayerAdapter(layer).run(z, own[name])
        z = functional.linear(z, parts.readout.weight, parts.readout.bias)
        if parts.log_probabilities:
            z = z.log_softmax(-1)
        pairs = zip(
            [y, *trees.tensors(after)], [z, *trees.tensors(parts.of_net(ends))], strict=True
        )
        return all(
            a.shape == b.shape and torch.allclose(a, b, atol=tolerance(a), rtol=tolerance(a))
            for a, b in pairs
        )
