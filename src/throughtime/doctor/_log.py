"""The log of a training loop: its events, the position in it, and an index of its graph.

Rules are functions of the log and its last event. Sequence numbers of nodes are autograd's: later
nodes have larger ones.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple

from throughtime.doctor._frames import Instruction, SourceLine

MAX_CHANGES = 5_000  # in-place changes remembered
MAX_EVENTS = 4_096  # events remembered


@dataclass(eq=False)
class Backward:
    """A backward of the user; its facts are those before it ran."""

    letter = "b"
    line: SourceLine
    retain: bool = False
    used: bool = False  # its gradients were read or stepped with, or this was not watched
    number: int = -1  # the sequence number of the first tensor's node, -1 without one
    chunk: int = 0
    steps: int = 0  # of optimizers before it
    newest: int = 0  # the sequence number of the next node
    boundary: int = -1  # nodes up to this sequence number were created before its end
    reach: int = -1  # of a retained graph: the backwards in this line that it reaches back to


@dataclass(eq=False)
class Change:
    """A call that clears gradients or clips them."""

    letter: str  # "c" or "l"
    parameters: frozenset[int]  # their ids; of a clip that of the first
    line: SourceLine | None = None  # `None` by hand


@dataclass(eq=False)
class WeightStep:
    """An optimizer step; its facts are those after it."""

    parameters: frozenset[int]
    line: SourceLine | None
    before: "WeightStep | None" = None  # the last one of the optimizer
    grad: Any = None  # a weak reference to a gradient
    chunk: int = 0
    number: int = -1  # the largest sequence number before it
    lacks: bool = False  # all gradients are missing or zero
    repeated: bool = False  # the gradient is the same tensor as at the last step
    has_hooks: bool = False  # that use the gradients
    # the line that made the optimizer, if gradients arrived at parameters that none has
    constructed: SourceLine | None = None
    evaluating: SourceLine | None = None  # the call of eval() that no train() has undone
    lost: int = 0  # backwards before it whose gradients were cleared unused


class Close:
    """The end of the loop, without an error."""


class Fault(NamedTuple):
    """The arguments of `FindingList.add`."""

    code: str
    line: SourceLine | None
    detail: str = ""
    tensor: str = ""
    fix: str = ""
    after: int = 1


@dataclass(eq=False)
class Log:
    """The events of a loop, the position in it, and the nodes of its graph by number."""

    events: list[Any] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)  # those among the events
    chunk: int = 0  # backward calls so far
    call: int = 0  # calls of outermost modules so far
    training: bool | None = None  # of the outermost module that runs
    batch: tuple[int, int] = (0, 0)  # the loader's iterator, and the batch
    random: bool = False  # the loader's sampler does not keep the order of time
    loader: SourceLine | None = None  # where its batches are read
    crossed: set[int] = field(default_factory=set)  # chunks that an earlier chunk's state enters
    recurrent: Instruction | None = None  # the last call of a recurrent unit
    units: dict[Any, Instruction] = field(default_factory=dict)  # where each was last called
    steps: int = 0  # of optimizers so far
    retained: bool = False  # a backward reaches back to an earlier one
    boundary: int = -1  # the largest sequence number before the last backward
    # ascending numbers and instructions
    nodes: list[Any] = field(default_factory=lambda: [(-1, None)])
    # in-place changes: version after it, shape, instruction, last sequence number
    in_place: deque[Any] = field(default_factory=lambda: deque(maxlen=MAX_CHANGES))
    # states that entered with a graph of an earlier chunk, by the instruction that took them
    carried: dict[Any, Any] = field(default_factory=dict)
    # the last result of each chunk that still exists
    results: dict[Any, dict[int, Any]] = field(default_factory=dict)
    targets: int = 0  # elements that the last results were compared with, and where
    compared_at: Any = None
    # sums of losses: the node of the last value, and the chunks before that it goes through
    sums: dict[Any, Any] = field(default_factory=dict)
    roots: set[Any] = field(default_factory=set)  # that computed what was sent back

    def append(self, event: Any) -> None:
        """Add an event, and forget the oldest."""
        self.events.append(event)
        if isinstance(event, Backward):
            self.backwards.append(event)
            self.retained |= event.reach > 0
        for events in (self.events, self.backwards):
            del events[:-MAX_EVENTS]

    def before(self, step: WeightStep) -> list[Any]:
        """The backwards (b), clears (c) and clips (l) between a step, the last event, and the last.

        Only steps, clears and clips of any of its parameters count.
        """
        past: Any = islice(reversed(self.events), 1, None)
        own = (e for e in past if isinstance(e, Backward) or e.parameters & step.parameters)
        return [*takewhile(lambda event: not isinstance(event, WeightStep), own)][::-1]

    def instruction_of(self, number: int) -> Instruction | None:
        """The instruction that created the node of this sequence number."""
        position = bisect_left(self.nodes, (number,))
        return self.nodes[position][1] if position < len(self.nodes) else None

    def add_node(self, number: int, instruction: Instruction | None) -> None:
        """Record a node; `None` for those that were created unwatched before it."""
        if number > self.nodes[-1][0]:
            self.nodes.append((number, instruction))
