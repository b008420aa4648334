"""How a module is called: its inputs, its state, where a recording starts, and its outputs.

A convention is a description without the module: it fits each copy on which it is tried, and
`ModuleAdapter` calls a module by it.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs, `H` hidden, `L` layers.
"""

import math
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import fork_rng
from throughtime.carry._inside import (
    INPUT_NAME,
    MISSING,
    RECURRENT,
    Key,
    LayerCall,
    LayerHooks,
    copied,
    get_attributes,
    key_name,
    names_state,
    parameters_of,
    set_attributes,
    weight_of,
)
from throughtime.carry._layout import (
    TIME_FIRST,
    LaneLayout,
    MisfitError,
    Order,
    OutputLayout,
    Path,
    items_at,
)
from throughtime.errors import ModelError
from throughtime.nn.layers import Recurrent
from throughtime.state import State

_setting = threading.RLock()  # held while attributes of a module hold the state of one call
PAST, STATE = "past", "state"  # keys where a module gets the steps before a chunk
UNITS = ("chunk", "step", "last")
OWN = "what the module itself starts from"
Ran: TypeAlias = tuple[Tensor, State]  # outputs, and the state after them


class Adapter:
    """Calls one module as `(x, state) -> (y, state)`; as it is here, one without a state.

    Attributes:
        module: the user's.
        unpack: returns the items of several outputs from what `run` returns, in which they lie
            side by side; None for a single one.
        base: what the user says about a module that trials measure; None for a known one.
        takes_resets: whether `run` applies resets itself.
        zero_start: whether recordings start from a state of zeros.
    """

    base: "Convention | None" = None
    unpack: Callable[[Tensor], Any] | None = None
    takes_resets, zero_start = False, True

    def __init__(self, module: Any) -> None:
        self.module = module

    def initial_state(self, lanes: int) -> State:
        """The state before the first step of a recording."""
        del lanes
        return ()

    def run(self, x: Tensor, state: State, *_: Tensor) -> Ran:
        """Map `x` `(T, B, ...)` to outputs `(T, B, C)` and the final state.

        If `takes_resets` is true, a third argument may be resets `(T, B)`, true where a lane starts
        a recording.
        """
        return self.module(x), state


@dataclass(frozen=True)
class Convention:
    """One way of calling a module as `(x, state) -> (y, state)`.

    The user may say the first six. Trials begin with a part of the others, and add the places of
    state, lanes and outputs.

    Attributes:
        inputs: maps inputs `(T, B, ...)` to what the module takes.
        output: the key of the outputs in a result, several keys in a list, or "all".
        call: calls the module.
        context: steps of the past that precede every chunk.
        batch_first: whether the module takes `(B, T, ...)`; None is found.
        start: the state before the first step: None for zeros, or what attributes hold; `OWN` for
            what the module passes to its layers; the name of a method; or what the user says, in a
            tuple.
        unit: what one call of the module runs.
        order: of its inputs.
        drop: whether a single feature has no dimension of its own.
        arguments: the parameters that take the state, which the module returns; empty for a state
            inside.
        result: the keys of the result where the next state is; none for all of it.
        layers: names of the recurrent layers inside that hold the state.
        attributes: attributes, or buffers, that hold the state.
        scratch: all that a call changes; restored after every call.
        outputs: the layout of each item that is one.
        lanes: where the lanes are in the state.
    """

    inputs: Callable[[Tensor], Any] | None = None
    output: int | str | tuple[int | str, ...] | list[Any] | None = None
    call: Callable[..., Any] | None = None
    context: int = 0
    batch_first: bool | None = None
    start: str | tuple[Any] | None = None
    unit: str = "chunk"
    order: Order = TIME_FIRST
    drop: bool = False
    arguments: tuple[str, ...] = ()
    result: Path = ()
    layers: tuple[str, ...] = ()
    attributes: tuple[Key, ...] = ()
    scratch: tuple[Key, ...] = ()
    outputs: tuple[OutputLayout, ...] = ()
    lanes: LaneLayout = field(default_factory=LaneLayout)

    @property
    def several(self) -> bool:
        """Whether several outputs are asked for."""
        return isinstance(self.output, list) or self.output == "all"

    @property
    def is_inside(self) -> bool:
        """Whether the state is in attributes, if there is any."""
        return not (self.arguments or self.layers or self.call)

    def arrange(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments for inputs of the chunk, or of one step."""
        if self.inputs is not None:
            inputs = self.inputs(x)
            return inputs if isinstance(inputs, tuple) else (inputs,)
        x = x.squeeze(-1) if self.drop else x
        if self.unit == "step" or self.order == TIME_FIRST:
            return (x,)
        return (x.movedim((0, 1), self.order).contiguous(),)  # modules call `view`

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """The inputs of each call."""
        # indexing would have a gradient for all of x at each step
        return (x,) if self.unit == "chunk" else x.unbind(0) if self.unit == "step" else x.split(1)

    def padded(self, x: Tensor) -> Tensor:
        """Inputs after zeros for the context."""
        return torch.cat([x.new_zeros(self.context, *x.shape[1:]), x])


class ModuleAdapter(Adapter):
    """Calls a module by a convention.

    Args:
        module: shared, not copied. Hooks are registered on its recurrent layers.
        convention: how it is called.
        x: inputs like those of the calls, `(T, B, ...)`.
    """

    def __init__(self, module: nn.Module, convention: Convention, x: Tensor) -> None:
        super().__init__(module)
        self.convention, self.example = convention, torch.zeros_like(x[:1, :1])
        self.zero_start = convention.start is None
        is_row = convention.several and any(y.path for y in convention.outputs)
        self.unpack = self._unpack if is_row else None
        self._hooks = LayerHooks(module, convention.layers)
        self.close = self._hooks.remove
        # what a module starts from is what it holds now; its own calls may change that
        self._fresh = self._attributes()

    @property
    def takes_state(self) -> bool | None:
        """Whether forward has the state as its second argument; False if hooks set it in layers.

        None if a chunk is not one call of the forward, whose results are outputs and state.
        """
        c, outputs = self.convention, self.convention.outputs[0]
        own = c.context, c.inputs, c.call, c.scratch, self.unpack, c.drop, c.unit != "chunk"
        second = tuple(p.name for p in parameters_of(self.module.forward)[1:2])
        ways = ((), (), ()), ((0,), second, (1,))
        is_plain = (outputs.path, c.arguments, c.result) in ways and c.order == outputs.order
        return bool(c.arguments) if is_plain and not any(own) else None

    # ------------------------------------------------------------ the start

    def initial_state(self, lanes: int) -> State:
        c = self.convention
        if lanes != 1 and any(dim.dim is None for dim in c.lanes.dims):
            raise ModelError(
                f"{type(self.module).__name__} computes one lane at a time, got {lanes}: use"
                " tt.Stream(..., lanes=1). If it has a batch dimension, name its place:"
                " tt.carry(module, batch_first=True) or batch_first=False"
            )
        start = self.start(lanes) if c.lanes.dims else None
        state = c.lanes.fill(start, lanes, weight_of(self.module))
        if not c.context:
            return state
        past = c.padded(self.inputs(lanes)[:0]).transpose(0, 1)
        return {PAST: past, STATE: state}

    def inputs(self, lanes: int) -> Tensor:
        """Example inputs of one step, `(1, B, ...)`, on the device of the weights."""
        x, weight = self.example, weight_of(self.module)
        if weight is not None:
            x = x.to(weight if x.is_floating_point() else weight.device)
        return x.expand(1, lanes, *x.shape[2:])

    def start(self, lanes: int) -> Any:
        """What a recording starts from, as the module, its method or the user says it."""
        c, module = self.convention, self.module
        if c.start is None:
            return self._fresh or None
        if isinstance(c.start, tuple):
            (start,) = c.start
            if callable(start):
                return start(*(module, lanes)[-len(parameters_of(start)) :])
            return start
        x = self.inputs(lanes)
        if c.start == OWN:
            return self.recorded(x).passed
        with self._holding(None):
            start = call_method(module, c.start, lanes, c.arrange(c.parts(x)[0])[0])
            if c.attributes:
                set_attributes(module, {} if start is None else {c.attributes[0]: start})
                start = self._attributes()
        return start

    def recorded(self, x: Tensor) -> LayerCall:
        """What the layers of the module get and return in a call of its own."""
        call = LayerCall({}, len(x))
        with fork_rng(x.device):
            self._invoke(x, call)
        return call

    def _attributes(self) -> dict[str, Any]:
        """The attributes that hold a state, by name; None for those not made yet."""
        values = get_attributes(self.module, self.convention.attributes)
        return {key_name(k): None if v is MISSING else copied(v) for k, v in values.items()}

    def first_call(self, x: Tensor) -> tuple[Any, State]:
        """The result of one call from the start of a recording, and the state after it.

        It is the author's own call. The layout of the state may be unknown yet.
        """
        c, weight, lanes = self.convention, weight_of(self.module), x.shape[1]

        def fit(leaf: Tensor) -> Tensor:
            if lanes not in leaf.shape and leaf.shape[-2:-1] in ((1,), ()):  # of one lane, or none
                leaf = leaf.expand(*leaf.shape[:-2], lanes, *leaf.shape[-1:])
            return leaf.to(weight) if weight is not None and leaf.is_floating_point() else leaf

        start = None if c.start == OWN else trees.map_tensors(fit, self.start(lanes))
        return self._invoke(c.parts(c.padded(x))[0], start, c.context)

    # ------------------------------------------------------------ calls

    def run(self, x: Tensor, state: State, *_: Tensor) -> Ran:
        context = self.convention.context
        if not context:
            return self._run(x, state, 0)
        x = torch.cat([state[PAST].transpose(0, 1), x])
        y, after = self._run(x, state[STATE], context)
        return y, {PAST: x[-context:].transpose(0, 1), STATE: after}

    def _run(self, x: Tensor, state: State, before: int) -> Ran:
        """Outputs and state after the steps `x`, of which those `before` are of the past."""
        c, after = self.convention, self.convention.lanes.to_module(state)
        outputs: list[Tensor] = []
        for part in c.parts(x):
            result, after = self._invoke(part, after, before)
            outputs.append(self.read(result, x[:1] if c.unit != "chunk" else x, before))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return y, c.lanes.lanes_first(after)

    def read(self, result: Any, x: Tensor, before: int = 0) -> Tensor:
        """The outputs `(T, B, ...)` of a call, of the steps after those `before`.

        Those of several items lie side by side, `(T, B, C)`.
        """
        steps, lanes = x.shape[0] - before, x.shape[1]  # export needs no len
        ys = [y.read(result, steps, lanes, before) for y in self.convention.outputs]
        if self.unpack is None:
            return ys[0]
        return torch.cat([y.reshape(steps, lanes, -1) for y in ys], -1)

    def _unpack(self, y: Tensor) -> Any:
        """Several items that lie side by side, `(..., C)`: a dict by their keys, or a tuple."""
        items = self.convention.outputs
        parts = y.split([math.prod(item.features) for item in items], -1)
        rows = [
            (item.path[-1], part.reshape(*y.shape[:-1], *item.features))
            for item, part in zip(items, parts, strict=True)
        ]
        named = dict(rows)
        is_named = len(named) == len(rows) and {*map(type, named)} == {str}
        return named if is_named else tuple(part for _, part in rows)

    def _invoke(self, x: Tensor, state: Any, before: int = 0) -> tuple[Any, State]:
        """The result of the module, and the state after it.

        Args:
            x: inputs.
            state: in the layout of the module; None for the module's own, or a `LayerCall`.
            before: steps of the past among them.
        """
        c, module = self.convention, self.module
        args = c.arrange(x)
        with self._holding(state) if c.scratch else nullcontext():
            if c.call:
                result = c.call(module, *args, state)
                if type(result) is tuple and len(result) == 2:
                    return result
                raise MisfitError("call returns no pair, expected (outputs, next state)")
            if c.layers:
                call = state
                if not isinstance(state, LayerCall):
                    states = {} if state is None else {name: state[name] for name in c.layers}
                    call = LayerCall(states, len(x), before)
                return self._hooks.run(call, args), {**call.before, **call.after}
            if not c.arguments:
                return module(*args), self._attributes()
            names, states = c.arguments, (state,) if len(c.arguments) == 1 else state
            if state is None:  # what is optional has a default of its own
                required = {p.name for p in parameters_of(module.forward) if p.default is p.empty}
                names, states = required.intersection(names), repeat(None)
            result = module(*args, **dict(zip(names, states, strict=False)))
            return result, items_at(result, c.result)

    @contextmanager
    def _holding(self, state: Any) -> Generator[None]:
        """Attributes hold the state of one call, of a module that threads share."""
        with _setting:
            saved = get_attributes(self.module, self.convention.scratch)
            own = (
                {} if state is None else {k: state[key_name(k)] for k in self.convention.attributes}
            )
            values = {key: copied(value) for key, value in (saved | own).items()}
            set_attributes(self.module, values)
            try:
                yield
            finally:
                set_attributes(self.module, saved)


class LayerAdapter(Adapter):
    """A layer of torch.nn, one of tt.nn, which applies resets itself, or a cell: no trial needed.

    Its state is `(B, L, H)`, or `(B, H)` of a cell; one tensor or `(h, c)`.
    """

    def initial_state(self, lanes: int) -> State:
        return self._turned(layer_zeros(self.module, lanes))

    def _turned(self, state: State) -> State:
        """The state with layers and lanes swapped; cuDNN refuses a strided one."""
        if isinstance(self.module, nn.RNNCellBase):
            return state
        return trees.map_tensors(lambda leaf: leaf.transpose(0, 1).contiguous(), state)

    def run(self, x: Tensor, state: State, *resets: Tensor) -> Ran:
        layer, outputs = self.module, list[Tensor]()
        if isinstance(layer, nn.RNNBase):
            x, *flags = (t.transpose(0, 1) if layer.batch_first else t for t in (x, *resets))
            y, after = layer(x, self._turned(state), *flags)
            return y.transpose(0, 1) if layer.batch_first else y, self._turned(after)
        for step in x.unbind(0):  # indexing would have a gradient for all of x at each step
            state = layer(step, state)
            outputs.append(state if isinstance(state, Tensor) else state[0])
        return torch.stack(outputs), state

    @property
    def takes_resets(self) -> bool:
        return isinstance(self.module, Recurrent)


def layer_zeros(module: nn.Module, lanes: int) -> State:
    """The state of the first recurrent layer or cell of torch.nn in a module; None without one."""
    layer = next((m for m in module.modules() if isinstance(m, RECURRENT)), None)
    if layer is None:
        return None
    rows = [layer.num_layers] if isinstance(layer, nn.RNNBase) else []
    sizes = getattr(layer, "proj_size", 0) or layer.hidden_size, layer.hidden_size
    h, c = (next(layer.parameters()).new_zeros(*rows, lanes, size) for size in sizes)
    return (h, c) if isinstance(layer, (nn.LSTM, nn.LSTMCell)) else h


ZEROS = (layer_zeros,)  # a start that is guessed, as one of the user's


def call_method(module: nn.Module, name: str, lanes: int, example: Tensor) -> State:
    """What a method that makes initial states returns for some lanes.

    Args:
        module: the owner of the method.
        name: of the method. Its parameters are filled by their names: inputs, a device, a state
            that is None; what else it requires is the number of lanes.
        lanes: B.
        example: inputs as the module takes them.
    """
    method, values = getattr(module, name), {}
    for p in parameters_of(method):
        if p.default is p.empty or "batch" in p.name:
            other = example.device if p.name == "device" else lanes
            value = example if INPUT_NAME.fullmatch(p.name) else other
            values[p.name] = None if names_state(p.name) else value
    return method(**values)
