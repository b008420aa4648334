"""Records of the watched loop: its operations, tensors, detaches and recurrent calls."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from throughtime.doctor._frames import Instruction

if TYPE_CHECKING:
    from throughtime.doctor._data import View

MAX_STEPS = 2**20  # in one call
# Operations by name. Recurrent layers and cells,
LAYERS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
CELLS = {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
RECURRENT = LAYERS | CELLS
# those that select rows, that take a part, that cast or copy:
ROWS = frozenset(["__getitem__", "index_select", "flip", "roll"])
STEPS = frozenset(["__getitem__", "unbind", "select"])
SLICES = frozenset(["__getitem__", "unbind", "split", "chunk", "select", "narrow", "transpose"])
CASTS = frozenset(["to", "float", "double", "half", "clone", "contiguous"])
CLONES = frozenset(["clone", "__deepcopy__"])
DETACHES = frozenset(["detach", "data", "detach_"])
IN_PLACE_ZEROS = frozenset(["zero_", "fill_"])
# those that pass a state on unchanged,
COPY_OR_VIEW = (
    DETACHES
    | ROWS
    | SLICES
    | CASTS
    | {
        "view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "t",
        "permute",
        "cpu",
        "cuda",
        "expand",
        "requires_grad_",
        "type",
        "movedim",
        "__deepcopy__",
    }
)
# and those that mask or reset some of its values.
EDITS = frozenset(
    [
        "mul",
        "__mul__",
        "__rmul__",
        "where",
        "masked_fill",
        "masked_fill_",
        "mul_",
        "__imul__",
        "add",
        "__add__",
        "lerp",
        "index_copy",
        "index_fill",
    ]
)
MASKS = EDITS - {"add", "__add__", "index_copy", "index_fill"}
GETTERS = {"data", "grad", "T", "mT", "H"}
EMPTY: frozenset[Any] = frozenset()


def _no_tensor() -> Tensor | None:
    return None


@dataclass(eq=False)
class Unit:
    """A recurrent layer or cell, or an instruction that takes in its own result, with its past."""

    key: Any  # the id of its first weight, or the instruction
    last: dict[bool | None, "UnitCall"] = field(default_factory=dict)  # its last call by mode
    first: "UnitCall | None" = None  # the first call of its pass over the data
    carried: bool = False  # a state entered the next chunk in time
    in_order: bool = False  # the last one did
    replayed: int = -1  # the last chunk that was read twice
    replays: int = 0  # chunks that were read twice, the second time from the state at their end
    jumps: bool = False  # a state jumped in time
    mixed: bool = False  # it reads several tensors within one chunk
    samples: bool = False  # its chunks are samples of their own
    reread: bool = False  # it reads each chunk several times
    repeated: "UnitCall | None" = None  # the last call of several on the same inputs
    evaluation: "UnitCall | None" = None  # the last call of a graph without a backward
    trained: int = 0  # the most calls connected before a backward
    fresh: Any = None  # its chunks that started from one state
    wrap: Any = None  # its state that entered what it comes from


@dataclass(slots=True, eq=False)
class UnitCall:
    """One call of a recurrent unit: a step of a cell, a chunk of a layer."""

    unit: Unit
    instruction: Instruction
    chunk: int
    call: int
    batch: tuple[int, int]
    training: bool | None
    grad: bool
    data: "View | None"  # the inputs, without the state
    steps: int = 1
    lane_dim: int | None = 0
    time_dim: int | None = None
    batch_sizes: Tensor | None = None  # of packed data, the lanes at each step
    graph_steps: int = 1  # steps connected in one graph
    graph_calls: int = 1  # calls of the unit connected in one graph
    model_calls: int = 0  # changes of the model call, the batch or the part of the data within it
    is_layer: bool = False
    inputs: Tensor | None = None  # of a layer, without their graph
    lanes: Any = None  # where each lane of the data begins and ends
    previous: "View | None" = None  # of single steps, the data of the one before
    parent: "UnitCall | None" = None  # the call, maybe of another unit, that its state comes from
    detach: "DetachRecord | None" = None  # the last of its outputs
    masks: bool = False  # it masks a state by its data
    start: Any = None  # copies of the states from which its chunk started
    begin: "UnitCall | None" = None  # the first call in its chunk, if it is another one
    copies: int = 0  # of the memory of its state since the call that it comes from
    beside: bool = False  # its state ended the inputs beside its own
    exchanged: str = ""  # what shows that batch and time are exchanged
    repeats: int = 0  # calls or chunks before it, one after the other, that read the same data


@dataclass(slots=True, eq=False)
class DetachRecord:
    """A detach within a chunk, and how many of the same line came before it."""

    instruction: Instruction
    chunk: int
    count: int
    weights: frozenset[int] = EMPTY  # the leaves behind it, if it follows a single step


@dataclass(eq=False)
class TensorRecord:
    """Facts about one tensor that depends on a parameter."""

    chunk: int
    instruction: Instruction
    ref: Callable[[], Tensor | None] = _no_tensor
    lineage: frozenset[Any] = EMPTY  # units and instructions that it went through
    path: frozenset[Any] = EMPTY  # the same since the last detach
    repeated: bool = False  # one of them more than once
    detach: DetachRecord | None = None
    source: UnitCall | None = None  # the recurrent call that it comes from
    edited: bool = False  # values were changed since that call
    lost: Instruction | None = None  # a detach of this tensor whose result was not kept
    copies: int = 0  # of its memory since that call
    # for each element its step and lane in that call, see `numbers`; one or one for each result
    index: Any = None
    depth: int = 0  # chunks that a sum goes through
    call: int = 0  # the call of an outermost module before it, for a sum that of its last term
    passes: int = 0  # such calls in a sum

    def copy(self) -> "TensorRecord":
        """A copy; several times faster than `copy.copy`."""
        other = object.__new__(TensorRecord)
        vars(other).update(vars(self))
        return other


@dataclass(slots=True, eq=False)
class Operation:
    """One operation, with the records of its inputs."""

    name: str
    func: Any
    args: Any
    kwargs: Any
    inputs: list[Tensor]
    records: list[TensorRecord | None]
    outputs: list[Tensor]
    instruction: Instruction
    is_choice: bool = False  # its result is data, although it depends on parameters
    # the inputs that this instruction computed earlier; empty for layers and cells
    loop_inputs: list[tuple[Tensor, TensorRecord]] = field(default_factory=list)

    @property
    def is_layer(self) -> bool:
        """Whether it is a recurrent layer of torch."""
        return self.name in LAYERS

    @property
    def is_recurrent(self) -> bool:
        """Whether it is a recurrent layer or cell of torch."""
        return self.name in RECURRENT

    def pairs(self) -> Iterator[tuple[Tensor, TensorRecord | None]]:
        """The inputs with their records."""
        return zip(self.inputs, self.records, strict=True)


def numbers(tensor: Tensor, lane_dim: int | None, time_dim: int | None, steps: int) -> Any:
    """The number lane * MAX_STEPS + step of each element of a call's result, as a tensor.

    What only moves elements of the result, such as a choice of lanes, is applied to them too. A
    state is of the last step. `None` without a dimension of lanes.
    """
    return _numbers(tensor.shape, lane_dim, time_dim, steps, tensor.device)


@lru_cache(maxsize=64)
def _numbers(
    shape: torch.Size, lane_dim: int | None, time_dim: int | None, steps: int, device: torch.device
) -> Tensor | None:
    if lane_dim is None or lane_dim >= len(shape):
        return None
    grid = torch.full((1,) * len(shape), 0 if time_dim is not None else steps - 1, device=device)
    for dim, factor in ((lane_dim, MAX_STEPS), (time_dim, 1)):
        if dim is not None:
            sizes = [shape[dim] if d == dim else 1 for d in range(len(shape))]
            grid = grid + factor * torch.arange(shape[dim], device=device).view(sizes)
    return grid.expand(shape)


@lru_cache(maxsize=16)
def lanes_and_step(index: Tensor | None) -> tuple[list[int] | None, int | None]:
    """The lane of each row of a state by its `numbers`, and its step if there is one."""
    if index is None or not index.numel():
        return None, None
    origin = (0,) * index.dim()
    dims = range(index.dim())
    lines = [index[(*origin[:d], slice(None), *origin[d + 1 :])].tolist() for d in dims]
    lanes = [[n // MAX_STEPS for n in line] for line in lines] or [[int(index) // MAX_STEPS]]
    steps = {n % MAX_STEPS for line in lines for n in line}
    rows = next((line for line in lanes if len(set(line)) > 1), lanes[0][:1])
    return rows, steps.pop() if len(steps) == 1 else None


def tensors(tree: Any, depth: int = 3) -> list[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    if not isinstance(tree, (tuple, list)) or not depth:
        return []
    result: list[Tensor] = []
    for branch in tree:
        if isinstance(branch, Tensor):
            result.append(branch)
        elif isinstance(branch, (tuple, list)):
            result += tensors(branch, depth - 1)
    return result


@lru_cache(maxsize=1024)
def operation_name(func: Any) -> str:
    """The name of an operation; for a getter that of the attribute."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


@lru_cache(maxsize=1024)
def is_in_place(name: str) -> bool:
    """Whether an operation changes its first argument."""
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.startswith("_"))
        or (name.startswith("__i") and name not in {"__int__", "__invert__", "__index__"})
    )


def is_edit(op: Operation) -> bool:
    """Whether an operation may reset values of a state: a factor other than 0 and 1 does not."""
    factor = [arg for arg in op.args if not isinstance(arg, Tensor)]
    is_decay = "mul" in op.name and len(factor) == 1 and factor[0] not in {0, 1}
    return op.name == "__setitem__" or (op.name in EDITS and not is_decay)


def puts_lanes_back(op: Operation) -> bool:
    """Whether lanes chosen by a tensor or list of indices are written into a state of all lanes."""
    if op.name != "__setitem__" or len(op.args) != 3:
        return op.name == "index_copy"
    key, value = op.args[1:]
    parts = key if isinstance(key, tuple) else (key,)
    return isinstance(value, Tensor) and any(isinstance(part, (Tensor, list)) for part in parts)


def has_mask(op: Operation) -> bool:
    """Whether an operation masks a result by data: by numbers from 0 to 1.

    Zeros of the shape of the result are a state at the start, not a mask.
    """
    if op.name not in MASKS or all(r is None for r in op.records):
        return False
    shape = op.outputs[0].shape
    masks = (
        t for t, r in op.pairs() if t.dim() and t.numel() and not t.requires_grad and r is None
    )
    return any(
        t.dtype == torch.bool
        or (bool((t >= 0).all() & (t <= 1).all()) and (t.shape != shape or bool(t.any())))
        for t in masks
        if not t.is_complex()
    )
