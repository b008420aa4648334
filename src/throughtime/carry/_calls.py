"""How a module is called: its inputs, its state, where a recording starts, and its outputs.

A convention is a description without the module: it fits each copy on which it is tried, and
`ModuleAdapter` calls a module by it.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import fork_rng
from throughtime.carry._adapter import Adapter, LaneLayout, input_kind, widen
from throughtime.carry._inside import (
    INPUT_NAMES,
    MISSING,
    RECURRENT,
    Key,
    Port,
    PortCall,
    PortHooks,
    copied,
    get_attributes,
    key_name,
    names_state,
    parameters_of,
    set_attributes,
)
from throughtime.carry._trial import weight_of
from throughtime.errors import ModelError
from throughtime.state import State

Call = Literal["chunk", "step", "last"]
Path = tuple["int | str | slice", ...]  # of an item in what a module returned
Order = tuple[int, int]  # the dimensions of time and of lanes
_setting = threading.RLock()  # held while attributes of a module hold the state of one call
PAST, STATE = "past", "state"  # keys where a module gets the steps before a chunk
TIME_FIRST, LANES_FIRST, FEATURES_FIRST = (0, 1), (1, 0), (2, 0)
ORDERS = {TIME_FIRST: "(T, B, {})", LANES_FIRST: "(B, T, {})", FEATURES_FIRST: "(B, {}, T)"}
CALLS: dict[Call, str] = {
    "chunk": "one call for each chunk",
    "step": "one call for each step, without a time dimension",
    "last": "one call for each step, as a chunk of length 1",
}
OWN = "what the module itself starts from"


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
    if isinstance(result, Tensor):
        yield path, result
    for key, item in items_of(result) if len(path) < 3 else ():
        yield from tensor_paths(item, (*path, key))


def items_of(result: Any) -> list[tuple[Any, Any]]:
    """The keys and items of a tuple, list, dict or dataclass; none of anything else."""
    if isinstance(result, Mapping):
        return [*result.items()]
    if isinstance(result, (tuple, list)):
        return [*enumerate(result)]
    return [(name, getattr(result, name)) for name in getattr(result, "__dataclass_fields__", ())]


def path_name(path: Path) -> str:
    """A path as Python writes it: `[0]`, `['logits']`, `[1:]`."""
    return "".join(f"[{k.start}:]" if isinstance(k, slice) else f"[{k!r}]" for k in path)


Find: TypeAlias = Callable[["ModuleAdapter", Tensor | None], bool]


@dataclass(frozen=True)
class OutputLayout:
    """Which item of a result the outputs are, and how they lie.

    Attributes:
        path: of the item.
        order: of its dimensions, or of the steps and lanes that are one dimension.
        features: the shape of one output.
        skip: steps before those of the inputs that have outputs as well.
        several: the layouts of several items, whose features are read side by side, in a row.
    """

    path: Path = ()
    order: Order = TIME_FIRST
    features: tuple[int, ...] = ()
    skip: int = 0
    several: tuple["OutputLayout", ...] = ()

    def read(self, result: Any, steps: int, lanes: int) -> Tensor:
        """The outputs `(T, B, ...)`.

        Raises:
            MisfitError: the item is no tensor, or its shape does not fit.
        """
        if self.several:
            items = (item.read(result, steps, lanes) for item in self.several)
            return torch.cat([item.reshape(steps, lanes, -1) for item in items], -1)
        y, (t, b), steps = item_at(result, self.path), self.order, steps + self.skip
        if not isinstance(y, Tensor):
            raise MisfitError(f"returned a {type(y).__name__}, expected one tensor of outputs")
        if y.dim() != 2 + len(self.features) or (y.shape[t], y.shape[b]) != (steps, lanes):
            # steps and lanes in one dimension, or squeeze() in a module drops a time or a batch
            if y.numel() != steps * lanes * math.prod(self.features):
                raise MisfitError(
                    f"returned outputs of shape {tuple(y.shape)} for {steps} steps of {lanes}"
                    " lanes, expected one output per step; the stream's mask selects those that"
                    " count in the loss"
                )
            t, b = min(t, 1), 1 - min(t, 1)
            y = y.reshape(*((lanes, steps) if t else (steps, lanes)), *self.features)
        y = y.movedim((t, b), (0, 1)) if t else y
        return y[self.skip :] if self.skip else y

    def unpack(self, y: Tensor) -> Any:
        """Several items that lie side by side, `(..., C)`: a dict by their keys, or a tuple."""
        parts = y.split([math.prod(item.features) for item in self.several], -1)
        items = [
            part.reshape(*y.shape[:-1], *item.features)
            for part, item in zip(parts, self.several, strict=True)
        ]
        keys = [item.path[-1] for item in self.several]
        named = {k: item for k, item in zip(keys, items, strict=True) if isinstance(k, str)}
        return named if len(named) == len(items) else tuple(items)


@dataclass(frozen=True)
class Hints:
    """What the user says about a module; None is found by trials. See `tt.carry`."""

    inputs: Callable[[Tensor], Any] | None = None
    output: int | str | tuple[int | str, ...] | list[Any] | None = None
    start: Any = None
    call: str | Callable[..., Any] | None = None
    context: int = 0
    batch_first: bool | None = None


@dataclass(frozen=True)
class Convention:
    """One way of calling a module as `(x, state) -> (y, state)`.

    Trials begin with a part of it, and add the places of state, lanes and outputs.

    Attributes:
        hints: what the user says.
        call: what one call of the module runs.
        order: of its inputs.
        drop: whether a single feature has no dimension of its own.
        arguments: the parameters that take the state, which the module returns; empty for a state
            inside.
        result: where the next state is in the result.
        ports: recurrent submodules by name, which hold the state.
        attributes: attributes, or buffers, that hold the state.
        scratch: those that a call changes; restored after every call.
        start: the state before the first step: None for zeros, or what attributes hold; `OWN` for
            what the module passes to its ports; the name of a method; or what the user says, in a
            tuple.
        outputs: their layout.
        lanes: where the lanes are in the state.
    """

    hints: Hints = Hints()
    call: Call = "chunk"
    order: Order = TIME_FIRST
    drop: bool = False
    arguments: tuple[str, ...] = ()
    result: Path = ()
    ports: Mapping[str, Port] = field(default_factory=dict[str, Port])
    attributes: tuple[Key, ...] = ()
    scratch: tuple[Key, ...] = ()
    start: str | tuple[Any] | None = None
    outputs: OutputLayout = OutputLayout()
    lanes: LaneLayout = field(default_factory=LaneLayout)

    @property
    def written(self) -> Callable[..., Any] | None:
        """The user's function of the module, its inputs and the state."""
        return self.hints.call if callable(self.hints.call) else None

    @property
    def where(self) -> str:
        """Where the state is."""
        if self.written is not None:
            return "what call(module, x, state) takes and returns"
        if self.arguments:
            item = f"item {path_name(self.result)} of the result" if self.result else "the result"
            return f"argument {', '.join(self.arguments)}; the next state is {item}"
        parts = [f"the hidden state of '{name}', set and read by hooks" for name in self.ports]
        return "; ".join([*parts, *(f"attribute {key_name(key)}" for key in self.attributes)])

    @property
    def start_name(self) -> str:
        """What a recording starts from."""
        if self.start is None and not self.attributes:
            return "zeros"
        if self.start in (None, OWN):
            return OWN
        is_method = isinstance(self.start, str)
        return f"module.{self.start}(...)" if is_method else "start(...)"

    def arrange(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments for inputs of the chunk, or of one step."""
        if self.hints.inputs is not None:
            inputs = self.hints.inputs(x)
            return inputs if isinstance(inputs, tuple) else (inputs,)
        x = x.squeeze(-1) if self.drop else x
        if self.call == "step" or self.order == TIME_FIRST:
            return (x,)
        return (x.movedim((0, 1), self.order).contiguous(),)  # modules call `view`


class ModuleAdapter(Adapter):
    """Calls a module by a convention.

    Args:
        module: shared, not copied. Hooks are registered on its recurrent submodules.
        hints: what the user says.
        find: binds this to a convention for example inputs, by trials, if these are possible now;
            for None, to one for the inputs that the module declares.

    Attributes:
        convention: how the module is called; `Convention()` until that is known.
        example: inputs of one step and lane, `(1, 1, ...)`; None until the convention is known.
    """

    example: Any = None
    _hooks: PortHooks | None = None
    _touched: Collection[Key] = ()

    def __init__(
        self, module: nn.Module, find: Find | None = None, hints: Hints | None = None
    ) -> None:
        self.module, self._find, self.convention = module, find, Convention(hints or Hints())
        self._tried: set[tuple[Any, ...]] = set()

    def bind(self, convention: Convention, x: Tensor) -> None:
        """Call the module by a convention from now on, with inputs like `x` `(T, B, ...)`."""
        self.release()
        self.convention, self.example = convention, torch.zeros_like(x[:1, :1])
        self.unpack = convention.outputs.unpack if convention.outputs.several else None
        self._hooks = PortHooks(self.module, convention.ports) if convention.ports else None
        self._touched = {*convention.attributes, *convention.scratch}
        # what a module starts from is what it holds now; its own calls may change that
        self._fresh = self._attributes()

    def release(self) -> None:
        """Remove the hooks."""
        if self._hooks is not None:
            self._hooks.remove()

    def prepare(self, x: Tensor) -> None:
        kind = input_kind(self.module, x)
        if kind in self._tried or not x.numel() or self._find is None or not self._find(self, x):
            return
        self._tried |= {kind, (*kind[:2], False)}  # in training mode, both modes are measured

    def forward_arguments(self, x: Tensor, state: State) -> tuple[Any, ...] | None:
        c = self.convention
        hints = c.hints
        changes = c.drop or hints.context or hints.inputs or c.written or self._touched
        changes = changes or self.example is None
        if c.call != "chunk" or changes or c.outputs.several or c.order != c.outputs.order:
            return None
        if not c.arguments:
            return c.arrange(x) if c.outputs.path == () else None
        second = tuple(p.name for p in parameters_of(self.module.forward)[1:2])
        is_pair = second == c.arguments and (c.outputs.path, c.result) == ((0,), (1,))
        return (*c.arrange(x), state) if is_pair else None

    def read_outputs(self, result: Any, x: Tensor) -> Tensor:
        return self._read(replace(self.convention.outputs, path=()), result, x)

    def _read(self, layout: OutputLayout, result: Any, x: Tensor) -> Tensor:
        try:
            return layout.read(result, *x.shape[:2])
        except MisfitError as error:
            raise ModelError(f"{type(self.module).__name__} {error}.") from None

    def starts_from_zeros(self) -> bool:
        return self.convention.start is None

    def leaf_names(self, state: State) -> list[str]:
        if isinstance(self.module, RECURRENT):
            return ["h"] if isinstance(state, Tensor) else ["h", "c"]
        names = [(path, *path.rpartition(".")[::2]) for path, _ in trees.leaves(state)]
        return [
            f"{path}.h"
            if self._is_layer(path)
            else f"{name}.{'hc'[int(leaf)]}"
            if self._is_layer(name)
            else path
            for path, name, leaf in names
        ]

    def _is_layer(self, name: str) -> bool:
        """Whether a port is a layer or cell of torch.nn."""
        ports = self.convention.ports
        return name in ports and isinstance(self.module.get_submodule(name), RECURRENT)

    def explain(self) -> str:
        c, name, x = self.convention, type(self.module).__name__, self.example
        if x is None:
            return (
                f"{name}: how it is called is found by trials at the first inputs;"
                " tt.carry(module, x) finds it at once"
            )

        def shape(order: Order, features: Iterable[int]) -> str:
            text = ORDERS[order] if c.call == "chunk" else "(B, {})"
            return text.format(", ".join(map(str, features))).replace(", )", ")")

        features, past, item = x.shape[2:], c.hints.context, path_name(c.outputs.path)
        inputs = "what inputs= returns" if c.hints.inputs else shape(c.order, features[c.drop :])
        after = f", after {past} steps of the past" if past else ""
        state = {PAST: x.expand(past, *x.shape[1:]).transpose(0, 1)} if past else {}
        state |= {STATE: c.lanes.example} if c.lanes.dims else {}
        names = [PAST] * bool(past) + self.leaf_names(c.lanes.example)
        item = f"item {item}, " if item else ""
        return "\n  ".join(
            [
                f"{name}: called with {inputs}: {CALLS[c.call]}{after}",
                *([f"state: {c.where}"] if c.where else []),
                f"leaves, lanes first: {state_shapes(names, state)}",
                f"start: {c.start_name}",
                f"outputs: {item}{shape(c.outputs.order, c.outputs.features)}",
            ]
        )

    # ------------------------------------------------------------ the start

    def initial_state(self, lanes: int, like: Tensor | None) -> State:
        if like is not None:
            self.prepare(like)
        if self.example is None and self._find is not None:
            own = getattr(type(self.module), "initial_state", None)
            if self.convention.hints == Hints() and callable(own):
                return self._declared(lanes)
            self._find(self, None)
        if lanes != 1 and self.is_one_lane:
            raise ModelError(
                f"{type(self.module).__name__} computes one lane at a time, got {lanes}. Use"
                " tt.Stream(..., lanes=1). If it has a batch dimension, name its order:"
                " tt.carry(module, batch_first=True) or batch_first=False"
            )
        c = self.convention
        state = c.lanes.fill(
            self.start(lanes) if c.lanes.dims else None, lanes, weight_of(self.module)
        )
        if not c.hints.context:
            return state
        return {PAST: self.padded(self.inputs(lanes)[:0]).transpose(0, 1), STATE: state}

    def _declared(self, lanes: int) -> State:
        """The initial state that a method of the module returns, before trials."""
        method: Any = self.module.initial_state
        layout = LaneLayout.infer({count: method(count) for count in (3, 2)}, None)
        return layout.lanes_first(method(lanes))

    @property
    def is_one_lane(self) -> bool:
        """Whether the module takes a single lane only."""
        return any(dim.dim is None for dim in self.convention.lanes.dims)

    def inputs(self, lanes: int) -> Tensor:
        """Example inputs of one step, `(1, B, ...)`, on the device of the weights."""
        x, weight = self.example, weight_of(self.module)
        like = x if weight is None else weight
        dtype = like.dtype if x.is_floating_point() else None
        return x.to(like.device, dtype).expand(1, lanes, *x.shape[2:])

    def padded(self, x: Tensor) -> Tensor:
        """Inputs after zeros for the context."""
        return torch.cat([x.new_zeros(self.convention.hints.context, *x.shape[1:]), x])

    def start(self, lanes: int) -> Any:
        """What a recording starts from, as the module, its method or the user says it."""
        c, module, x = self.convention, self.module, self.inputs(lanes)
        if c.start is None:
            return self._fresh or None
        if c.start == OWN:
            call = PortCall({}, 1)
            with fork_rng(x.device):
                self._invoke(x, call)
            return call.passed
        if isinstance(c.start, str):
            with self._holding(None):
                start = call_method(module, c.start, lanes, c.arrange(self._parts(x)[0])[0])
                if c.attributes:
                    set_attributes(module, {} if start is None else {c.attributes[0]: start})
                    start = self._attributes()
        else:
            (start,) = c.start
            if callable(start):
                count = len(parameters_of(start))
                start = start(lanes) if count == 1 else start(module, lanes)

        return start

    def _attributes(self) -> dict[str, Any]:
        """The attributes that hold a state, by name; None for those not made yet."""
        values = get_attributes(self.module, self.convention.attributes)
        return {key_name(k): None if v is MISSING else copied(v) for k, v in values.items()}

    def first_call(self, x: Tensor) -> tuple[Any, State]:
        """The result of one call from the start of a recording, and the state after it.

        It is the author's own call. The layout of the state may be unknown yet.
        """
        weight, lanes = weight_of(self.module), x.shape[1]
        start = None if self.convention.start == OWN else self.start(lanes)

        def fit(leaf: Tensor) -> Tensor:
            if weight is not None:
                leaf = leaf.to(weight if leaf.is_floating_point() else weight.device)
            is_row = leaf.dim() > 1 and leaf.shape[-2] == 1 and lanes not in leaf.shape
            return widen(leaf, lanes, leaf.dim() - 2) if is_row else leaf

        return self._invoke(self._parts(self.padded(x))[0], trees.map_tensors(fit, start))

    # ------------------------------------------------------------ calls

    def run(self, x: Tensor, state: State, resets: Tensor | None = None) -> tuple[Tensor, State]:
        del resets
        c, context = self.convention, self.convention.hints.context
        if context:
            x = torch.cat([state[PAST].transpose(0, 1), x])
            state = state[STATE]
        after = c.lanes.to_module(state)
        if after is state and not isinstance(state, Tensor):  # lists that the module may write into
            after = trees.map_leaves(lambda leaf: leaf, state)
        outputs: list[Tensor] = []
        for part in self._parts(x):
            result, after = self._invoke(part, after)
            outputs.append(self.read(result, x[:1] if c.call != "chunk" else x))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        after = c.lanes.lanes_first(after)
        return y, {PAST: x[-context:].transpose(0, 1), STATE: after} if context else after

    def _parts(self, x: Tensor) -> Sequence[Tensor]:
        """The inputs of each call."""
        call = self.convention.call  # indexing would have a gradient for all of x at each step
        return (x,) if call == "chunk" else x.unbind(0) if call == "step" else x.split(1)

    def read(self, result: Any, x: Tensor) -> Tensor:
        """The outputs `(T, B, ...)` of a call, of the steps after the context."""
        return self._read(self.convention.outputs, result, x[self.convention.hints.context :])

    def _invoke(self, x: Tensor, state: Any) -> tuple[Any, State]:
        """The result of the module, and the state after it.

        Args:
            x: inputs.
            state: in the layout of the module; None for the module's own, or a `PortCall`.
        """
        c, module = self.convention, self.module
        args = c.arrange(x)
        with self._holding(state) if self._touched else nullcontext():
            if c.written is not None:
                return c.written(module, *args, state)
            if self._hooks is not None:
                call = PortCall(state or {}, len(x), c.hints.context)
                call = state if isinstance(state, PortCall) else call
                return self._hooks.run(call, args), {**call.before, **call.after}
            if not c.arguments:
                return module(*args), self._attributes()
            names, states = c.arguments, (state,) if len(c.arguments) == 1 else state
            if state is None:  # what is optional has a default of its own
                required = {p.name for p in parameters_of(module.forward) if p.default is p.empty}
                names, states = required.intersection(names), repeat(None)
            result = module(*args, **dict(zip(names, states, strict=False)))
            return result, item_at(result, c.result)

    @contextmanager
    def _holding(self, state: Any) -> Generator[None]:
        """Attributes hold the state of one call, of a module that threads share."""
        with _setting:
            saved = get_attributes(self.module, self._touched)
            values = (
                saved
                if state is None
                else {
                    key: state[key_name(key)] if key in self.convention.attributes else value
                    for key, value in saved.items()
                }
            )
            set_attributes(self.module, {key: copied(value) for key, value in values.items()})
            try:
                yield
            finally:
                set_attributes(self.module, saved)


def state_shapes(names: Iterable[str], state: State) -> str:
    """The name and the shape of each tensor of a state, lanes first: `lstm.h (B, 2, 8)`."""
    return ", ".join(
        f"{name or 'state'} ({', '.join(['B', *map(str, leaf.shape[1:])])})"
        for name, leaf in zip(names, trees.tensors(state), strict=True)
    )


def layer_zeros(module: nn.Module, lanes: int) -> State:
    """The state of the first recurrent layer or cell of torch.nn in a module; None without one."""
    layer = next((m for m in module.modules() if isinstance(m, RECURRENT)), None)
    if layer is None:
        return None
    rows = [layer.num_layers] if isinstance(layer, nn.RNNBase) else []
    sizes = getattr(layer, "proj_size", 0) or layer.hidden_size, layer.hidden_size
    h, c = (next(layer.parameters()).new_zeros(*rows, lanes, size) for size in sizes)
    return (h, c) if isinstance(layer, (nn.LSTM, nn.LSTMCell)) else h


def call_method(module: nn.Module, name: str, lanes: int, example: Tensor) -> State:
    """What a method that makes initial states returns for some lanes.

    Args:
        module: the owner of the method.
        name: of the method. Its parameters are filled by their names: inputs, a device, a state
            that is None; what else it requires is the number of lanes.
        lanes: B.
        example: inputs as the module takes them.
    """
    method, values = getattr(module, name), dict.fromkeys(INPUT_NAMES, example)
    values["device"] = example.device  # pyright: ignore[reportArgumentType]
    return method(
        **{
            p.name: None if names_state(p.name) else values.get(p.name, lanes)
            for p in parameters_of(method)
            if p.default is p.empty or "batch" in p.name
        }
    )
