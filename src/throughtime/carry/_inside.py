"""A state inside a module: in submodules, where hooks set and read it, and in attributes.

A port is one recurrent submodule: a layer or cell of torch.nn, or a cell of the user's, whose
arguments after the first come back as the last tensors of its result. While `PortHooks.run` calls
the module, the first call of each port takes the state that was carried, and the state that its
last call returns is carried on. Outside `run` the hooks do nothing.

Shapes: `T` steps, `B` lanes.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from throughtime.errors import ModelError
from throughtime.state import State

Key: TypeAlias = tuple[str, str]  # of an attribute: the path of its module, its name
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
MISSING = object()  # the value of an attribute that a module does not have yet
INPUT_NAMES = {
    *("x", "input", "inputs", "obs", "observation", "observations", "data", "input_tensor", "like"),
    *("emb", "tokens", "features", "sequence", "seq", "frame", "signal", "u"),
}
STATE_NAME = re.compile(
    r"^[sm]$|(^|_)(h|c|hx|cx|hxs|h0|c0|hc|mems|syn|cache|carry|past|context|buffer|hid\w*|state\w*"
    r"|cell\w*|mem\w*)(_|$)"
)


def parameters_of(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a method by name, without self; those by keyword alone are the last."""
    if not callable(method):  # forward = None, as some write
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(method).parameters.values() if p.kind not in variable]


def is_turned(parameters: list[inspect.Parameter]) -> bool:
    """Whether a method takes its state before its inputs, by their names: no law would show it."""
    first, second = [*(p.name for p in parameters), "", ""][:2]
    if first in INPUT_NAMES or not second:
        return False
    return second in INPUT_NAMES or names_state(first) > names_state(second)


def names_state(name: str) -> bool:
    """Whether a name is one that people give a state: `hidden`, `h_prev`, `rnn_hxs`, `mems`."""
    plain = re.sub("prev|init", "", name.lower().strip("_0123456789"))
    return STATE_NAME.search(plain.strip("_")) is not None


class Port(NamedTuple):
    """How a recurrent submodule takes its state after its inputs, and returns it last.

    Attributes:
        structure: of the state.
        arguments: how many they are.
    """

    structure: pytree.TreeSpec
    arguments: int = 1

    def leaving(self, result: Any) -> State:
        """The state that a call returned."""
        last = pytree.tree_leaves(result)[-self.structure.num_leaves :]
        return pytree.tree_unflatten(last, self.structure)


@dataclass(eq=False)
class PortCall:
    """One forward call of a module: the states that its ports take and return.

    Attributes:
        before: the states to set, by port; empty to record what the module passes itself.
        steps: T.
        context: steps that a layer gets before those of this chunk, and must not run again.
        passed: what the module itself passed to the first call of each port.
        after: what the last call of each port returned.
    """

    before: Mapping[str, State]
    steps: int
    context: int = 0
    passed: dict[str, State] = field(default_factory=dict[str, State])
    after: dict[str, State] = field(default_factory=dict[str, State])


_active: ContextVar[Any] = ContextVar("_active", default=(None, None))  # hooks and their call


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

    def run(self, call: PortCall, args: Any) -> Any:
        """The result of the module, while the hooks act for a call.

        Raises:
            ModelError: no port ran, or one was replaced.
        """
        token = _active.set((self, call))
        try:
            result = self.module(*args)
        finally:
            _active.reset(token)
        get = self.module.get_submodule
        if not call.after or any(get(name) is not part for name, part in self._layers.items()):
            raise ModelError(
                f"none of the recurrent layers {[*self.ports]} ran in"
                f" {type(self.module).__name__}.forward: they were replaced after tt.carry (carry"
                " it again), or are not used"
            )
        return result

    def _enter(self, name: str, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before a call: its arguments with the carried state, if they change."""
        hooks, call = _active.get()
        if hooks is not self:
            # torch.utils.checkpoint itself notices a running backward pass so
            if torch._C._current_graph_task_id() != -1:
                raise ModelError(
                    f"layer '{name}' is run again inside a backward pass, by activation"
                    " checkpointing: its carried state is gone by then. Let forward(x, state)"
                    " return (y, state), so that the state is an argument of what is checkpointed."
                )
            return None
        x, *states = _positional(args, kwargs)
        if isinstance(layer, nn.RNNBase):
            if not isinstance(x, Tensor):
                raise ModelError(
                    f"layer '{name}' gets a {type(x).__name__}; a stream needs no packing:"
                    " pass the tensor of its steps"
                )
            time = int(layer.batch_first)
            if call.context and x.shape[time] == call.steps:
                x = x.narrow(time, call.context, call.steps - call.context)
        if name not in call.after:
            count = self.ports[name].arguments
            if name in call.before:
                state = call.before[name]
                states[:count] = (state,) if count == 1 else state
            else:
                call.passed[name] = (*states,) if count > 1 else [*states, None][0]
        return (x, *states), kwargs

    def _leave(self, name: str, layer: nn.Module, _: Any, result: Any) -> None:
        """After a call: the state that it returned is carried."""
        hooks, call = _active.get()
        if hooks is self:
            is_layer = isinstance(layer, nn.RNNBase)  # the usual case, in every chunk
            call.after[name] = result[1] if is_layer else self.ports[name].leaving(result)


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments by position, with the inputs and the state of a layer of torch.nn."""
    return (*args, *(kwargs.pop(name) for name in ("input", "hx") if name in kwargs))


# ---------------------------------------------------------------- what one call shows


def ports_of(
    module: nn.Module, forward: Callable[[], Any], steps: tuple[int, ...]
) -> list[dict[str, Port]]:
    """The recurrent submodules that one call of `forward` with a number of `steps` shows.

    Those of torch.nn; then with cells of the user's, but for those inside another.
    """
    calls: dict[str, list[tuple[tuple[Any, ...], Any]]] = {}

    def record(name: str, _: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if args := _positional(args, kwargs):  # a parametrization may get none
            calls.setdefault(name, []).append((args, result))

    parts = {name: part for name, part in module.named_modules() if name}
    handles = [
        part.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, part in parts.items()
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    ports = {
        name: port
        for name, of_part in calls.items()
        if (port := _port(parts[name], of_part, steps)) is not None
    }
    layers = {name: port for name, port in ports.items() if isinstance(parts[name], RECURRENT)}
    for inner in [name for name in ports for other in ports if name.startswith(f"{other}.")]:
        ports.pop(inner, None)
    return [layers, ports] if layers and layers != ports else [ports]


def _port(
    part: nn.Module, calls: list[tuple[tuple[Any, ...], Any]], steps: tuple[int, ...]
) -> Port | None:
    """How a submodule takes and returns a state, by its calls; None if it has none."""
    (x, *state), result = calls[-1]
    if isinstance(part, nn.RNNBase):
        # it may run over another dimension, such as frequency
        batches = isinstance(x, Tensor) and x.dim() == 3 and len(calls) == 1
        over_time = not batches or x.shape[int(part.batch_first)] in steps
        state = [result[1]] if over_time and not part.bidirectional else []
    elif len(calls) == 1 and isinstance(result, tuple) and {*map(type, state)} <= {type(None)}:
        # a part with an optional state
        names = [p.name for p in parameters_of(part.forward)[1:]]
        state = [result[-1]] if len(names) == 1 and names_state(names[0]) else []
    elif len(calls) not in steps or steps[0] == 1:
        state = []
    elif isinstance(part, nn.RNNCellBase):
        state = [result]
    leaves, last = pytree.tree_leaves(state), pytree.tree_leaves(result)
    shapes = [[getattr(leaf, "shape", None) for leaf in row] for row in (leaves, last)]
    if not state or shapes[1][-len(leaves) :] != shapes[0] or None in shapes[0]:
        return None
    return Port(pytree.tree_structure(state[0] if len(state) == 1 else (*state,)), len(state))


OF_EVERY_MODULE = vars(nn.Module()).keys() | vars(nn.RNN(1, 1, device="meta")).keys()
HOLDS = (type(None), Tensor, tuple, list, dict, int, float, np.ndarray)  # a state, or a counter


def attributes(module: nn.Module) -> dict[Key, Any]:
    """Copies of plain attributes and buffers of all parts that could hold a state."""
    return {
        (name, key): copied(value)
        for name, part in module.named_modules()
        for key, value in (vars(part) | part._buffers).items()
        if key not in OF_EVERY_MODULE
        and isinstance(value, HOLDS)
        # weights that weight_norm and spectral_norm of torch.nn.utils compute for each call
        and part._parameters.keys().isdisjoint((f"{key}_g", f"{key}_orig"))
    }


def key_name(key: Key) -> str:
    """An attribute as Python writes it, without the module: `memory.cells`."""
    return ".".join(filter(None, key))


def copied(value: Any) -> Any:
    """A value whose change in place leaves the original as it is."""
    if isinstance(value, Tensor):
        return value.clone() if type(value) is not nn.Parameter else value
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def get_attributes(module: nn.Module, keys: Iterable[Key]) -> dict[Key, Any]:
    """The values of attributes and buffers."""
    return {key: getattr(module.get_submodule(key[0]), key[1], MISSING) for key in keys}


def set_attributes(module: nn.Module, values: Mapping[Key, Any]) -> None:
    """Set attributes to copies, without the checks of `nn.Module.__setattr__`."""
    for (path, name), value in values.items():
        owner = module.get_submodule(path)
        own = owner._buffers if name in owner._buffers else owner.__dict__
        if value is MISSING:
            own.pop(name, None)
        else:
            own[name] = value
