"""How a module is called: its inputs, its state, where a recording starts, and its outputs.

A convention is a description without the module: it fits each copy on which it is tried, and
`BoundModule` calls a module by it.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from throughtime import state as trees
from throughtime._device import fork_rng
from throughtime.carry._adapter import NO_LANES, Adapter, LaneLayout
from throughtime.carry._inside import (
    INPUT_NAMES,
    MISSING,
    Key,
    Port,
    PortCall,
    PortHooks,
    attribute,
    copied,
    is_torch,
    key_name,
    names_state,
    parameters_of,
    set_attributes,
)
from throughtime.errors import ModelError, StateError
from throughtime.state import State

Call = Literal["chunk", "step", "last"]
Path = tuple["int | str | slice", ...]  # of an item in what a module returned
_setting = threading.RLock()  # held while attributes of a module hold the state of one call
PAST, STATE = "past", "state"  # keys where a module gets the steps before a chunk

CALLS: dict[Call, str] = {
    "chunk": "one call for each chunk",
    "step": "one call for each step, without a time dimension",
    "last": "one call for each step, as a chunk of length 1",
}
INPUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "TB": ("(T, B, ...)", lambda x: x),
    "BT": ("(B, T, ...)", lambda x: x.transpose(0, 1).contiguous()),  # modules call `view`
    "BDT": ("(B, D, T)", lambda x: x.movedim(0, -1).contiguous()),
    "T": ("(T, ...), one lane", lambda x: x[:, 0]),
    "B": ("(B, ...)", lambda x: x[0]),
    "": ("(...), one step of one lane", lambda x: x[0, 0]),
}
OUTPUTS = {
    "TB": "(T, B, C)",
    "BT": "(B, T, C)",
    "BCT": "(B, C, T, ...)",
    "flat TB": "(T*B, C), steps first",
    "flat BT": "(B*T, C), lanes first",
    "T": "(T, C), one lane",
    "B": "(B, C)",
    "": "(C,), one step of one lane",
}
BATCH_NAMES = {"bs", "b", "n", "lanes", "n_lanes", "num_lanes", "num_envs", "n_envs", "bsz", "size"}


class MisfitError(Exception):
    """A result does not have the shape or the structure that a convention says."""


def item_at(result: Any, path: Path) -> Any:
    """The item of a result at a path.

    Raises:
        MisfitError: there is none.
    """
    for key in path:
        try:
            if isinstance(key, slice):
                result = tuple(result[key])
            elif isinstance(key, int) or isinstance(result, Mapping):
                result = result[key]
            else:
                result = getattr(result, key)
        except (LookupError, TypeError, AttributeError) as error:
            raise MisfitError(f"the result has no item {key!r}") from error
    return result


def tensor_paths(result: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in a result, at most three levels deep."""
    items: list[tuple[int | str, Any]] = []
    if isinstance(result, Tensor):
        yield path, result
    elif isinstance(result, Mapping):
        items = list(result.items())
    elif isinstance(result, (tuple, list)):
        items = list(enumerate(result))
    elif hasattr(result, "__dataclass_fields__"):
        items = [(name, getattr(result, name)) for name in result.__dataclass_fields__]
    for key, item in items if len(path) < 3 else ():
        yield from tensor_paths(item, (*path, key))


def path_name(path: Path) -> str:
    """A path as Python writes it: `[0]`, `['logits']`, `[1:]`."""
    return "".join(f"[{k.start}:]" if isinstance(k, slice) else f"[{k!r}]" for k in path)


@dataclass(frozen=True)
class OutputLayout:
    """Which item of a result the outputs are, and how they lie.

    Attributes:
        path: of the item.
        order: "TB", "BT", "flat TB", "flat BT", "BCT", "T" (one lane), "B" (one step), "".
        features: the shape of one output; None while it is unknown.
        several: the layouts of several items, whose features are read side by side, in a row.
    """

    path: Path = ()
    order: str = "TB"
    features: tuple[int, ...] | None = None
    several: tuple["OutputLayout", ...] = ()

    def read(self, result: Any, steps: int, lanes: int) -> Tensor:
        """The outputs `(T, B, ...)`.

        Raises:
            MisfitError: the item is no tensor, or its shape does not fit.
        """
        if self.several:
            items = (item.read(result, steps, lanes) for item in self.several)
            return torch.cat([item.reshape(steps, lanes, -1) for item in items], -1)
        y, order, features = item_at(result, self.path), self.order, self.features
        if not isinstance(y, Tensor):
            raise MisfitError(f"returned a {type(y).__name__}, expected one tensor of outputs")
        lane_major = order in ("BT", "flat BT", "BCT")
        dims = (lanes, steps) if lane_major else (steps, lanes)
        leading = {"T": (steps,), "B": (lanes,), "": ()}.get(order, dims)
        leading = (steps * lanes,) if order.startswith("flat") else leading
        if order == "BCT" and y.dim() > 2:
            y = y.movedim(2, 1)
        fits = y.shape[: len(leading)] == leading
        if not fits or (features is not None and y.dim() != len(leading) + len(features)):
            # squeeze() in a module drops a time or a batch of one
            if features is None or y.numel() != math.prod((*dims, *features)):
                raise MisfitError(
                    f"returned outputs of shape {tuple(y.shape)} for {steps} steps of {lanes}"
                    f" lanes, expected {OUTPUTS[order]}: one output per step; the stream's mask"
                    " selects those that count in the loss"
                )
            y = y.reshape(*leading, *features)
        if leading != dims:
            y = y.reshape(*dims, *y.shape[len(leading) :])
        return y.transpose(0, 1) if lane_major else y

    def unpack(self, y: Tensor) -> Any:
        """Several items that lie side by side, `(..., C)`: a dict by their keys, or a tuple."""
        shapes = [item.features or () for item in self.several]
        parts = y.split([*map(math.prod, shapes)], -1)
        items = [p.reshape(*y.shape[:-1], *s) for p, s in zip(parts, shapes, strict=True)]
        keys = [item.path[-1] for item in self.several]
        named = {k: item for k, item in zip(keys, items, strict=True) if isinstance(k, str)}
        return named if len(named) == len(items) else tuple(items)


@dataclass(frozen=True)
class Start:
    """The state that enters the first step of a recording.

    Attributes:
        name: what it is, "zeros" for those that the module makes where it gets no state.
        make: the state in the layout of the module, of a bound module and a number of lanes; None
            for zeros in the shape of the state that the first call returned.
    """

    name: str = "zeros"
    make: Callable[["BoundModule", int], State] | None = None


@dataclass(frozen=True)
class Convention:
    """One way of calling a module as `(x, state) -> (y, state)`.

    Trials begin with a part of it, and add the places of state, lanes and outputs.

    Attributes:
        call: what one call of the module runs.
        order: of its inputs.
        drop: whether a single feature has no dimension of its own.
        transform: the user's function of inputs, time first, instead of an order.
        context: steps of the past that precede every chunk.
        written: the user's function of the module, its inputs and the state.
        constants: other parameters, with a value for each step and lane, and whether it has a last
            dimension of size 1.
        sizes: attributes that are set to the number of lanes.
        arguments: the parameters that take the state, which the module returns; empty for a state
            inside.
        result: where the next state is in the result.
        ports: recurrent submodules by name, which hold the state; or the one that shows what a
            module passes to it that takes its state as an argument.
        attributes: attributes, or buffers, that hold the state.
        scratch: those that a call changes and that hold no state; restored after every call.
        start: the state before the first step.
        outputs: their layout.
        lanes: where the lanes are in the state.
    """

    call: Call
    order: str
    drop: bool = False
    transform: Callable[[Tensor], Any] | None = None
    context: int = 0
    written: Callable[..., Any] | None = None
    constants: tuple[tuple[str, Tensor, bool], ...] = ()
    sizes: tuple[Key, ...] = ()
    arguments: tuple[str, ...] = ()
    result: Path = ()
    ports: Mapping[str, Port] = field(default_factory=dict[str, Port])
    attributes: tuple[Key, ...] = ()
    scratch: tuple[Key, ...] = ()
    start: Start = Start()
    outputs: OutputLayout = OutputLayout()
    lanes: LaneLayout = NO_LANES

    @property
    def where(self) -> str:
        """Where the state is."""
        if self.written is not None:
            return "what call(module, x, state) takes and returns"
        if self.arguments:
            item = f"item {path_name(self.result)} of the result" if self.result else "the result"
            return f"argument {', '.join(self.arguments)}; the next state is {item}"
        parts = [
            f"the hidden state of {'layer' if is_torch(port) else 'module'} '{name}', set and read"
            " by hooks"
            for name, port in self.ports.items()
        ]
        return "; ".join([*parts, *(f"attribute {key_name(key)}" for key in self.attributes)])

    def arrange(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments for inputs of the chunk, or of one step."""
        if self.transform is not None:
            inputs = self.transform(x[0] if self.order in ("B", "") else x)
            return inputs if isinstance(inputs, tuple) else (inputs,)
        return (INPUTS[self.order][1](x.squeeze(-1) if self.drop else x),)


def widen(state: State, lanes: int, dim: int | None = None) -> State:
    """A state of one lane repeated for all lanes; leaves that have so many rows stay.

    Args:
        state: in the layout of a module.
        lanes: B.
        dim: where leaves without lanes get them; None if only those of size 1 are repeated.
    """

    def widen_leaf(leaf: Tensor) -> Tensor:
        if leaf.numel() < 2 and leaf.dim() < 2:  # a number, or nothing yet: see LaneLayout
            return leaf
        ones = [i for i, size in enumerate(leaf.shape) if size == 1]
        if dim is not None:
            while leaf.dim() <= dim:
                leaf = leaf.unsqueeze(0)
            leaf = leaf if leaf.shape[dim] == 1 else leaf.unsqueeze(dim)
            at = dim
        elif lanes in leaf.shape or not ones:
            return leaf
        else:
            at = 1 if 1 in ones and leaf.dim() == 3 else ones[0]
        return leaf.expand([lanes if i == at else size for i, size in enumerate(leaf.shape)])

    return trees.map_tensors(lambda leaf: widen_leaf(leaf).contiguous(), state)


class BoundModule(Adapter):
    """Calls a module by a convention.

    Args:
        module: shared, not copied. Hooks are registered on its recurrent submodules.
        convention: what trials found.
        example: inputs of one step and lane, `(1, 1, ...)`.
    """

    def __init__(self, module: nn.Module, convention: Convention, example: Tensor) -> None:
        self.module, self.convention, self.example = module, convention, example
        self._hooks = PortHooks(module, convention.ports) if convention.ports else None
        self._sets = bool(convention.sizes or convention.attributes or convention.scratch)
        # what a module starts from is what it holds now; its own calls may change that
        self._fresh = {k: copied(v) for k, v in self._attributes().items()}

    def release(self) -> None:
        """Remove the hooks."""
        if self._hooks is not None:
            self._hooks.remove()

    def forward_arguments(self, x: Tensor, state: State) -> tuple[Any, ...] | None:
        c = self.convention
        if c.call != "chunk" or c.drop or c.context or c.transform or c.written or self._sets:
            return None
        if c.constants or c.outputs.several:
            return None
        if c.order not in ("TB", "BT") or c.outputs.order != c.order:
            return None
        if not c.arguments:
            return c.arrange(x) if c.outputs.path == () else None
        second = tuple(p.name for p in parameters_of(self.module.forward)[1:2])
        is_pair = second == c.arguments and (c.outputs.path, c.result) == ((0,), (1,))
        return (*c.arrange(x), state) if is_pair else None

    def read_outputs(self, result: Any, x: Tensor) -> Tensor:
        return self._read(replace(self.convention.outputs, path=()), result, *x.shape[:2])

    def _read(self, layout: OutputLayout, result: Any, steps: int, lanes: int) -> Tensor:
        try:
            return layout.read(result, steps, lanes)
        except MisfitError as error:
            raise ModelError(f"{type(self.module).__name__} {error}.") from None

    def starts_from_zeros(self) -> bool:
        return self.convention.start.name == "zeros"

    def leaf_names(self, state: State) -> list[str]:
        ports = {} if self.convention.arguments else self.convention.ports
        names: list[str] = []
        for path, _ in trees.leaves(state):
            name, _, leaf = path.rpartition(".")
            own = f"{path}.h" if is_torch(ports.get(path)) else path
            names.append(f"{name}.{'hc'[int(leaf)]}" if is_torch(ports.get(name)) else own)
        return names

    # ------------------------------------------------------------ the start

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        del like
        c, weight = self.convention, self.weight
        if lanes != 1 and self.is_one_lane:
            raise ModelError(
                f"{type(self.module).__name__} computes one lane at a time, got {lanes}. Use"
                " tt.Stream(..., lanes=1). If it has a batch dimension, name its order:"
                " tt.carry(module, batch_first=True) or batch_first=False"
            )
        state = c.lanes.zeros(lanes, weight)
        if c.start.make is not None and c.lanes.dims:
            own = _filled(c.start.make(self, lanes), c.lanes.to_module(state))
            state = c.lanes.lanes_first(c.lanes.with_weight(own, weight, lanes))
            if (count := trees.lanes(state)) != lanes:
                raise StateError(f"{c.start.name} gives {count} lanes, expected {lanes}")
        if not c.context:
            return state
        step = torch.zeros_like(self.inputs(lanes)).transpose(0, 1)
        return {PAST: step.expand(lanes, c.context, *step.shape[2:]).clone(), STATE: state}

    @property
    def is_one_lane(self) -> bool:
        """Whether the module takes a single lane only."""
        return any(dim.dim is None for dim in self.convention.lanes.dims)

    @property
    def weight(self) -> Tensor | None:
        """A weight of the module; None without any."""
        return next((p for p in self.module.parameters() if p.is_floating_point()), None)

    def inputs(self, lanes: int) -> Tensor:
        """Example inputs of one step, `(1, B, ...)`, on the device of the weights."""
        like = self.example if self.weight is None else self.weight
        dtype = like.dtype if self.example.is_floating_point() else None
        return self.example.to(like.device, dtype).expand(1, lanes, *self.example.shape[2:])

    def recorded(self, lanes: int) -> State:
        """What the module itself passes to its layers and has in its attributes."""
        x = self.inputs(lanes)
        if (call := self._port_call(x, None)) is None:
            return self._own(self._fresh, lanes)
        with fork_rng(x.device):
            self._invoke(x, None, call)
        passed = call.passed
        return self._own(
            next(iter(passed.values())) if self.convention.arguments else passed, lanes
        )

    def _attributes(self) -> dict[str, Any]:
        """The attributes that hold a state, by name; None for those not made yet."""
        values = {key_name(k): attribute(self.module, k) for k in self.convention.attributes}
        return {name: None if value is MISSING else value for name, value in values.items()}

    def from_method(self, name: str, lanes: int) -> State:
        """What a method of the module makes, or puts into the attributes that hold the state."""
        c, module = self.convention, self.module
        values = {key: copied(attribute(module, key)) for key in (*c.attributes, *c.scratch)}
        saved = set_attributes(module, values | dict.fromkeys(c.sizes, lanes))
        try:
            state = call_method(module, name, lanes, c.arrange(self.inputs(lanes))[0])
            if c.attributes:
                if state is not None and len(c.attributes) == 1:
                    set_attributes(module, {c.attributes[0]: state})
                state = self._attributes()
            elif any(leaf is None for leaf in pytree.tree_leaves(state)):
                raise MisfitError(f"{name} returns no whole state")
            return self._own(state, lanes)
        finally:
            set_attributes(module, saved)

    def _own(self, state: State, lanes: int) -> State:
        """For all lanes, without leaves of a graph that are no weights."""
        weights = {id(p) for p in self.module.parameters()}

        def plain(leaf: Tensor) -> Tensor:
            return leaf.detach() if leaf.is_leaf and id(leaf) not in weights else leaf

        return widen(trees.map_tensors(plain, state), lanes)

    def first_call(self, x: Tensor) -> tuple[Any, State]:
        """The result of one call from the start of a recording, and the state after it.

        The layout of the state may be unknown yet.
        """
        c = self.convention
        x = torch.cat([x.new_zeros(c.context, *x.shape[1:]), x]) if c.context else x
        state = None if c.start.make is None else c.start.make(self, x.shape[1])
        return self._invoke(x, state, self._port_call(x, state))

    # ------------------------------------------------------------ calls

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        c = self.convention
        if c.context:
            x = torch.cat([state[PAST].transpose(0, 1), x])
            state = state[STATE]
        after = c.lanes.to_module(state)
        if after is state and not isinstance(state, Tensor):  # lists that the module may write into
            after = trees.map_leaves(_itself, state)
        if c.call == "chunk":
            y, after = self.call(x, after)
        else:
            outputs: list[Tensor] = []
            for step in x.split(1):
                y, after = self.call(step, after)
                outputs.append(y)
            y = torch.cat(outputs)
        after = c.lanes.lanes_first(after)
        return y, {PAST: x[-c.context :].transpose(0, 1), STATE: after} if c.context else after

    def call(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One call of the module: outputs, and the state in the module's own layout."""
        result, after = self._invoke(x, state, self._port_call(x, state))
        context, outputs = self.convention.context, self.convention.outputs
        if context:  # as many outputs as inputs, or fewer by the context
            try:
                return outputs.read(result, *x.shape[:2])[context:], after
            except MisfitError:
                x = x[context:]
        return self._read(outputs, result, *x.shape[:2]), after

    def _port_call(self, x: Tensor, state: State) -> PortCall | None:
        """What hooks do in one call; None without any, and where the state is an argument."""
        hooks = self._hooks
        if hooks is None or (self.convention.arguments and state is not None):
            return None
        return PortCall(hooks, state or {}, len(x), self.convention.context)

    def _invoke(self, x: Tensor, state: State, call: PortCall | None) -> tuple[Any, State]:
        """The result of the module, and the state after it; a state of None is the module's own."""
        c, module = self.convention, self.module
        args, kwargs = c.arrange(x), self._constants(x) if c.constants else {}
        if c.arguments and state is not None:
            states = (state,) if len(c.arguments) == 1 else state
            kwargs.update(zip(c.arguments, states, strict=True))
        elif c.arguments:  # what is optional has a default of its own
            required = [p.name for p in parameters_of(module.forward) if p.default is p.empty]
            kwargs.update(dict.fromkeys({*required}.intersection(c.arguments)))
        if self._sets:  # of a module that threads share
            _setting.acquire()
        saved = set_attributes(module, self._values(state, x.shape[1])) if self._sets else {}
        try:
            if c.written is not None:
                return c.written(module, *args, state)
            result = module(*args, **kwargs) if call is None else call.run(module, args, kwargs)
            if c.arguments:
                return result, item_at(result, c.result)
            after = self._attributes() if call is None else {**call.before, **call.after}
            return result, after
        finally:
            if self._sets:
                set_attributes(module, saved)
                _setting.release()

    def _constants(self, x: Tensor) -> dict[str, Any]:
        """The values of other parameters."""
        values: dict[str, Any] = {}
        for name, value, column in self.convention.constants:
            rows = INPUTS[self.convention.order][1](value.to(x.device).expand(x.shape[:2]))
            values[name] = rows.unsqueeze(-1) if column else rows
        return values

    def _values(self, state: State, lanes: int) -> dict[Key, Any]:
        """The attributes that are set for a call; a state of None is the module's own."""
        c = self.convention
        values = {key: copied(attribute(self.module, key)) for key in (*c.scratch, *c.attributes)}
        for key in c.attributes if state is not None else ():
            values[key] = copied(state[key_name(key)])  # pyright: ignore[reportOptionalSubscript]
        return values | dict.fromkeys(c.sizes, lanes)


def call_method(module: nn.Module, name: str, lanes: int, example: Tensor) -> State:
    """What a method that makes initial states returns for some lanes.

    Its parameters are filled by their names: a number of lanes, a device, a dtype, inputs.

    Args:
        module: the owner of the method.
        name: of the method.
        lanes: B.
        example: inputs as the module takes them.

    Raises:
        MisfitError: a parameter that cannot be filled.
    """
    method, weight = getattr(module, name), next(module.parameters(), example)
    known = dict.fromkeys(INPUT_NAMES, example) | {"device": weight.device, "dtype": weight.dtype}
    args: list[Any] = []
    options: dict[str, Any] = {}
    required = [p for p in parameters_of(method) if p.default is p.empty or _is_batch(p.name)]
    for p in required:
        if _is_batch(p.name) or (len(required) == 1 and p.name not in INPUT_NAMES):
            value: Any = lanes
        elif p.name in known or names_state(p.name):
            value = known.get(p.name)
        else:
            raise MisfitError(f"{name} needs a value for {p.name}")
        if p.default is p.empty and p.kind is not p.KEYWORD_ONLY:
            args.append(value)
        else:
            options[p.name] = value
    return method(*args, **options)


def _filled(state: Any, zeros: Any) -> Any:
    """A state with zeros for what is None yet, and numbers as tensors."""
    if state is None or (isinstance(state, (list, dict)) and not state):
        return zeros
    if isinstance(state, (int, float)):
        return zeros + state
    if isinstance(state, dict):
        return {key: _filled(state.get(key), zero) for key, zero in zeros.items()}
    if type(state) in (list, tuple) and len(state) == len(zeros):
        return type(state)([*map(_filled, state, zeros)])
    return state


def _is_batch(name: str) -> bool:
    return name in BATCH_NAMES or "batch" in name


def _itself(leaf: Tensor) -> Tensor:
    return leaf
