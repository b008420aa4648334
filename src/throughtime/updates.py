"""The verb: a stream, a net and a gradient policy become updates.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, join
from throughtime.distributed import Ranks, ranks_of
from throughtime.errors import DataError, ModelError, RunError
from throughtime.gradient import (
    Accumulated,
    Learning,
    LossFn,
    Objective,
    Policy,
    Progress,
    Scaler,
    Update,
)
from throughtime.gradient.gather import weights_of
from throughtime.nn.advice import AFTER, advise
from throughtime.state import State
from throughtime.stream import Stream


def updates(
    net: Carried,
    stream: Stream | Iterable[Chunk],
    loss_fn: LossFn,
    *,
    gradient: Policy,
    state: State = None,
    scaler: Scaler | None = None,
    accumulate: int = 1,
) -> "Updates":
    """One epoch of the stream as updates: each adds its gradient to `.grad`, then the loop is
    yours.

    The optimizer, clipping, schedulers and the loop stay the user's; call `optimizer.step()` and
    `optimizer.zero_grad()` in the body. No graph outlives an update.

    Args:
        net: made by `tt.carry`.
        stream: a `tt.Stream` (any chunk length: the policy cuts as it needs), or any iterable of
            adjacent `Chunk`s. It starts its epoch anew unless `state` is given or a `state_dict`
            was loaded.
        loss_fn: any function of outputs `(N, C)` and targets `(N,)` or `(N, C)` that returns their
            mean loss, as `nn.CrossEntropyLoss()` and `nn.MSELoss()` do; N counts the valid steps of
            the update.
        gradient: `tt.Truncated(...)` or another policy.
        state: carried state to go on from where the stream stands; default: the initial state.
        scaler: a `torch.amp.GradScaler`; its `step` and `update` stay in the loop.
        accumulate: so many updates of the policy are one: the mean of their gradients, weighed by
            their valid steps, with the state carried from one to the next; fewer at the end of an
            epoch. Ranks add up once for all of them.

    Returns:
        An iterator of `Update`s. A stride without any valid step carries the state and yields
        nothing.

    Raises:
        ModelError: the net is not carried, or breaks its contract.
        DataError: chunks that are not adjacent, or have no targets.
        ConfigError: `accumulate` below 1, or with `tt.Randomized`, whose updates are no means.

    Cost: the policy's; besides it about 60 microseconds per update on a CPU.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream({"inputs": torch.randn(50, 3), "targets": torch.randn(50)}, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> for update in tt.updates(net, stream, torch.nn.MSELoss(), gradient=tt.Truncated(stride=20)):
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     print(update.steps)
        20
        20
        10
    """
    ranks = ranks_of(net, stream if isinstance(stream, Stream) else None)
    objective = Objective(loss_fn, scaler, ranks if ranks.count > 1 else None)
    return Updates(
        net,
        stream,
        objective,
        gradient if accumulate == 1 else Accumulated(gradient, accumulate),
        state,
        ranks,
    )


class Updates(Iterator[Update]):
    """The iterator that `tt.updates` returns; `state_dict()` resumes it to the bit."""

    def __init__(
        self,
        net: Carried,
        stream: Stream | Iterable[Chunk],
        objective: Objective,
        gradient: Policy,
        state: State,
        ranks: Ranks,
    ) -> None:
        self._net = _carried(net)
        self._stream = stream if isinstance(stream, Stream) else None
        source = stream if isinstance(stream, Stream) else ChunkQueue(stream)
        self._source = Moving(source, net)
        self._objective, self._gradient = objective, gradient
        policy = gradient.policy if isinstance(gradient, Accumulated) else gradient
        self._learning = policy if isinstance(policy, Learning) else None
        self._ranks = ranks
        if state is None and isinstance(stream, Stream):
            stream.start(handed=stream.hand_off and stream._entering_state(net) is not None)
        self._checked = ranks.count == 1
        self._turn = 0 if self._stream is None else self._stream._generation
        self._progress = (
            None if state is None else Progress(trees.detach(state), trees.detach(state))
        )
        self._finished = self._broken = False
        self._made = 0  # updates, for the advice after so many
        self._before: tuple[int, int, Progress | None] | None = None

    def __next__(self) -> Update:
        if not self._ranks.shards:  # the usual case
            return self._next()
        with self._ranks.whole(self._net):
            return self._next()

    def _next(self) -> Update:
        if self._finished:
            raise StopIteration
        if self._broken:
            raise RunError(
                "these updates ended with an error in the middle of a step: the stream has moved on"
                " and the state has not. Start again with tt.updates(...), or from a saved place"
                " with load_state_dict"
            )
        if self._stream is not None and self._stream._generation != self._turn:
            raise DataError(
                "the stream was started again or moved while its updates were taken: the carried"
                " state belongs to another place. Give tt.evaluate, and every other loop, a Stream"
                " of its own."
            )
        if not self._checked:
            self._ranks.check_alike(
                self._weights(), {**self._need_stream().plan(), "gradient": self._gradient}
            )
            self._checked = True
        if (
            self._progress is None and self._ranks.count == 1
        ):  # on several, a rank that cannot begin tells the others
            self._progress = self._begin()
        if self._stream is not None:
            self._before = self._stream.epoch, self._stream.position, self._progress
        self._broken = True
        if self._progress is not None and self._ranks.count == 1:  # the usual case
            update, self._progress = self._gradient.update(
                self._net, self._source, self._objective, self._progress
            )
        else:
            update = self._together()
        self._broken = False
        if update is None:
            self._finish()
            raise StopIteration
        self._made += 1
        if self._made == AFTER:
            advise(self._net, update.chunk.lanes)
        return update

    def _alone(self) -> Update | None:
        update, self._progress = self._gradient.update(
            self._net, self._source, self._objective, self._now()
        )
        return update

    def _together(self) -> Update | None:
        """The next update that has a valid step on any rank.

        What `.grad` held before stays this rank's own until it is added.
        """
        weights = list(self._weights().values())
        before = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        summed: Update | None = None
        try:
            while summed is None and (update := self._told(weights)) is not None:
                summed = self._ranks.add_up(update, weights)
        finally:
            for weight, had in zip(weights, before, strict=True):
                if summed is None or weight.grad is None:
                    weight.grad = had
                elif had is not None:
                    weight.grad = weight.grad + had
        return summed

    def _told(self, weights: list[Tensor]) -> Update | None:
        """This rank's part; if it fails, the others are told, who would wait for it."""
        try:
            return self._alone()
        except Exception:
            self._ranks.fail(weights)
            raise

    def _weights(self) -> dict[str, Tensor]:
        return weights_of(self._net, self._objective.loss_fn)

    def _now(self) -> Progress:
        if self._progress is None:
            self._progress = self._begin()
        return self._progress

    def _finish(self) -> None:
        """The end of an epoch: where states are handed on, each lane's goes to the lane that plays the part after it."""
        self._finished = True
        if self._stream is not None and self._stream.hand_off and self._progress is not None:
            self._stream._hand_over(self._ranks.handed_on(self._progress.state), self._net)

    def _begin(self) -> Progress:
        if self._stream is not None and self._stream.position > 0:
            raise DataError(
                f"the stream stands at step {self._stream.position} and no state came with it: it"
                " would go on from a cold state. Resume with updates.load_state_dict(...), or give"
                " tt.updates the carried state."
            )
        if self._stream is not None and self._stream.handed:
            entering = self._stream._entering_state(self._net)
            return Progress(entering, entering)
        first = self._source.peek()
        return Progress(trees.detach(self._net.initial_state(first.lanes, like=first.inputs)), None)

    @property
    def state(self) -> State:
        """The carried state after the last update; at the end of an epoch, after its last step."""
        return None if self._progress is None else self._progress.state

    def state_dict(self, *, after_step: bool = True) -> dict[str, Any]:
        """Where the updates stand: the place in the stream and the states that the policy needs to
        go on.

        With the weights, the optimizer and torch's random state it resumes to the same bits.
        `state` and `edge` are state trees; the rest are plain values.

        Args:
            after_step: whether the optimizer has stepped on the last update. `False` gives the place
                before it, from which it is made again; so does an update that ended with an error,
                or is being made, as in the handler of a signal.

        Raises:
            DataError: the chunks do not come from a `tt.Stream`, which alone knows its place.
        """
        stream = self._need_stream()
        now = None if self._finished else self._progress
        place: dict[str, Any] = {
            "stream": stream.state_dict(),
            "gradient": repr(self._gradient),
            "past": 0,
            "state": None,
            "edge": None,
        }
        if self._before is not None and (self._broken or not after_step) and not self._finished:
            epoch, position, now = self._before
            place["stream"] |= {"epoch": epoch, "position": position}
        if stream.hand_off:
            place["entering"] = stream._entering_state(self._net)
        if now is not None:
            if now.graphs:
                raise DataError(
                    f"{self._gradient!r} keeps graphs of earlier weights, which no file can hold,"
                    " so this place cannot be resumed to the bit: take graphs='recompute'"
                )
            place |= {
                "past": sum(c.steps for c in now.past),
                "state": now.state,
                "edge": now.edge,
                "influence": now.influence,
                "since": now.since,
            }
        if self._learning is not None:
            place["learnt"] = self._learning.state_dict()
        return place

    def load_state_dict(self, place: Mapping[str, Any]) -> None:
        """Goes on from a place saved by `state_dict`, on a stream over the same recordings.

        Raises:
            DataError: the place belongs to another stream; each difference is named.
        """
        stream = self._need_stream()
        if place["gradient"] != repr(self._gradient):
            raise DataError(
                f"the saved place belongs to {place['gradient']}, these updates to"
                f" {self._gradient!r}; resume with the same policy"
            )
        stream.load_state_dict(place["stream"])
        if place.get("entering") is not None:
            stream._hand_over(self._source.moved(place["entering"]), self._net)
        stream.start(handed=place.get("entering") is not None)
        self._turn = stream._generation
        self._finished, self._broken, self._progress, self._before = False, False, None, None
        self._checked = self._ranks.count == 1
        if place["state"] is not None:
            past = (
                stream.read(stream.position - place["past"], stream.position)
                if place["past"]
                else None
            )
            steps = () if past is None else (self._source.placed(past),)
            kept = {
                name: self._source.moved(place.get(name))
                for name in ("state", "edge", "influence", "since")
            }
            self._progress = Progress(past=steps, **kept)
        if self._learning is not None and "learnt" in place:
            self._learning.load_state_dict(place["learnt"])

    def _need_stream(self) -> Stream:
        if self._stream is None:
            raise DataError(
                "only a tt.Stream knows its place and can read a step again; to resume, give"
                " tt.updates a Stream, not bare chunks"
            )
        return self._stream


class Moving:
    """A source whose chunks arrive on the device of the net."""

    def __init__(self, source: "Stream | ChunkQueue", net: nn.Module) -> None:
        self._source = source
        weight = next(net.parameters(), None)
        self._device = torch.device("cpu") if weight is None else weight.device

    @property
    def position(self) -> int:
        return self._source.position

    def take(self, steps: int) -> Chunk | None:
        chunk = self._source.take(steps)
        return None if chunk is None else self.placed(chunk)

    def remaining(self, steps: int) -> int:
        return self._source.remaining(steps)

    def read(self, start: int, stop: int) -> Chunk:
        return self.placed(self._source.read(start, stop))

    def steps_to_common_reset(self) -> int:
        return self._source.steps_to_common_reset()

    def placed(self, chunk: Chunk) -> Chunk:
        """The chunk on the net's device."""
        return chunk.to(self._device)

    def moved(self, state: State) -> State:
        """A state tree on the net's device: checkpoints are read to the CPU."""
        return (
            None if state is None else trees.map_leaves(lambda leaf: leaf.to(self._device), state)
        )

    def peek(self) -> Chunk:
        """One step as it comes next, left in its place."""
        if isinstance(self._source, Stream):
            at = min(self._source.position, self._source.steps - 1)
            return self.read(at, at + 1)
        return self.placed(self._source.peek())


class ChunkQueue:
    """Chunks from any iterable, cut anew to the lengths asked for, after checking that they are
    adjacent.

    A list or tuple of chunks can be read again; an iterator gives every step once.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        if isinstance(chunks, DataLoader):
            _refuse_sampler(cast("DataLoader[Any]", chunks))
        self._again = chunks if isinstance(chunks, Sequence) else None
        self._kind = type(chunks).__name__
        self._starts = [0, *accumulate(c.steps for c in self._again or () if isinstance(c, Chunk))]  # pyright: ignore[reportUnnecessaryIsInstance]
        self._chunks = iter(chunks)
        self._waiting: list[Chunk] = []
        self._last: Chunk | None = None
        self.position = 0

    def take(self, steps: int) -> Chunk | None:
        self._wait_for(steps)
        if not self._waiting:
            return None
        whole = join(self._waiting)
        self._waiting = [whole[steps : whole.steps]] if whole.steps > steps else []
        taken = whole[0:steps]
        self.position += taken.steps
        return taken

    def remaining(self, steps: int) -> int:
        return min(steps, self._wait_for(steps))

    def read(self, start: int, stop: int) -> Chunk:
        chunks = self._readable()
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop)
        return join(
            [
                chunks[i][max(0, start - self._starts[i]) : stop - self._starts[i]]
                for i in range(first, min(last, len(chunks)))
            ]
        )

    def steps_to_common_reset(self) -> int:
        chunks = self._readable()
        for i in range(max(0, bisect_right(self._starts, self.position) - 1), len(chunks)):
            chunk, at = chunks[i], self._starts[i]
            if chunk.any_reset:
                fresh = (
                    (chunk.resets | (chunk.recording < 0)).all(dim=1).nonzero().flatten().tolist()
                )
                later = [at + step for step in fresh if at + step > self.position]
                if later:
                    return later[0] - self.position
        return self._starts[-1] - self.position

    def _readable(self) -> Sequence[Chunk]:
        if self._again is None:
            raise DataError(
                "this gradient policy reads its steps again, and the chunks come from a"
                f" {self._kind}, which gives each of them once: give tt.updates a tt.Stream, or a"
                " list of chunks"
            )
        return self._again

    def _wait_for(self, steps: int) -> int:
        """Fetches chunks until `steps` steps are waiting, or there are no more; how many are."""
        while (waiting := sum(c.steps for c in self._waiting)) < steps and self._fetch():
            pass
        return waiting

    def peek(self) -> Chunk:
        if not self._waiting and not self._fetch():
            raise DataError(
                "the stream gave no chunk at all; an exhausted iterator? Give tt.updates a"
                " tt.Stream or a list of chunks"
            )
        return self._waiting[0]

    def _fetch(self) -> bool:
        chunk = next(self._chunks, None)
        if chunk is None:
            return False
        # users pass loaders of anything
        if not isinstance(chunk, Chunk):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"the stream gave a {type(chunk).__name__}, expected a Chunk: use"
                " tt.Stream(recordings, lanes, chunk), or tt.Chunk.from_tensors(inputs, targets)"
            )
        if self._last is not None:
            _check_adjacent(self._last, chunk)
        self._last = chunk
        self._waiting.append(chunk)
        return True


def _refuse_sampler(loader: "DataLoader[Any]") -> None:
    sampler = loader.sampler
    if not isinstance(sampler, SequentialSampler) and loader.batch_size is not None:
        raise DataError(
            f"the DataLoader picks its samples with a {type(sampler).__name__}: consecutive batches"
            " are not adjacent in time, and the state carried between them would belong to another"
            " place. Give tt.updates a tt.Stream, which keeps every lane in order."
        )


def _check_adjacent(last: Chunk, chunk: Chunk) -> None:
    """Every lane goes on where it stopped, or resets."""
    if last.lanes != chunk.lanes:
        raise DataError(
            f"a chunk of {chunk.lanes} lanes follows one of {last.lanes}; a carried state needs the"
            " same lanes in every chunk"
        )
    same = chunk.recording[0] == last.recording[-1]
    follows = same & (chunk.position[0] == last.position[-1] + 1)
    broken = (~(follows | chunk.resets[0] | (chunk.recording[0] < 0))).nonzero()
    if len(broken):
        lane = int(broken[0])
        raise DataError(
            f"lane {lane} jumps from recording {int(last.recording[-1, lane])}, step"
            f" {int(last.position[-1, lane])} to recording {int(chunk.recording[0, lane])}, step"
            f" {int(chunk.position[0, lane])} without a reset: the chunks are not adjacent"
            " (shuffled? sharded?). Mark the reset, or use tt.Stream."
        )


def _carried(net: nn.Module) -> Carried:
    if not isinstance(net, Carried):
        raise ModelError(
            f"the net is a {type(net).__name__}; make its state explicit first: net ="
            " tt.carry(module)"
        )
    return net
