"""No recording's outputs depend on another's: proved on a user's own stream and net, by changing
one recording.

The epoch is played twice side by side from the initial state, once as it is and once with other
inputs in one recording. Whatever moves in another recording came across an edge between recordings,
or between lanes.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.errors import DataError, LawError, ModelError
from throughtime.predict import Predictor
from throughtime.stream import Stream

FEW = 3  # recordings changed unless the user names some
KINDS = 10_000  # different integers that replacements are drawn from


@dataclass(frozen=True)
class LeakReport:
    """A recording that was changed, and no other moved.

    Attributes:
        recording: its name.
        others: how many other recordings were played and compared.
        after: how many of them came after it on a lane, where a state that is not reset would show.
        steps: how many outputs of others were compared, over all lanes.
        moved: the largest change in its own outputs: that it was changed at all.
        deviation: the largest change in those of others.
        tolerance: what was allowed.
    """

    recording: str
    others: int
    after: int
    steps: int
    moved: float
    deviation: float
    tolerance: float


def check_no_leak(
    stream: Stream,
    net: Carried,
    *,
    recordings: Sequence[int | str] | None = None,
    steps: int | None = None,
    tolerance: float = 0.0,
    seed: int = 0,
) -> list[LeakReport]:
    """Proves on your own data that no recording's outputs depend on another's.

    Changes all inputs of one recording at a time: floating ones become random numbers of the same
    mean and spread, integers (tokens) others that occur. Works on copies of the net in evaluation
    mode; neither the stream, which stays where it stands, nor the net is touched. `check_carry`
    proves that the net may be carried at all, on random inputs.

    Args:
        stream: its present epoch is played, as this rank plays it.
        net: made by `tt.carry`.
        recordings: which to change, by index or name; default: three of those that others follow on
            a lane.
        steps: how many first steps of the epoch to look at; default: all of them.
        tolerance: largest change allowed in another recording's outputs; 0 means equal to the bit.
        seed: draws the replacements, and what a net that draws random numbers draws.

    Returns:
        What was checked, for each recording that was changed. Parts of the same recording on other
        lanes are not compared.

    Raises:
        LawError: a recording leaks: which, into which, where first, how much, and what usually
            causes it; or none of its own outputs moved either, so that nothing is proved.
        DataError: only one recording is played, or one asked for is not.
        ModelError: the net is not carried, or cannot be copied.

    Cost: a forward pass for each recording that is changed, and one more; reads the data twice;
    memory for one chunk.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream([{"inputs": torch.randn(n, 3), "name": f"day {n}"} for n in (50, 30, 40)], lanes=1, chunk=20)
        >>> checked = tt.testing.check_no_leak(stream, tt.carry(torch.nn.GRU(3, 8)), recordings=["day 50"])
        >>> checked[0].recording, checked[0].others, checked[0].deviation
        ('day 50', 2, 0.0)
    """
    require_carried(net)
    played = Played.of(stream, stream.steps if steps is None else min(steps, stream.steps))
    trials = [
        Trial(stream, net, played, i, tolerance, seed) for i in played.chosen(stream, recordings)
    ]
    player = _Player(net, stream.lanes, seed)
    for at, chunk in played.chunks(stream):
        outputs = player(chunk.inputs, chunk)
        for trial in trials:
            trial.compare(at, chunk, outputs)
    return [trial.result() for trial in trials]


@dataclass(frozen=True)
class Played:
    """What the stretch that is looked at holds: who plays, who follows whom, and what inputs look like."""

    steps: int
    recordings: tuple[int, ...]
    followed: dict[int, frozenset[int]]
    mean: Tensor
    spread: Tensor
    kinds: Tensor

    @classmethod
    def of(cls, stream: Stream, steps: int) -> "Played":
        if steps < 1:
            raise DataError(f"steps={steps}: expected at least 1 step to look at")
        lanes: list[list[int]] = [[] for _ in range(stream.lanes)]
        count, total, squares, kinds = (
            0,
            torch.zeros(()),
            torch.zeros(()),
            torch.zeros(0, dtype=torch.long),
        )
        for _, chunk in _chunks(stream, steps):
            for lane, row in enumerate(chunk.recording.T):
                lanes[lane] += [
                    i
                    for i in row.unique_consecutive().tolist()
                    if i >= 0 and lanes[lane][-1:] != [i]
                ]
            rows = chunk.inputs[chunk.recording >= 0]
            if rows.is_floating_point():
                count, total, squares = (
                    count + len(rows),
                    total + rows.double().sum(0),
                    squares + rows.double().square().sum(0),
                )
            else:
                kinds = torch.cat([kinds, rows.flatten()]).unique()[:KINDS]
        mean = total / max(1, count)
        spread = (squares / max(1, count) - mean.square()).clamp(min=0).sqrt()
        followed: dict[int, set[int]] = {i: set() for row in lanes for i in row}
        for row in lanes:
            for place, i in enumerate(row):
                followed[i] |= set(row[place + 1 :]) - {i}
        order = tuple(dict.fromkeys(i for row in lanes for i in row))
        return cls(
            steps,
            order,
            {i: frozenset(js) for i, js in followed.items()},
            mean,
            spread.where(spread > 0, 1.0),
            kinds,
        )

    def chunks(self, stream: Stream) -> Iterator[tuple[int, Chunk]]:
        """Where each begins, and it."""
        return _chunks(stream, self.steps)

    def chosen(self, stream: Stream, wanted: Sequence[int | str] | None) -> list[int]:
        """The recordings to change: those asked for, or a few that others follow."""
        first, *others = self.recordings
        if not others:
            raise DataError(
                f"the first {self.steps} steps of the epoch play one recording only,"
                f" '{stream.recordings[first].name}': there is no other that it could leak into."
                " Look at more steps, or give a stream of several recordings."
            )
        if wanted is None:
            return sorted(self.recordings, key=lambda i: not self.followed[i])[:FEW]
        names = [recording.name for recording in stream.recordings]
        found = [names.index(r) if isinstance(r, str) and r in names else r for r in wanted]
        missing = [r for r in found if r not in self.recordings]
        if missing or not found:
            raise DataError(
                f"recordings {missing} are not played in the first {self.steps} steps of this epoch"
                f" (by this rank); expected some of {[names[i] for i in self.recordings[:8]]}"
            )
        return [int(r) for r in found]

    def replaced(self, inputs: Tensor, random: torch.Generator) -> Tensor:
        """Other inputs of the same shape and kind."""
        if inputs.is_floating_point():
            noise = torch.randn(inputs.shape, generator=random, dtype=torch.float64)
            return (self.mean + self.spread * noise).to(inputs.dtype)
        if len(self.kinds) < 2:
            raise DataError(
                f"all inputs are {self.kinds.tolist()}: there is no other token to put in their"
                " place; look at more steps"
            )
        at = torch.searchsorted(self.kinds, inputs.contiguous()).clamp(max=len(self.kinds) - 1)
        return self.kinds[
            (at + torch.randint(1, len(self.kinds), inputs.shape, generator=random))
            % len(self.kinds)
        ]


class Trial:
    """One recording changed, played beside the stream as it is; the first leak ends it."""

    def __init__(
        self, stream: Stream, net: Carried, played: Played, index: int, tolerance: float, seed: int
    ) -> None:
        self.names = [recording.name for recording in stream.recordings]
        self.played, self.index, self.tolerance = played, index, tolerance
        self.player = _Player(net, stream.lanes, seed)
        self.random = torch.Generator().manual_seed(seed + index)
        self.moved = self.deviation = 0.0
        self.steps = 0

    def compare(self, at: int, chunk: Chunk, expected: Tensor) -> None:
        """Plays the same steps with the recording changed.

        Raises:
            LawError: another recording's outputs moved.
        """
        mine = chunk.recording == self.index
        others = (chunk.recording >= 0) & ~mine
        inputs = chunk.inputs.clone()
        if mine.any():
            inputs[mine] = self.played.replaced(inputs[mine], self.random)
        apart = _apart(self.player(inputs, chunk), expected)
        self.steps += int(others.sum())
        if mine.any():
            self.moved = max(self.moved, apart[mine].max().item())
        if not others.any():
            return
        self.deviation = max(self.deviation, apart[others].max().item())
        if self.deviation > self.tolerance:
            step, lane = ((apart > self.tolerance) & others).nonzero()[0].tolist()
            self._refuse(
                at + step,
                lane,
                int(chunk.recording[step, lane]),
                int(chunk.position[step, lane]),
                bool(mine[:, lane].any()),
            )

    def _refuse(self, at: int, lane: int, other: int, position: int, same_chunk: bool) -> None:
        follows = other in self.played.followed[self.index]
        usual = (
            "It plays after it on a lane: a reset ignored, or a state kept in the module (an"
            " attribute, a buffer) instead of the one that it takes and returns"
            if follows or same_chunk
            else (
                "It plays on another lane: BatchNorm or another mean over lanes in training mode"
                " (or without running statistics), a reshape that mixes lanes, or a state kept in"
                " the module"
            )
        )
        raise LawError(
            f"recording '{self.names[self.index]}' leaks into '{self.names[other]}': with other"
            f" inputs in the former, outputs of the latter move by {self.deviation:.3g} (allowed"
            f" {self.tolerance:g}), first at its step {position} (lane {lane}, step {at} of the"
            f" epoch). {usual}. throughtime.testing.check_carry says which law the module breaks."
        )

    def result(self) -> LeakReport:
        """What was checked.

        Raises:
            LawError: not even its own outputs moved.
        """
        name, after = self.names[self.index], self.played.followed[self.index]
        if not self.moved > 0:
            raise LawError(
                f"other inputs in recording '{name}' move none of its own outputs either: the net"
                " does not look at its inputs, and nothing is proved"
            )
        return LeakReport(
            name,
            len(self.played.recordings) - 1,
            len(after),
            self.steps,
            self.moved,
            self.deviation,
            self.tolerance,
        )


class _Player:
    """A copy of the net in evaluation mode, from the initial state on.

    It draws the same random numbers in every copy.
    """

    def __init__(self, net: Carried, lanes: int, seed: int) -> None:
        self.predictor = Predictor(_copied(net), lanes)
        self.seed = seed

    def __call__(self, inputs: Tensor, chunk: Chunk) -> Tensor:
        device = self.predictor.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            return self.predictor(
                inputs.to(device), chunk.resets.to(device) if chunk.any_reset else None
            ).cpu()


def _copied(net: Carried) -> Carried:
    """In evaluation mode.

    Raises:
        ModelError: it holds a tensor with a graph, which torch does not copy.
    """
    try:
        return copy.deepcopy(net).eval()
    except RuntimeError as error:
        raise ModelError(
            f"the net cannot be copied ({error}); a tensor with a graph kept in the module is a"
            " state that no reset reaches: return it as part of the state instead"
        ) from error


def _chunks(stream: Stream, steps: int) -> Iterator[tuple[int, Chunk]]:
    for at in range(0, steps, stream.chunk):
        yield at, stream.read(at, min(at + stream.chunk, steps))


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """`(T, B)`, the largest difference over outputs.

    NaN in both is none, in one of them an infinite one.
    """
    same = (a == b) | (a.isnan() & b.isnan())
    apart = (a - b).abs().double().nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
    return apart.flatten(2).amax(2) if apart.dim() > 2 else apart
