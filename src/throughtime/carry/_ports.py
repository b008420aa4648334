"""Where a module keeps a state inside: in submodules, by hooks that set and read it, or attributes.

A port is one recurrent submodule. While `PortHooks.run` calls the module, the first call of each
submodule takes the state that was carried, and the state that its last call returns is carried on.
Outside `run` the hooks do nothing. What one call of a module does shows which ports it has.

Shapes: `T` steps, `B` lanes, `H` hidden, `L` layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from throughtime import state as trees
from throughtime.carry._adapter import ResetsUnsupportedError, is_state, is_untouched
from throughtime.carry._names import names_state, parameters_of
from throughtime.errors import ModelError
from throughtime.nn.layers import Recurrent
from throughtime.state import State

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# One step on the path to a part of a module: where it is registered, its name, and the part
Link: TypeAlias = tuple[Mapping[str, Any], str, Any]


def links(module: nn.Module, path: str) -> Iterator[Link]:
    """The path from a module to a submodule or a parameter, which is replaced if a link changes.

    Ends at a TorchScript module, whose parts cannot be replaced.
    """
    for name in path.split(".") if path else ():
        if isinstance(module, torch.jit.ScriptModule):
            return
        registered = module._modules if name in module._modules else module._parameters
        yield registered, name, registered[name]
        module = cast("nn.Module", registered[name])


class Port(ABC):
    """Where one submodule takes its state and returns it."""

    @abstractmethod
    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """The state among the arguments of a call; None if there is none."""

    @abstractmethod
    def insert(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Arguments:
        """The arguments with another state."""

    @abstractmethod
    def leaving(self, result: Any) -> State:
        """The state that a call returned."""


@dataclass(frozen=True)
class ArgumentPort(Port):
    """A submodule with the state in one argument: `layer(input, hx) -> (y, hx)`.

    Attributes:
        position: of the argument.
        name: of the argument.
        kind: "layer" or "cell" of torch.nn, or "part" of the user's.
    """

    position: int
    name: str
    kind: Literal["layer", "cell", "part"]

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        return args[self.position] if len(args) > self.position else kwargs.get(self.name)

    def insert(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Arguments:
        position = self.position
        if len(args) < position:
            return args, {**kwargs, self.name: state}
        kwargs = {k: v for k, v in kwargs.items() if k != self.name} if kwargs else kwargs
        return (*args[:position], state, *args[position + 1 :]), kwargs

    def leaving(self, result: Any) -> State:
        return result if self.kind == "cell" else result[1]


LAYER, CELL = ArgumentPort(1, "hx", "layer"), ArgumentPort(1, "hx", "cell")


def is_torch(port: Port | None) -> bool:
    """Whether a port is a layer or a cell of torch.nn."""
    return isinstance(port, ArgumentPort) and port.kind != "part"


@dataclass(frozen=True)
class FlowPort(Port):
    """A cell of the user's: some arguments of a call are results of the call before.

    `slots` has the positions of such an argument and of the result, both in flattened order.
    """

    slots: tuple[tuple[int, int], ...]

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        leaves = pytree.tree_leaves((args, kwargs))
        return tuple(leaves[argument] for argument, _ in self.slots)

    def insert(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Arguments:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for (argument, _), leaf in zip(self.slots, state, strict=True):
            leaves[argument] = leaf
        return pytree.tree_unflatten(leaves, spec)

    def leaving(self, result: Any) -> State:
        leaves = pytree.tree_leaves(result)
        return tuple(leaves[item] for _, item in self.slots)


@dataclass(eq=False)
class PortCall:
    """One forward call of the module: the states that its ports take and return.

    Attributes:
        before: the states to set, by port; empty to record what the module passes itself.
        shape: `(T, B)`.
        resets: `(T, B)`, for layers that apply them.
        context: steps that a layer gets before those of this chunk, and must not run again.
        every: the port whose layer gives its state after every step, see `_at_every_step`.
        passed: what the module itself passed to the first call of each port.
        after: what the last call of each port returned.
        single: whether each layer was called once, with all steps of all lanes.
    """

    hooks: "PortHooks"
    before: Mapping[str, State]
    shape: torch.Size
    resets: Tensor | None = None
    context: int = 0
    every: str | None = None
    passed: dict[str, State] = field(default_factory=dict[str, State])
    after: dict[str, State] = field(default_factory=dict[str, State])
    single: bool = True


_active: ContextVar[PortCall | None] = ContextVar("_active", default=None)


class PortHooks:
    """The hooks on the submodules of one module."""

    def __init__(self, module: nn.Module, ports: Mapping[str, Port]) -> None:
        self.module, self.ports = module, ports
        self._layers = {name: module.get_submodule(name) for name in ports}
        self._links = [link for name in ports for link in links(module, name)]
        self._handles: list[Any] = []
        for name, layer in self._layers.items():
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            self._handles += [
                layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                layer.register_forward_hook(leave, prepend=True),
            ]

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def run(
        self,
        call: PortCall,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of `forward`, while the hooks act for `call`.

        Raises:
            ModelError: no port ran, or one cannot take its state.
        """
        for parts, name, part in self._links:
            if parts.get(name) is not part:
                raise _replaced_error(self.module, self.ports)
        token = _active.set(call)
        try:
            result = forward(*args, **kwargs)
        finally:
            _active.reset(token)
        if not call.after:
            raise _replaced_error(self.module, self.ports)
        return result

    def apply_resets(self) -> bool:
        """Whether every port is a layer of `tt.nn`, which can apply resets."""
        return all(isinstance(layer, Recurrent) for layer in self._layers.values())

    def _enter(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Before a call: its arguments with the carried state, if they change."""
        call, port = _active.get(), self.ports[name]
        if call is None or call.hooks is not self:
            _refuse_recompute(name)
            return None
        if isinstance(layer, nn.RNNBase):
            args, kwargs = _check_sequence(call, name, layer, args, kwargs)
        elif call.resets is not None:
            raise ResetsUnsupportedError
        if name in call.before and name not in call.after:
            if call.resets is not None:
                batch_first = getattr(layer, "batch_first", False)
                resets = call.resets.transpose(0, 1) if batch_first else call.resets
                kwargs = {**kwargs, "resets": resets}
            return port.insert(args, kwargs, call.before[name])
        if name not in call.after:
            call.passed[name] = port.entering(args, kwargs)
        elif is_torch(port):
            _check_continues(name, port.entering(args, kwargs), call.after[name])
        return (args, kwargs) if call.context else None

    def _leave(self, name: str, layer: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        """After a call: the state that it returned is carried."""
        del args
        call = _active.get()
        if call is None or call.hooks is not self:
            return None
        call.after[name] = self.ports[name].leaving(result)
        return _at_every_step(layer, *result) if call.every == name else None


def _check_sequence(
    call: PortCall, name: str, layer: nn.RNNBase, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """Check the sequence that a layer gets, and drop steps that it has run before.

    Raises:
        ModelError: a packed sequence.
        ResetsUnsupportedError: the layer gets other steps than those of the chunk.
    """
    sequence = args[0] if args else kwargs.get("input")
    if not isinstance(sequence, Tensor):
        raise ModelError(
            f"layer '{name}' gets a {type(sequence).__name__}; a stream needs no packing: pass"
            " the tensor of its steps"
        )
    time = int(layer.batch_first)
    steps, lanes = call.shape
    if call.context and sequence.dim() > time and sequence.shape[time] == steps + call.context:
        sequence = sequence.narrow(time, call.context, steps)
        args = (sequence, *args[1:])
        kwargs = {k: v for k, v in kwargs.items() if k != "input"}
    shape = (lanes, steps) if time else (steps, lanes)
    if len(args) > 2:
        args, kwargs = args[:2], {**kwargs, "resets": args[2]}
    if kwargs.get("resets") is not None or name in call.after or sequence.shape[:2] != shape:
        call.single = False
    if call.resets is not None and not call.single:
        raise ResetsUnsupportedError
    return args, kwargs


def _at_every_step(layer: nn.Module, y: Tensor, hx: State) -> tuple[Tensor, State]:
    """The result of a layer as if each step were the last of a sequence of its own.

    What the module computes from the last output, or from the last hidden state of the top layer,
    it then computes for every step at once. States that are unknown within a sequence are NaN.
    """
    batch_first = bool(getattr(layer, "batch_first", False))
    rows = y.flatten(0, 1)
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    h = rows.new_full((states[0].shape[0], rows.shape[0], states[0].shape[-1]), torch.nan)
    h = torch.cat([h[:-1], rows.unsqueeze(0)])
    count = rows.shape[0]  # len(rows) would fix the lanes of an exported program
    unknown = [rows.new_full((s.shape[0], count, s.shape[-1]), torch.nan) for s in states[1:]]
    outputs = rows.unsqueeze(1 if batch_first else 0)
    return outputs, h if isinstance(hx, Tensor) else (h, *unknown)


def _refuse_recompute(name: str) -> None:
    """Refuse a checkpointed forward that runs again in the backward pass, without its state."""
    # torch.utils.checkpoint itself detects a running backward pass so; there is no public way.
    if torch._C._current_graph_task_id() != -1:
        raise ModelError(
            f"layer '{name}' is run again inside a backward pass, by activation checkpointing: its"
            " carried state is gone by then. Let forward(x, state) return (y, state), so that the"
            " state is an argument of what is checkpointed."
        )


def _check_continues(name: str, passed: State, last: State) -> None:
    """Check that a layer's second call in one forward continues the sequence of its first."""
    if passed is not None:
        pairs = zip(trees.tensors(passed), trees.tensors(last), strict=True)
        if all(a is b for a, b in pairs):
            return  # the usual loop over a cell, decided without reading a value
    if passed is None or (is_untouched(passed) and not is_untouched(last)):
        raise ModelError(
            f"layer '{name}' runs twice in one forward, the second time without a state: two"
            " sequences through one layer have two states. Let forward(x, state) return (y,"
            " state)."
        )


def _replaced_error(module: nn.Module, ports: Mapping[str, Port]) -> ModelError:
    return ModelError(
        f"none of the recurrent layers {list(ports)} ran in {type(module).__name__}.forward: they"
        " were replaced after tt.carry (carry it again), or are not used"
    )


Key: TypeAlias = tuple[str, str]  # of an attribute: the path of its module, its name
RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def has_layers(module: nn.Module) -> bool:
    """Whether a module is, or has inside, a recurrent layer or cell of torch.nn."""
    return any(isinstance(part, RECURRENT) for part in module.modules())


class PartCall(NamedTuple):
    """One call of a submodule."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def observe(module: nn.Module, forward: Callable[[], Any]) -> dict[str, list[PartCall]]:
    """All calls of submodules during one call of `forward`, by name."""
    calls: dict[str, list[PartCall]] = {}

    def record(name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(name, []).append(PartCall(args, kwargs, result))

    handles = [
        part.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, part in module.named_modules()
        if name
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def within(name: str, outer: str) -> bool:
    """Whether a submodule is another one, or in it."""
    return name == outer or name.startswith(f"{outer}.")


def torch_ports(
    module: nn.Module, calls: dict[str, list[PartCall]] | None, steps: int
) -> dict[str, Port]:
    """The recurrent layers and cells of torch.nn that ran once, or once for each step.

    All that the module has if `calls` are unknown. Layers that run over another dimension than
    time, and bidirectional ones, have no state that could be carried.
    """
    ports: dict[str, Port] = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            ran = calls is None or _runs_over_time(part, calls.get(name, []), steps)
            if ran and not part.bidirectional:
                ports[name] = LAYER
        elif isinstance(part, nn.RNNCellBase) and (
            calls is None or len(calls.get(name, [])) == steps
        ):
            ports[name] = CELL
    return ports


def _runs_over_time(layer: nn.RNNBase, calls: list[PartCall], steps: int) -> bool:
    if len(calls) != 1:
        return bool(calls)
    sequence = calls[0].args[0] if calls[0].args else calls[0].kwargs.get("input")
    if not isinstance(sequence, Tensor) or sequence.dim() != 3:
        return True
    return sequence.shape[int(layer.batch_first)] == steps


def flow_ports(calls: dict[str, list[PartCall]], steps: int) -> dict[str, Port]:
    """Submodules that receive, step after step, what they returned at the step before."""
    ports: dict[str, Port] = {}
    for name, of_part in calls.items():
        slots = _slots(of_part) if len(of_part) == steps > 1 else ()
        if slots:
            ports[name] = FlowPort(slots)
    return _outermost(ports)


def _slots(calls: list[PartCall]) -> tuple[tuple[int, int], ...]:
    """Positions of the arguments that are, at every call, a result of the call before."""
    received = [pytree.tree_leaves((call.args, call.kwargs)) for call in calls]
    returned = [pytree.tree_leaves(call.result) for call in calls]
    if len({len(leaves) for leaves in received}) > 1:
        return ()
    return tuple(
        (argument, item)
        for argument, leaf in enumerate(received[1])
        for item, result in enumerate(returned[0])
        if result is leaf
        and isinstance(received[0][argument], Tensor)
        and all(
            now[argument] is last[item]
            for now, last in zip(received[1:], returned[:-1], strict=True)
        )
    )


def parameter_ports(module: nn.Module, calls: dict[str, list[PartCall]]) -> dict[str, Port]:
    """Submodules of the user's that ran once, have an optional state and return `(y, state)`."""
    ports: dict[str, Port] = {}
    for name, (first, *others) in calls.items():
        part, result = module.get_submodule(name), first.result
        if others or isinstance(part, (*RECURRENT, torch.jit.ScriptModule)):
            continue
        if not (isinstance(result, tuple) and len(result) == 2 and is_state(result[1])):
            continue
        for position, p in enumerate(parameters_of(part.forward)):
            if position and p.default is None and names_state(p.name):
                by_name = p.kind is p.KEYWORD_ONLY  # beyond what a call passes by position
                ports[name] = ArgumentPort(position + by_name, p.name, "part")
                break
    return _outermost(ports)


def mirrors(
    ports: dict[str, Port], calls: dict[str, list[PartCall]], values: dict[Key, Any]
) -> tuple[Key, ...]:
    """The attributes in which a module keeps what its ports returned, detached or not."""
    returned = {
        leaf.data_ptr()
        for name, port in ports.items()
        for leaf in pytree.tree_leaves(port.leaving(calls[name][-1].result))
        if isinstance(leaf, Tensor)
    }

    def mirrors_state(value: Any) -> bool:
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        return any(leaf.data_ptr() in returned for leaf in leaves)

    return tuple(key for key, value in values.items() if mirrors_state(value))


def _outermost(ports: dict[str, Port]) -> dict[str, Port]:
    return {
        name: port
        for name, port in ports.items()
        if not any(other != name and within(name, other) for other in ports)
    }


_OF_EVERY_MODULE = vars(nn.Module()).keys()


def attributes(module: nn.Module) -> dict[Key, Any]:
    """Plain attributes and buffers of all parts that could hold a state, lists as copies."""
    values: dict[Key, Any] = {}
    for name, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if k not in _OF_EVERY_MODULE}
        for key, value in (own | dict(part._buffers)).items():
            if value is None or isinstance(value, (Tensor, tuple, list, dict)):
                values[name, key] = list(value) if isinstance(value, list) else value
    return values


def changed_attributes(before: dict[Key, Any], after: dict[Key, Any]) -> tuple[Key, ...]:
    """The attributes that hold other tensors than before."""

    def changed(key: Key) -> bool:
        new, old = pytree.tree_leaves(after[key]), pytree.tree_leaves(before.get(key))
        if not any(isinstance(leaf, Tensor) for leaf in new):
            return False
        return len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True))

    return tuple(key for key in after if changed(key))
