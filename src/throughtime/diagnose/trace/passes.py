"""What was seen of backward passes: norms by step and lane, the last few passes and no more.

A pass is one run of autograd's engine. The runs of a sweep, which plays a long stretch piece by
piece from its end, are one pass: the state after the later run is the state that entered the
earlier one.

Shapes: `T` steps, `B` lanes, `H` numbers of a state or gate.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from throughtime.errors import ConfigError

PLACE = re.compile(r"(?P<name>.+)\.(?P<leaf>[^.\[\]]+)(\[(?P<step>-?\d+)\])?")


class Block(Protocol):
    """Consecutive steps of one track, seen in one run."""

    @property
    def steps(self) -> int:
        """T."""
        ...

    @property
    def norms(self) -> Mapping[str, Tensor]:
        """By leaf, `(T, B)`."""
        ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """By leaf, `(T, B, H)`; none where norms are all that is kept."""
        ...

    @property
    def entering(self) -> Mapping[str, Tensor]:
        """Norms of what flows on into the state entering the first step, by leaf, `(B,)`."""
        ...

    @property
    def kept(self) -> tuple[Tensor, int] | None:
        """The sum over steps and lanes of the gate that keeps the past, `(H,)`, and their number."""
        ...


@dataclass(frozen=True, eq=False)
class Noted:
    """A block of which all is known."""

    norms: dict[str, Tensor]
    tensors: dict[str, Tensor]
    entering: dict[str, Tensor]
    kept: tuple[Tensor, int] | None

    @property
    def steps(self) -> int:
        """T."""
        return len(next(iter(self.norms.values())))


@dataclass(eq=False)
class Run:
    """One run of the engine: by track and first step, what was seen; the states at its two ends; whether it is one piece of several."""

    task: int
    piece: bool = False
    waiting: dict[int, tuple[Any, dict[str, Tensor]]] = field(
        default_factory=dict[int, tuple[Any, dict[str, Tensor]]]
    )
    blocks: dict[str, dict[int, Block]] = field(default_factory=dict[str, dict[int, Block]])
    came: dict[str, tuple[int, list[Tensor]]] = field(
        default_factory=dict[str, tuple[int, list[Tensor]]]
    )
    went: dict[str, tuple[int, list[Tensor]]] = field(
        default_factory=dict[str, tuple[int, list[Tensor]]]
    )

    def note(
        self, track: str, start: int, block: Block, ends: tuple[list[Tensor], list[Tensor]] | None
    ) -> None:
        """Takes in what consecutive steps of a track were seen to do, with the states at their ends."""
        blocks = self.blocks.get(track)
        if blocks is None:
            blocks = self.blocks[track] = {}
        blocks[start] = block
        if ends is None:
            return
        came, went = ends
        if track not in self.came or start < self.came[track][0]:
            self.came[track] = (start, came)
        if track not in self.went or start > self.went[track][0]:
            self.went[track] = (start, went)

    def leads_to(self, later: "Run") -> bool:
        """Whether a lane's state after this run entered the other one, having moved in this one."""
        return any(
            _same_lane(candidate, went)
            and not any(_same_lane(before, went) for before in self.came[track][1])
            for track, (_, ends) in self.went.items()
            for went in ends
            for candidate in later.came.get(track, (0, []))[1]
        )


def _same_lane(a: Tensor, b: Tensor) -> bool:
    """Whether a lane is the same in both, as closely as two kernels round, and not empty."""
    if a.shape != b.shape or a.dim() < 2:
        return False
    a, b = a.flatten(1), b.flatten(1)
    room = torch.finfo(b.dtype).eps ** 0.5
    largest = b.abs().amax(1)
    return bool((((a - b).abs().amax(1) <= room * largest) & (largest > 0)).any())


@dataclass(frozen=True, eq=False)
class Pass:
    """What a backward pass did: the norm of the gradient of each state and gate, at each step and
    in each lane.

    Steps are counted from the first one that the pass reached; names are `layer0.c`, and
    `layer0.c[17]` for one step.
    """

    runs: tuple[Run, ...]  # in the order of time

    @property
    def names(self) -> tuple[str, ...]:
        """Every state and gate seen: `layer0.h`, `layer0.c`, `layer0.f` and so on."""
        found = {
            f"{track}.{leaf}": None
            for track in self._tracks()
            for block in self._blocks(track)
            for leaf in block.norms
        }
        return tuple(found)

    def __getitem__(self, name: str) -> Tensor:
        """Norms of the gradient, per lane: `(T, B)` for `layer0.c`, `(B,)` for `layer0.c[17]`.

        Raises:
            ConfigError: nothing of that name, or no such step.
        """
        track, leaf, step = self._place(name)
        return _at(self._steps(track, "norms", leaf), name, step)

    def tensor(self, name: str) -> Tensor:
        """The gradient itself: `(T, B, H)` for `layer0.c`, `(B, H)` for `layer0.c[17]`.

        Raises:
            ConfigError: nothing of that name, no such step, or the trace keeps norms only.
        """
        track, leaf, step = self._place(name)
        if not any(block.tensors for block in self._blocks(track)):
            raise ConfigError(
                f"'{name}': this trace keeps norms only; to have the gradients themselves,"
                " tt.trace(net, tensors=True)"
            )
        return _at(self._steps(track, "tensors", leaf), name, step)

    def norms(self, name: str) -> Tensor:
        """Norms over all lanes, `(T,)`."""
        return self[name].square().sum(1).sqrt()

    def edges(self, name: str) -> dict[int, float]:
        """What crosses the edges between calls of a layer, and the first: by step, the norm of the
        adjoint of the state entering it.

        Over all lanes. Step 0 is the edge of the pass: what flows on into the past, or was cut off.
        A cell, which is called at every step, has the edges of the pass and of the pieces of a
        sweep. Empty for a gate, for a direction that starts at the end, and for a cell of your own,
        whose entering state is not seen.
        """
        track, leaf, _ = self._place(name)
        placed = ((at, block.entering.get(leaf)) for at, block in self._placed(track))
        return {at: norms.square().sum().sqrt().item() for at, norms in placed if norms is not None}

    def kept(self) -> dict[str, Tensor]:
        """For each layer with a gate that keeps the past (f of an LSTM, z of a GRU), its mean over steps and lanes, `(H,)`."""
        found: dict[str, Tensor] = {}
        for track in self._tracks():
            sums = [block.kept for block in self._blocks(track) if block.kept is not None]
            if sums:
                found[track] = torch.stack([total for total, _ in sums]).sum(0) / sum(
                    count for _, count in sums
                )
        return found

    def _tracks(self) -> Iterable[str]:
        return dict.fromkeys(track for run in self.runs for track in run.blocks)

    def _blocks(self, track: str) -> list[Block]:
        return [block for _, block in self._placed(track)]

    def _place(self, name: str) -> tuple[str, str, int | None]:
        found = PLACE.fullmatch(name)
        if found is None or f"{found['name']}.{found['leaf']}" not in self.names:
            raise ConfigError(
                f"nothing was seen of '{name}'; there are {', '.join(self.names) or 'no names'},"
                f" and '{_example(self.names)}'"
            )
        return found["name"], found["leaf"], None if found["step"] is None else int(found["step"])

    def _placed(self, track: str) -> Iterator[tuple[int, Block]]:
        """The blocks of all runs one after another, each with its first step in the pass."""
        begin = 0
        for run in self.runs:
            blocks = sorted(run.blocks.get(track, {}).items())
            for start, block in blocks:
                yield begin + start - blocks[0][0], block
            begin += blocks[-1][0] - blocks[0][0] + blocks[-1][1].steps if blocks else 0

    def _steps(self, track: str, kind: Literal["norms", "tensors"], leaf: str) -> Tensor:
        """All steps; those that no gradient reached, and lanes that a call did not have, are zeros."""
        parts: list[Tensor] = []
        end = 0
        for at, block in self._placed(track):
            rows = (block.norms if kind == "norms" else block.tensors)[leaf]
            parts += [rows.new_zeros(at - end, *rows.shape[1:]), rows]
            end = at + len(rows)
        lanes = max(part.shape[1] for part in parts)
        return torch.cat(
            [part if part.shape[1] == lanes else _widened(part, lanes) for part in parts]
        )


def _widened(part: Tensor, lanes: int) -> Tensor:
    return torch.cat([part, part.new_zeros(len(part), lanes - part.shape[1], *part.shape[2:])], 1)


def _at(steps: Tensor, name: str, step: int | None) -> Tensor:
    if step is None:
        return steps
    if not -len(steps) <= step < len(steps):
        raise ConfigError(f"'{name}': the pass has {len(steps)} steps, 0 to {len(steps) - 1}")
    return steps[step]


def _example(names: Sequence[str]) -> str:
    return f"{names[0]}[0]" if names else "layer0.h[0]"


class Unread(Protocol):
    """A pass that nobody has asked for yet, in memory that is used again."""

    def read(self) -> Pass:
        """A copy of it."""
        ...

    def forget(self) -> None:
        """Its memory is free."""
        ...


class History:
    """The last `keep` passes, and the one that runs."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = deque[Pass | Unread]()
        self._open: Run | None = None
        self._count = 0
        self._turn = (
            RLock()
        )  # who reads in another thread sees whole passes, before they are forgotten

    def run(self) -> Run:
        """What the engine's present run is noted in."""
        # the engine has no public name for its runs
        task = torch._C._current_graph_task_id()
        if self._open is None or self._open.task != task:
            self._settle()
            self._open = Run(task, False)
        return self._open

    def add(self, seen: Pass | Unread) -> None:
        """Takes in a pass of which all is known."""
        with self._turn:
            if self._open is not None:
                self._settle()
            self._count += 1
            self._kept.append(seen)
            if len(self._kept) > self._keep:
                oldest = self._kept.popleft()
                if not isinstance(oldest, Pass):
                    oldest.forget()

    @property
    def count(self) -> int:
        """Passes so far."""
        self._settle()
        return self._count

    def passes(self) -> tuple[Pass, ...]:
        """The last ones, the oldest first."""
        self._settle()
        with self._turn:
            for at, seen in enumerate(self._kept):
                if not isinstance(seen, Pass):
                    self._kept[at] = seen.read()
                    seen.forget()
            return tuple(seen for seen in self._kept if isinstance(seen, Pass))

    def _settle(self) -> None:
        """Puts the run that has ended in front of the pass that it leads to, or begins a pass with it."""
        run, self._open = self._open, None
        if run is None:
            return
        last = self._kept[-1] if run.piece and self._kept else None
        if isinstance(last, Pass) and last.runs[0].piece and run.leads_to(last.runs[0]):
            last.runs[0].came.clear()
            run.went.clear()
            self._kept[-1] = Pass((run, *last.runs))
        else:
            self.add(Pass((run,)))
