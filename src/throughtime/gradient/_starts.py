"""The states in which windows start: the initial one, carried ones, or noise like them.

    zero      the net's initial state
    carried   the state in which the window before it ended when it was last played
    noise     mean + deviation * n,  n ~ N(0, 1), of each number of the states in which windows
              ended of late

Trained on windows from the initial state alone, a net meets only the states of the first steps. Run
for longer it enters others, and what it does there is left to chance. "carried" and "noise" are two
remedies of B. Ruiz and A. Gu: truncated backpropagation through time, whose states are here stored
because windows are shuffled (the "stored state" of R2D2; at most two epochs old), and noise fitted
to the states in which sequences end. No gradient flows into either.

References: R. Buitrago Ruiz and A. Gu, Understanding and improving length generalization in
recurrent models, ICML 2025 (arXiv 2507.02782); S. Kapturowski et al., Recurrent experience replay
in distributed reinforcement learning, ICLR 2019.

Shapes: `T` steps, `B` lanes, `R` recordings of the stream, `N` of them that ended.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime._device import send
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError
from throughtime.state import State
from throughtime.stream import Stream
from throughtime.stream.recording import preceding

Start: TypeAlias = Literal["zero", "carried", "noise"]
STARTS: tuple[Start, ...] = ("zero", "carried", "noise")
Leaves: TypeAlias = tuple[Tensor, ...]
_AVERAGED = 1_000  # states in the running moments
_LATEST = 64  # states beside the table, or a sixteenth of its rows, before it is written anew


@dataclass(frozen=True, eq=False)
class StoredStates:
    """The state in which each recording ended when it was last played; a value.

    Nothing is written in place, so an update that is made again starts from the same states.

    Attributes:
        preceding: `(R,)`, the recording that each one continues, -1 for none; on the host.
        known: `(R,)`, whether its state is in the table; on the host.
        table: the leaves of the states, `(R, ...)`.
        ended: recordings `(N,)`, on the host, that have ended since the table was made, in order,
            and their states.
    """

    preceding: Tensor
    known: Tensor
    table: Leaves
    ended: tuple[Tensor, Leaves] | None = None

    @classmethod
    def new(cls, source: Source, like: State) -> "StoredStates":
        """Of a stream none of whose recordings has ended yet."""
        order = _preceding(source)
        table = tuple(leaf.new_zeros(len(order), *leaf.shape[1:]) for leaf in trees.tensors(like))
        return cls(order, torch.zeros_like(order, dtype=torch.bool), table)

    def draw(self, recording: Tensor, initial: State) -> State:
        """The states for the starts of recordings `(B,)`; the initial one where none is stored."""
        before = self.preceding[recording.clamp(min=0)]
        before = before.masked_fill(recording < 0, -1)
        leaves = [_rows(leaf, before.clamp(min=0)) for leaf in self.table]
        stored = (before >= 0) & self.known[before]
        if self.ended is not None:
            order = torch.arange(1, len(self.ended[0]) + 1, device="cpu")
            latest = ((before.unsqueeze(1) == self.ended[0]) * order).amax(1) - 1
            lanes = (latest >= 0).nonzero().flatten()
            stored[lanes] = True
            if len(lanes):  # the host would wait for an empty copy to a device
                for leaf, ended in zip(leaves, self.ended[1], strict=True):
                    rows = _rows(ended, latest[lanes])
                    leaf.index_copy_(0, send(lanes, leaf.device), rows)
        values = iter(leaves)
        return _reset(initial, trees.map_leaves(lambda _: next(values), initial), stored)

    def learn(self, recording: Tensor, leaves: Leaves) -> "StoredStates":
        """With the states `(N, ...)` in which recordings `(N,)` ended."""
        if not len(recording):
            return self
        if self.ended is not None:
            leaves = tuple(torch.cat(pair) for pair in zip(self.ended[1], leaves, strict=True))
            recording = torch.cat([self.ended[0], recording])
        if len(recording) < max(_LATEST, len(self.known) // 16):
            return replace(self, ended=(recording, leaves))
        latest = {number: row for row, number in enumerate(recording.tolist())}
        numbers, rows = torch.tensor([*latest.items()], device="cpu").unbind(1)
        table = tuple(
            old.index_copy(0, send(numbers, old.device), _rows(new, rows))
            for old, new in zip(self.table, leaves, strict=True)
        )
        known = self.known.index_fill(0, numbers, True)
        return replace(self, known=known, table=table, ended=None)

    def state_dict(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {"known": self.known, "table": self.table, "ended": self.ended}

    @classmethod
    def load(cls, values: Mapping[str, Any], source: Source) -> "StoredStates":
        """What `state_dict` saved."""
        ended = values["ended"]
        if ended is not None:
            ended = ended[0].cpu(), ended[1]
        return cls(_preceding(source), values["known"].cpu(), values["table"], ended)


@dataclass(frozen=True, eq=False)
class StateMoments:
    """Running means and mean squares of the states in which recordings ended.

    Attributes:
        count: of these states.
        mean: by leaf, `(...)`.
        square: the same of the squares.
    """

    count: int = 0
    mean: Leaves = ()
    square: Leaves = ()

    def draw(self, recording: Tensor, initial: State) -> State:
        """States like those in which recordings ended; the initial one before the first end."""
        del recording
        if not self.count:
            return initial
        moments = iter(zip(self.mean, self.square, strict=True))
        return trees.map_leaves(lambda leaf: _like_moments(leaf, *next(moments)), initial)

    def learn(self, recording: Tensor, leaves: Leaves) -> "StateMoments":
        """With the states `(N, ...)` in which recordings ended."""
        if not len(recording):
            return self
        count = self.count + len(recording)
        share = len(recording) / min(count, max(_AVERAGED, len(recording)))
        means, squares = (
            tuple(power(rows).mean(0) if trees.differentiable(rows) else rows[0] for rows in leaves)
            for power in (_same, _squared)
        )
        if self.count:
            means, squares = (
                tuple(map(partial(_moved, share), old, new))
                for old, new in ((self.mean, means), (self.square, squares))
            )
        return StateMoments(count, means, squares)

    def state_dict(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {"count": self.count, "mean": self.mean, "square": self.square}

    @classmethod
    def load(cls, values: Mapping[str, Any], source: Source) -> "StateMoments":
        """What `state_dict` saved."""
        del source
        return cls(**values)


def _same(rows: Tensor) -> Tensor:
    return rows


def _squared(rows: Tensor) -> Tensor:
    return rows.abs().square()


def _moved(share: float, old: Tensor, new: Tensor) -> Tensor:
    return old + share * (new - old) if trees.differentiable(old) else new


def _like_moments(leaf: Tensor, mean: Tensor, square: Tensor) -> Tensor:
    """Normal numbers for a leaf `(B, ...)`; a counter or flag stays as it is."""
    if not trees.differentiable(leaf):
        return leaf
    deviation = (square - mean.abs().square()).clamp(min=0).sqrt()
    return mean + deviation * torch.randn_like(leaf, requires_grad=False)


def _rows(leaf: Tensor, index: Tensor) -> Tensor:
    """Rows of a leaf, by numbers on the host; a new tensor."""
    return leaf.index_select(0, send(index, leaf.device))


def _reset(state: State, initial: State, where: Tensor) -> State:
    """`trees.reset` with a mask of the host."""
    leaves = trees.tensors(state)
    return trees.reset(state, initial, send(where, leaves[0].device) if leaves else where)


def _preceding(source: Source) -> Tensor:
    """The recording that each recording of a stream continues, `(R,)`; -1 for none.

    Raises:
        ConfigError: chunks of another origin, several ranks, or no recording continues another.
    """
    if isinstance(source, Stream) and source._shard.ranks > 1:
        raise ConfigError(
            "start='carried' on several ranks: a window and the one before it are played by"
            " different ranks, which do not exchange states; take start='noise', or one rank"
        )
    order = preceding(source.recordings) if isinstance(source, Stream) else []
    if max(order, default=-1) < 0:
        raise ConfigError(
            "start='carried' continues the window before, and no recording of these chunks"
            " continues another; cut them: tt.Stream(tt.windows(recordings, 100), lanes=...,"
            " chunk=100)"
        )
    return torch.tensor(order, device="cpu")


Store: TypeAlias = StoredStates | StateMoments


@dataclass(frozen=True, eq=False)
class StartStates:
    """What is known of the states in which windows end, as a value between two updates.

    Attributes:
        store: the states or their moments.
        playing: `(B,)`, the recording of each lane at the last step, on the host; `None` at the
            start of an epoch.
    """

    store: Store
    playing: Tensor | None = None

    @classmethod
    def new(cls, start: Start, source: Source, like: State) -> "StartStates":
        """Before the first update."""
        return cls(StoredStates.new(source, like) if start == "carried" else StateMoments())

    def begin_epoch(self) -> "StartStates":
        """For another epoch."""
        return StartStates(self.store)

    def end_epoch(self, state: State) -> "StartStates":
        """With the states after the last step of an epoch, in which all lanes end."""
        if self.playing is None:
            return self
        lanes = (self.playing >= 0).nonzero().flatten()
        leaves = tuple(_rows(leaf, lanes) for leaf in trees.tensors(state))
        return StartStates(self.store.learn(self.playing[lanes], leaves))

    def state_dict(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {"playing": self.playing, "store": self.store.state_dict()}

    @classmethod
    def load(cls, start: Start, values: Mapping[str, Any], source: Source) -> "StartStates":
        """What `state_dict` saved."""
        store = StoredStates if start == "carried" else StateMoments
        playing = values["playing"]
        return cls(store.load(values["store"], source), None if playing is None else playing.cpu())


class WindowStarts:
    """The starts and ends of windows within a chunk.

    Attributes:
        gates: by step, replace the states of lanes that start there and note those that end.
        chunk: the same without resets: the gates take their place.
    """

    gates: dict[int, Callable[[State], State]]

    def __init__(self, net: Carried, chunk: Chunk, starts: StartStates) -> None:
        self._net, self._original, self._store = net, chunk, starts.store
        recording = chunk.metadata.recording[chunk.span]
        self._recording, self._starts = recording, chunk.metadata.resets[chunk.span]
        playing = torch.full_like(recording[0], -1) if starts.playing is None else starts.playing
        self._before = torch.cat([playing.unsqueeze(0), recording[:-1]])
        self._ends = (self._starts | (recording != self._before)) & (self._before >= 0)
        steps: Sequence[int] = (self._ends | self._starts).any(1).nonzero().flatten().tolist()
        self.gates = {step: partial(self._pass, step) for step in steps}
        self.chunk = chunk.without_resets() if chunk.any_reset else chunk

    def _pass(self, step: int, state: State) -> State:
        lanes, starts = self._ends[step].nonzero().flatten(), self._starts[step]
        if len(lanes):
            leaves = tuple(_rows(leaf.detach(), lanes) for leaf in trees.tensors(state))
            self._store = self._store.learn(self._before[step][lanes], leaves)
        if not bool(starts.any()):
            return state
        chunk = self._original
        initial = self._net.initial_state(chunk.lanes, like=chunk.inputs)
        return _reset(state, self._store.draw(self._recording[step], initial), starts)

    def after(self) -> StartStates:
        """What is known after the chunk has been run."""
        return StartStates(self._store, self._recording[-1].clone())
