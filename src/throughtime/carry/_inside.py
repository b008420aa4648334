"""A state inside a module: in submodules, where hooks set and read it, and in attributes.

A port is one recurrent submodule. While `PortHooks.run` calls the module, the first call of each
submodule takes the state that was carried, and the state that its last call returns is carried on.
Outside `run` the hooks do nothing. One observed call of a module shows which ports it has.

Shapes: `T` steps, `B` lanes.
"""

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from throughtime.carry._adapter import is_state
from throughtime.errors import ModelError
from throughtime.state import State

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Key: TypeAlias = tuple[str, str]  # of an attribute: the path of its module, its name
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
MISSING = object()  # the value of an attribute that a module does not have yet
INPUT_NAMES = {
    *("x", "input", "inputs", "obs", "observation", "observations", "data", "input_tensor", "like"),
    *("emb", "tokens", "features", "sequence", "seq", "frame", "signal", "u"),
}
STATE_NAME = re.compile(
    r"(^|_)(h|c|hx|cx|hxs|h0|c0|hc|s|m|mems|syn|cache|carry|past|context|buffer|hid\w*|state\w*"
    r"|cell\w*|mem\w*)(_|$)"
)


def parameters_of(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a method by name, without self; those by keyword alone are the last."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(method).parameters.values() if p.kind not in variable]


def is_turned(parameters: list[inspect.Parameter]) -> bool:
    """Whether a method takes its state before its inputs, by their names: no law would show it."""
    if len(parameters) < 2 or parameters[0].name in INPUT_NAMES:
        return False
    first, second = (p.name for p in parameters[:2])
    return second in INPUT_NAMES or (names_state(first) and not names_state(second))


def names_state(name: str) -> bool:
    """Whether a name is one that people give a state: `hidden`, `h_prev`, `rnn_hxs`, `mems`."""
    plain = re.sub("prev|init", "", name.lower().strip("_0123456789"))
    return STATE_NAME.search(plain.strip("_")) is not None


class Port(NamedTuple):
    """Where a submodule takes its state and returns it.

    Attributes:
        item: of the result that is the next state; None for all of it.
        position: of the argument that is the state.
        name: of that argument.
        slots: of a cell of the user's, instead: the positions of each argument that is a result of
            the call before, and of that result, in flattened order.
    """

    item: int | None = None
    position: int = 1
    name: str = "hx"
    slots: tuple[tuple[int, int], ...] = ()

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> State:
        """The state among the arguments of a call; None if there is none."""
        if self.slots:
            leaves = pytree.tree_leaves((args, kwargs))
            return tuple(leaves[argument] for argument, _ in self.slots)
        return args[self.position] if len(args) > self.position else kwargs.get(self.name)

    def insert(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State) -> Arguments:
        """The arguments with another state."""
        if not self.slots:
            at = self.position
            if len(args) < at:
                return args, kwargs | {self.name: state}
            kwargs = {k: v for k, v in kwargs.items() if k != self.name} if kwargs else kwargs
            return (*args[:at], state, *args[at + 1 :]), kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for (argument, _), leaf in zip(self.slots, state, strict=True):
            leaves[argument] = leaf
        return pytree.tree_unflatten(leaves, spec)

    def leaving(self, result: Any) -> State:
        """The state that a call returned."""
        if not self.slots:
            return result if self.item is None else result[self.item]
        leaves = pytree.tree_leaves(result)
        return tuple(leaves[item] for _, item in self.slots)


LAYER, CELL = Port(1), Port()


@dataclass(eq=False)
class PortCall:
    """One forward call of the module: the states that its ports take and return.

    Attributes:
        before: the states to set, by port; empty to record what the module passes itself.
        steps: T.
        context: steps that a layer gets before those of this chunk, and must not run again.
        passed: what the module itself passed to the first call of each port.
        after: what the last call of each port returned.
    """

    hooks: "PortHooks"
    before: Mapping[str, State]
    steps: int
    context: int = 0
    passed: dict[str, State] = field(default_factory=dict[str, State])
    after: dict[str, State] = field(default_factory=dict[str, State])

    def run(self, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of `forward`, while the hooks act for this call.

        Raises:
            ModelError: no port ran, or one cannot take its state.
        """
        token = _active.set(self)
        try:
            result = forward(*args, **kwargs)
        finally:
            _active.reset(token)
        self.hooks.check(self.after)
        return result


_active: ContextVar[PortCall | None] = ContextVar("_active", default=None)


class PortHooks:
    """The hooks on the submodules of one module."""

    def __init__(self, module: nn.Module, ports: Mapping[str, Port]) -> None:
        self.module, self.ports = module, ports
        self._layers = {name: module.get_submodule(name) for name in ports}
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

    def check(self, after: Mapping[str, State]) -> None:
        """Refuse a call in which no port ran, and one of a layer that was replaced."""
        get = self.module.get_submodule
        if not after or any(get(name) is not part for name, part in self._layers.items()):
            raise ModelError(
                f"none of the recurrent layers {[*self.ports]} ran in"
                f" {type(self.module).__name__}.forward: they were replaced after tt.carry (carry"
                " it again), or are not used"
            )

    def _enter(
        self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Before a call: its arguments with the carried state, if they change."""
        call, port = _active.get(), self.ports[name]
        if call is None or call.hooks is not self:
            # torch.utils.checkpoint itself notices a running backward pass so
            if torch._C._current_graph_task_id() != -1:
                raise ModelError(
                    f"layer '{name}' is run again inside a backward pass, by activation"
                    " checkpointing: its carried state is gone by then. Let forward(x, state)"
                    " return (y, state), so that the state is an argument of what is checkpointed."
                )
            return None
        if isinstance(layer, nn.RNNBase):
            sequence = args[0] if args else kwargs.pop("input")
            if not isinstance(sequence, Tensor):
                raise ModelError(
                    f"layer '{name}' gets a {type(sequence).__name__}; a stream needs no packing:"
                    " pass the tensor of its steps"
                )
            time = int(layer.batch_first)
            if call.context and sequence.shape[time] == call.steps:
                sequence = sequence.narrow(time, call.context, call.steps - call.context)
            args = (sequence, *args[1:])
        if name in call.after:
            return args, kwargs
        if name not in call.before:
            call.passed[name] = port.entering(args, kwargs)
            return args, kwargs
        return port.insert(args, kwargs, call.before[name])

    def _leave(self, name: str, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        """After a call: the state that it returned is carried."""
        del layer, args
        call = _active.get()
        if call is not None and call.hooks is self:
            call.after[name] = self.ports[name].leaving(result)


# ---------------------------------------------------------------- what one call shows


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


def is_torch(port: Port | None) -> bool:
    """Whether a port is a layer or a cell of torch.nn."""
    return port in (LAYER, CELL)


def ports_of(
    module: nn.Module, calls: dict[str, list[PartCall]], steps: int
) -> list[dict[str, Port]]:
    """The recurrent submodules that one call showed: those of torch.nn, then with the user's."""
    torch_ports: dict[str, Port] = {}
    others: dict[str, Port] = {}
    for name, of_part in calls.items():
        part = module.get_submodule(name)
        if isinstance(part, nn.RNNBase):
            if not part.bidirectional and _runs_over_time(part, of_part, steps):
                torch_ports[name] = LAYER
        elif isinstance(part, nn.RNNCellBase):
            if len(of_part) == steps:
                torch_ports[name] = CELL
        elif len(of_part) == steps > 1 and (slots := _slots(of_part)):
            others[name] = Port(slots=slots)
        elif len(of_part) == 1 and (port := _option(part, of_part[0].result)) is not None:
            others[name] = port
    every = _outermost(others | torch_ports)
    return [ports for ports in (torch_ports, every) if ports][: 1 + (every != torch_ports)]


def _runs_over_time(layer: nn.RNNBase, calls: list[PartCall], steps: int) -> bool:
    """Whether a layer runs over steps, not over another dimension such as frequency."""
    first, *others = calls
    sequence = first.args[0] if first.args else first.kwargs.get("input")
    if others or not isinstance(sequence, Tensor) or sequence.dim() != 3:
        return True
    return sequence.shape[int(layer.batch_first)] == steps


def _option(part: nn.Module, result: Any) -> Port | None:
    """That of a part of the user's with an optional state, which returns `(y, state)`."""
    if isinstance(result, tuple) and len(result) == 2 and is_state(result[1]):
        for position, p in enumerate(parameters_of(part.forward)):
            if position and p.default is None and names_state(p.name):
                # beyond what a call passes by position
                return Port(1, position + (p.kind is p.KEYWORD_ONLY), p.name)
    return None


def _slots(calls: list[PartCall]) -> tuple[tuple[int, int], ...]:
    """Positions of the arguments that are, at every call, a result of the call before."""
    received = [pytree.tree_leaves((call.args, call.kwargs)) for call in calls]
    returned = [pytree.tree_leaves(call.result) for call in calls]
    if len({len(leaves) for leaves in received}) > 1:
        return ()
    return tuple(
        (argument, item)
        for argument in range(len(received[0]))
        for item in range(len(returned[0]))
        if isinstance(received[0][argument], Tensor)
        and all(
            now[argument] is last[item]
            for now, last in zip(received[1:], returned[:-1], strict=True)
        )
    )


def _outermost(ports: dict[str, Port]) -> dict[str, Port]:
    """Without those inside another one."""
    return {
        name: port
        for name, port in ports.items()
        if not any(name.startswith(f"{other}.") for other in ports)
    }


_OF_EVERY_MODULE = vars(nn.Module()).keys() | vars(nn.RNN(1, 1, device="meta")).keys()
HOLDS = (type(None), Tensor, tuple, list, dict, int, float, np.ndarray)  # a state, or a counter


def attributes(module: nn.Module) -> dict[Key, Any]:
    """Copies of plain attributes and buffers of all parts that could hold a state."""
    return {
        (name, key): copied(value)
        for name, part in module.named_modules()
        for key, value in (vars(part) | dict(part._buffers)).items()
        if key not in _OF_EVERY_MODULE and isinstance(value, HOLDS)
    }


def key_name(key: Key) -> str:
    """An attribute as Python writes it, without the module: `memory.cells`."""
    return ".".join(filter(None, key))


def attribute(module: nn.Module, key: Key) -> Any:
    """The value of an attribute or a buffer of a submodule."""
    return getattr(module.get_submodule(key[0]), key[1], MISSING)


def copied(value: Any) -> Any:
    """A value whose change in place leaves the original as it is."""
    if isinstance(value, Tensor):
        return value.clone() if type(value) is not nn.Parameter else value
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def set_attributes(module: nn.Module, values: Mapping[Key, Any]) -> dict[Key, Any]:
    """Set attributes, without the checks of `nn.Module.__setattr__`; returns those before."""
    saved = {key: attribute(module, key) for key in values}
    for (path, name), value in values.items():
        owner = module.get_submodule(path)
        own = owner._buffers if name in owner._buffers else owner.__dict__
        if value is MISSING:
            own.pop(name, None)
        else:
            own[name] = value
    return saved
