"""What the doctor notes about a tensor and about a step of a recurrent unit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

from torch import Tensor

from throughtime.doctor.frames import Key, Place

Unit = Any
"""A recurrent layer (the id of its first weight) or an instruction of the user's that takes in what it gave."""

NOTHING: frozenset[Any] = frozenset()


@dataclass(slots=True, eq=False)
class Clock:
    """Which chunk, call and batch it is."""

    chunk: int = 0  # backward calls so far
    call: int = 0  # calls of outermost modules so far
    inside: int = 0  # modules that are running, one in another
    training: bool | None = None  # of the outermost module that is running
    batch: tuple[int, int] = (0, 0)  # the loader's iterator, and the batch
    random: bool = False  # the loader draws without order
    loader: Place | None = None  # the line to blame for the order of the batches
    crossed: set[int] = field(
        default_factory=set
    )  # chunks that a recurrent state of an earlier one came into


@dataclass(slots=True, eq=False)
class Step:
    """One call of a recurrent unit: a step of a cell, a chunk of a layer."""

    unit: Unit
    key: Key
    clock: tuple[int, int, tuple[int, int]]  # chunk, call, batch
    training: bool | None
    grad: bool
    data: Tensor | None
    steps: int
    lane_dim: int | None
    time_dim: int | None
    reached: int = 0  # steps that hang together in one graph
    links: int = 0  # chunks, or steps of a cell, that do
    lanes: Any = None
    calls: int = 0  # how often in that graph a model or a batch followed another


@dataclass(slots=True, eq=False)
class Cut:
    """A detach that went before, in this chunk."""

    key: Key
    chunk: int
    count: int
    weights: frozenset[int] = NOTHING  # the leaves behind it, where only one step was


@dataclass(slots=True, eq=False)
class Seen:
    """What is known of one tensor."""

    ref: "ReferenceType[Tensor]"
    chunk: int
    call: int
    key: Key
    shape: Any
    learned: bool = False
    lineage: frozenset[Any] = NOTHING  # units and instructions that it went through
    path: frozenset[Any] = NOTHING  # the same since the last detach
    twice: bool = False  # one of them more than once
    cut: Cut | None = None
    data: Tensor | None = None
    step: Step | None = None
    edited: bool = False  # between the step and here something changed values
    lane: int | None = None  # the dimension of lanes
    rows: Any = None  # the lane that each row comes from, where rows were chosen
    origin: Any = None  # of data: name, function, arguments
    numbers: Any = None
    depth: int = 0  # chunks through which a sum goes on


def tensors(tree: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)) and depth:
        for branch in tree:
            yield from tensors(branch, depth - 1)
