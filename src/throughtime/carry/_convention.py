"""How a module is called: its inputs, its state, where a recording starts, and its outputs.

A convention is a description without the module: the same one fits a copy on which it was tried.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry._adapter import NO_LANES, LaneLayout
from throughtime.carry._names import INPUT_NAMES, names_lanes, names_state, parameters_of
from throughtime.carry._ports import Key, Port, is_torch
from throughtime.errors import ModelError
from throughtime.state import State

Call = Literal["chunk", "every", "step", "last"]
Path = tuple["int | str | slice", ...]  # of an item in what a module returned

CALLS: dict[Call, str] = {
    "chunk": "one call for each chunk",
    "every": "one call for each chunk; what follows the last layer runs for every step",
    "step": "one call for each step, without a time dimension",
    "last": "one call for each step, as a chunk of length 1",
}


class MisfitError(Exception):
    """A result does not have the shape or the structure that a convention says."""


@dataclass(frozen=True)
class InputLayout:
    """What a module takes for inputs `(T, B, D)`, or for tokens `(T, B)`.

    Attributes:
        order: "TB", "BT", "BDT", "flat" (T*B, D), "T" (one lane); for one step "B", or "" for one
            step of one lane.
        drop: whether a single feature has no dimension of its own.
        contiguous: whether the module calls `view`, which a transposed view would break.
        transform: the user's function of inputs, time first, instead of an order.
    """

    order: str
    drop: bool = False
    contiguous: bool = False
    transform: Callable[[Tensor], Any] | None = field(default=None, compare=False)

    def arrange(self, x: Tensor) -> tuple[Any, ...]:
        """The arguments for inputs of the chunk, or of one step."""
        if self.transform is not None:
            inputs = self.transform(x[0] if self.order in ("B", "") else x)
            return inputs if isinstance(inputs, tuple) else (inputs,)
        arranged = _INPUTS[self.order][1](x.squeeze(-1) if self.drop else x)
        return (arranged.contiguous() if self.contiguous else arranged,)

    def __str__(self) -> str:
        if self.transform is not None:
            return "what inputs= returns"
        return _INPUTS[self.order][0] + (" without a feature dimension" if self.drop else "")


_INPUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "TB": ("(T, B, ...)", lambda x: x),
    "BT": ("(B, T, ...)", lambda x: x.transpose(0, 1)),
    "BDT": ("(B, D, T)", lambda x: x.movedim(0, -1)),
    "flat": ("(T*B, ...)", lambda x: x.flatten(0, 1)),
    "T": ("(T, ...), one lane", lambda x: x[:, 0]),
    "B": ("(B, ...)", lambda x: x[0]),
    "": ("(...), one step of one lane", lambda x: x[0, 0]),
}


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
    """A path as Python writes it: `[0]`, `['logits']`, `.state`."""

    def key_name(key: int | str | slice) -> str:
        if isinstance(key, slice):
            return f"[{'' if key.start is None else key.start}:]"
        return f"[{key!r}]"

    return "".join(map(key_name, path))


@dataclass(frozen=True)
class OutputLayout:
    """Which item of a result the outputs are, and how they lie.

    Attributes:
        path: of the item.
        order: "TB", "BT", "flat TB", "flat BT", "BCT", "T" (one lane), "B" (one step), "".
        features: the shape of one output; None while it is unknown.
        several: the layouts of several items, whose features are read side by side, in a row.
    """

    path: Path
    order: str
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
        y = item_at(result, self.path)
        if not isinstance(y, Tensor):
            raise MisfitError(f"returned a {type(y).__name__}, expected one tensor of outputs")
        order, features = self.order, self.features
        lane_major = order in ("BT", "flat BT", "BCT")
        dims = (lanes, steps) if lane_major else (steps, lanes)
        leading = _leading_dims(order, dims, steps, lanes)
        if order == "BCT":
            if y.dim() < 3 or (y.shape[0], y.shape[2]) != dims:
                raise self._misfit(y, steps, lanes)
            y = y.movedim(2, 1)
        elif y.shape[: len(leading)] != leading or (
            features is not None and y.dim() != len(leading) + len(features)
        ):
            # squeeze() in a module drops a time or a batch of one
            if features is None or y.numel() != math.prod((*dims, *features)):
                raise self._misfit(y, steps, lanes)
            y = y.reshape(*leading, *features)
        if leading != dims:
            y = y.reshape(*dims, *y.shape[len(leading) :])
        return y.transpose(0, 1) if lane_major else y

    def unpack(self, y: Tensor) -> Any:
        """Several items that lie side by side, `(..., C)`: a dict by their keys, or a tuple."""
        parts = y.split([math.prod(item.features or ()) for item in self.several], -1)
        items = {
            item.path: part.reshape(*y.shape[:-1], *(item.features or ()))
            for item, part in zip(self.several, parts, strict=True)
        }
        named = {path[-1]: item for path, item in items.items() if isinstance(path[-1], str)}
        return named if len(named) == len(items) else tuple(items.values())

    def _misfit(self, y: Tensor, steps: int, lanes: int) -> MisfitError:
        return MisfitError(
            f"returned outputs of shape {tuple(y.shape)} for {steps} steps of {lanes} lanes,"
            f" expected {self}: one output per step; the stream's mask selects those that count in"
            " the loss"
        )

    def __str__(self) -> str:
        return _OUTPUTS[self.order]


_OUTPUTS = {
    "TB": "(T, B, C)",
    "BT": "(B, T, C)",
    "BCT": "(B, C, T, ...)",
    "flat TB": "(T*B, C), steps first",
    "flat BT": "(B*T, C), lanes first",
    "T": "(T, C), one lane",
    "B": "(B, C)",
    "": "(C,), one step of one lane",
}


def _leading_dims(order: str, dims: tuple[int, int], steps: int, lanes: int) -> tuple[int, ...]:
    """The leading dimensions of outputs in an order."""
    if order in ("TB", "BT", "BCT"):
        return dims
    if order.startswith("flat"):
        return (steps * lanes,)
    return {"T": (steps,), "B": (lanes,)}.get(order, ())


@dataclass(frozen=True)
class StateSource:
    """Where the state of a module is.

    Attributes:
        arguments: the parameters that take it, which the module returns; empty for
            `forward((x, state))`; None for a state inside.
        result: where the next state is in the result.
        ports: recurrent submodules by name, which hold the state; or the one that shows what a
            module passes to it that takes its state as an argument.
        attributes: attributes, or buffers, that hold the state: (module, name).
        scratch: attributes in which the module keeps the same state; restored after every call.
    """

    arguments: tuple[str, ...] | None = None
    result: Path = ()
    ports: Mapping[str, Port] = field(default_factory=dict[str, Port])
    attributes: tuple[Key, ...] = ()
    scratch: tuple[Key, ...] = ()

    def __str__(self) -> str:
        if self.arguments is not None:
            names = ", ".join(self.arguments)
            where = f"argument {names}" if names else "the argument (x, state)"
            item = f"item {path_name(self.result)} of the result" if self.result else "the result"
            return f"{where}; the next state is {item}"
        parts = [
            f"the hidden state of {'layer' if is_torch(port) else 'module'} '{name}', set and read"
            " by hooks"
            for name, port in self.ports.items()
        ]
        return "; ".join([*parts, *(f"attribute {key_name(key)}" for key in self.attributes)])

    def next_state(self, result: Any, after: State) -> State:
        """The next state; `after` is that of a state inside."""
        return after if self.arguments is None else item_at(result, self.result)


def key_name(key: Key) -> str:
    """An attribute as Python writes it, without the module: `memory.cells`."""
    return ".".join(filter(None, key))


MISSING = object()  # the value of an attribute that a module does not have yet


def attribute(module: nn.Module, key: Key) -> Any:
    """The value of an attribute or a buffer of a submodule."""
    return getattr(module.get_submodule(key[0]), key[1], MISSING)


def set_attribute(module: nn.Module, key: Key, value: Any) -> None:
    """Set an attribute or a buffer, without the checks of `nn.Module.__setattr__`."""
    owner = module.get_submodule(key[0])
    values = owner._buffers if key[1] in owner._buffers else owner.__dict__
    if value is MISSING:
        values.pop(key[1], None)
    else:
        values[key[1]] = value


StartKind = Literal["zeros", "method", "captured", "tensors", "function"]


@dataclass(frozen=True)
class Start:
    """The state that enters the first step of a recording.

    Attributes:
        kind: "zeros"; "method", what a method of the module returns; "captured", what the module
            itself passes to its layers or has in its attributes; "tensors", parameters or buffers;
            "function", the user's.
        methods: the methods, one for each argument of the state or one for all; or the tensors.
        template: of zeros, what a first call gets in a trial: None, "scalar", or the path of the
            layer whose state has the shape.
        function: the user's.
    """

    kind: StartKind
    methods: tuple[str, ...] = ()
    template: str | None = None
    function: Callable[[int], State] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        calls = "(...)" if self.kind == "method" else ""
        own = " and ".join(f"module.{name}{calls}" for name in self.methods)
        others = {"captured": "what the module itself starts from", "function": "start(lanes)"}
        return own or others.get(self.kind, self.kind)


def call_start(module: nn.Module, name: str, lanes: int, example: Tensor) -> State:
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
    method = getattr(module, name)
    weight = next(module.parameters(), example)
    known = {"device": weight.device, "dtype": weight.dtype} | dict.fromkeys(INPUT_NAMES, example)
    args: list[Any] = []
    options: dict[str, Any] = {}
    required = [p for p in parameters_of(method) if p.default is p.empty or names_lanes(p.name)]
    for p in required:
        if names_lanes(p.name) or (len(required) == 1 and p.name not in INPUT_NAMES):
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


def widen(state: State, lanes: int) -> State:
    """A state of one lane repeated for all lanes; leaves that have so many rows stay.

    Raises:
        MisfitError: a leaf without a dimension of size 1.
    """

    def widen_leaf(leaf: Tensor) -> Tensor:
        if lanes in leaf.shape or lanes == 1 or not leaf.dim():
            return leaf
        ones = [i for i, size in enumerate(leaf.shape) if size == 1]
        if not ones:
            raise MisfitError(f"a state of shape {tuple(leaf.shape)} has no dimension for lanes")
        dim = 1 if leaf.dim() == 3 and 1 in ones else ones[0]
        sizes = [lanes if i == dim else size for i, size in enumerate(leaf.shape)]
        return leaf.expand(sizes).contiguous()

    return trees.map_leaves(widen_leaf, state)


@dataclass(frozen=True)
class ResetArgument:
    """A parameter such as `done`, `is_first` or `mask` that is 1 (or 0) where a lane restarts.

    Attributes:
        name: of the parameter.
        inverted: whether 0 means a restart.
        dtype: of the flags.
        column: whether they have a last dimension of size 1.
        applied: whether the module restarts a lane exactly as a reset does.
    """

    name: str
    inverted: bool = False
    dtype: torch.dtype = torch.bool
    column: bool = False
    applied: bool = False

    def value(self, x: Tensor, resets: Tensor | None, layout: InputLayout) -> Tensor:
        """The argument for a chunk `(T, B, ...)`."""
        flags = (
            torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
            if resets is None
            else resets
        )
        flags = (flags.logical_not() if self.inverted else flags).to(self.dtype)
        (arranged,) = InputLayout(layout.order).arrange(flags)
        return arranged.unsqueeze(-1) if self.column else arranged


@dataclass(frozen=True)
class Convention:
    """One way of calling a module as `(x, state) -> (y, state)`.

    Trials begin with a part of it, and add the places of state, lanes and outputs.

    Attributes:
        call: what one call of the module runs.
        inputs: their layout.
        source: where the state is.
        start: the state before the first step.
        outputs: their layout.
        lanes: where the lanes are in the state.
        flags: boolean parameters that are passed as true.
        sizes: attributes that are set to the number of lanes: (module, name).
        resets: the parameter for resets.
        context: steps of the past that precede every chunk.
        every: the port after which a module with `call="every"` runs for every step.
        single: whether layers that can apply resets get whole chunks.
        method: the name of the method that is called instead of forward.
        input_name: the parameter of the inputs, if it is not the first.
    """

    call: Call
    inputs: InputLayout
    source: StateSource = StateSource()
    start: Start = Start("zeros")
    outputs: OutputLayout = OutputLayout((), "TB")
    lanes: LaneLayout = NO_LANES
    flags: tuple[str, ...] = ()
    sizes: tuple[Key, ...] = ()
    resets: ResetArgument | None = None
    context: int = 0
    every: str | None = None
    single: bool = False
    method: str = "forward"
    input_name: str | None = None

    @property
    def one_lane(self) -> bool:
        """Whether the module takes a single lane only."""
        return any(dim.dim is None for dim in self.lanes.dims)


def misfit_error(module: nn.Module, error: MisfitError) -> ModelError:
    """The error for a module that returned something else than in the trials."""
    return ModelError(f"{type(module).__name__} {error}.")
