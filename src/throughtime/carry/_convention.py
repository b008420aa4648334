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
from throughtime.carry._adapter import LaneLayout
from throughtime.carry._names import INPUT_NAMES, names_lanes, parameters_of
from throughtime.carry._ports import Port, TorchPort
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
        if self.drop:
            x = x.squeeze(-1)
        match self.order:
            case "TB":
                arranged = x
            case "BT":
                arranged = x.transpose(0, 1)
            case "BDT":
                arranged = x.permute(1, 2, 0)
            case "flat":
                arranged = x.flatten(0, 1)
            case "T":
                arranged = x[:, 0]
            case "B":
                arranged = x[0]
            case _:
                arranged = x[0, 0]
        return (arranged.contiguous() if self.contiguous else arranged,)

    def __str__(self) -> str:
        if self.transform is not None:
            return "what inputs= returns"
        names = {
            "TB": "(T, B, ...)",
            "BT": "(B, T, ...)",
            "BDT": "(B, D, T)",
            "flat": "(T*B, ...)",
            "T": "(T, ...), one lane",
            "B": "(B, ...)",
            "": "(...), one step of one lane",
        }
        return names[self.order] + (" without a feature dimension" if self.drop else "")


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
    """

    path: Path
    order: str
    features: tuple[int, ...] | None = None

    def read(self, result: Any, steps: int, lanes: int) -> Tensor:
        """The outputs `(T, B, ...)`.

        Raises:
            MisfitError: the item is no tensor, or its shape does not fit.
        """
        y = item_at(result, self.path)
        if not isinstance(y, Tensor):
            raise MisfitError(f"returned a {type(y).__name__}, expected one tensor of outputs")
        if self.order == "BCT":
            if y.dim() < 3 or (y.shape[0], y.shape[2]) != (lanes, steps):
                raise self._misfit(y, steps, lanes)
            return y.movedim(2, 0)
        is_lane_major = self.order in ("BT", "flat BT")
        dims = (lanes, steps) if is_lane_major else (steps, lanes)
        leading = _leading_dims(self.order, steps, lanes)
        y = self._checked(y, leading, dims)
        if leading != dims:
            y = y.reshape(*dims, *y.shape[len(leading) :])
        return y.transpose(0, 1) if is_lane_major else y

    def _checked(self, y: Tensor, leading: tuple[int, ...], dims: tuple[int, int]) -> Tensor:
        """The item with the leading dimensions of this order."""
        features = self.features
        if y.shape[: len(leading)] == leading and (
            features is None or y.dim() == len(leading) + len(features)
        ):
            return y
        # squeeze() in a module drops a time or a batch of one
        if features is None or y.numel() != math.prod((*dims, *features)):
            raise self._misfit(y, *(dims[::-1] if self.order in ("BT", "flat BT") else dims))
        return y.reshape(*leading, *features)

    def _misfit(self, y: Tensor, steps: int, lanes: int) -> MisfitError:
        return MisfitError(
            f"returned outputs of shape {tuple(y.shape)} for {steps} steps of {lanes} lanes,"
            f" expected {self}: one output per step; the stream's mask selects those that count in"
            " the loss"
        )

    def __str__(self) -> str:
        names = {
            "TB": "(T, B, C)",
            "BT": "(B, T, C)",
            "BCT": "(B, C, T, ...)",
            "flat TB": "(T*B, C), steps first",
            "flat BT": "(B*T, C), lanes first",
            "T": "(T, C), one lane",
            "B": "(B, C)",
            "": "(C,), one step of one lane",
        }
        return names[self.order]


def _leading_dims(order: str, steps: int, lanes: int) -> tuple[int, ...]:
    """The leading dimensions of outputs in an order."""
    match order:
        case "TB":
            return steps, lanes
        case "BT":
            return lanes, steps
        case "flat TB" | "flat BT":
            return (steps * lanes,)
        case "T":
            return (steps,)
        case "B":
            return (lanes,)
        case _:
            return ()


@dataclass(frozen=True)
class ArgumentState:
    """A state that the module takes as arguments and returns.

    Attributes:
        names: the parameters; empty for `forward((x, state))`.
        result: where the state is in the result.
    """

    names: tuple[str, ...]
    result: Path

    def __str__(self) -> str:
        where = f"argument {', '.join(self.names)}" if self.names else "the argument (x, state)"
        item = f"item {path_name(self.result)} of the result" if self.result else "the result"
        return f"{where}; the next state is {item}"


@dataclass(frozen=True)
class InternalState:
    """A state that the module keeps inside: in its submodules, or in attributes.

    Attributes:
        ports: recurrent submodules by name.
        attributes: attributes, or buffers, that hold the state: (module, name).
        scratch: attributes in which the module keeps the same state; restored after every call.
    """

    ports: Mapping[str, Port]
    attributes: tuple[tuple[str, str], ...] = ()
    scratch: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        parts = [
            f"the hidden state of {'layer' if isinstance(port, TorchPort) else 'module'} '{name}',"
            " set and read by hooks"
            for name, port in self.ports.items()
        ]
        parts += [f"attribute {'.'.join(filter(None, key))}" for key in self.attributes]
        return "; ".join(parts)


MISSING = object()  # the value of an attribute that a module does not have yet


def state_of(source: ArgumentState | InternalState, result: Any, after: State) -> State:
    """The next state; `after` is that of a state inside."""
    return item_at(result, source.result) if isinstance(source, ArgumentState) else after


def attribute(module: nn.Module, key: tuple[str, str]) -> Any:
    """The value of an attribute or a buffer of a submodule."""
    return getattr(module.get_submodule(key[0]), key[1], MISSING)


def set_attribute(module: nn.Module, key: tuple[str, str], value: Any) -> None:
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
        ports: the layer that shows what a module passes which takes its state as an argument.
        function: the user's.
    """

    kind: StartKind
    methods: tuple[str, ...] = ()
    template: str | None = None
    ports: Mapping[str, Port] = field(default_factory=dict[str, Port])
    function: Callable[[int], State] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        match self.kind:
            case "zeros":
                return "zeros"
            case "method":
                return " and ".join(f"module.{name}(...)" for name in self.methods)
            case "tensors":
                return " and ".join(f"module.{name}" for name in self.methods)
            case "captured":
                return "what the module itself starts from"
            case _:
                return "start(lanes)"


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
    values: list[Any] = []
    required = [p for p in parameters_of(method) if p.default is p.empty or names_lanes(p.name)]
    options: dict[str, Any] = {}
    for p in required:
        if names_lanes(p.name) or (len(required) == 1 and p.name not in INPUT_NAMES):
            value: Any = lanes
        elif p.name == "device":
            value = weight.device
        elif p.name == "dtype":
            value = weight.dtype
        elif p.name in INPUT_NAMES:
            value = example
        else:
            raise MisfitError(f"{name} needs a value for {p.name}")
        if p.default is p.empty:
            values.append(value)
        else:
            options[p.name] = value
    return method(*values, **options)


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
        arranged = InputLayout("BT" if layout.order == "BDT" else layout.order).arrange(flags)[0]
        return arranged.unsqueeze(-1) if self.column else arranged


@dataclass(frozen=True)
class Convention:
    """One complete way of calling a module as `(x, state) -> (y, state)`.

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
    source: ArgumentState | InternalState
    start: Start
    outputs: OutputLayout
    lanes: LaneLayout
    flags: tuple[str, ...] = ()
    sizes: tuple[tuple[str, str], ...] = ()
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
