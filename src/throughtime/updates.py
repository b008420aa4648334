"""The verb: a stream, a net and a gradient policy become updates.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.diagnose.trace import SAMPLED, traced_update
from throughtime.distributed import Ranks, ranks_of
from throughtime.errors import DataError, RunError
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
from throughtime.nn.fuse import ADVISE_AFTER, advise
from throughtime.state import State
from throughtime.stream import Stream
from throughtime.stream._queue import ChunkQueue


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
        self._net = require_carried(net)
        self._stream = stream if isinstance(stream, Stream) else None
        self._source = stream if isinstance(stream, Stream) else ChunkQueue(stream)
        self._source._place_on(ranks.device)
        self._device = ranks.device
        self._objective, self._gradient = objective, gradient
        policy = gradient.policy if isinstance(gradient, Accumulated) else gradient
        self._learning = policy if isinstance(policy, Learning) else None
        self._ranks = ranks
        if state is None and isinstance(stream, Stream):
            stream._start(handed_off=stream.hand_off and stream._entering_state(net) is not None)
        self._checked = ranks.count == 1
        self._turn = 0 if self._stream is None else self._stream._generation
        self._progress = (
            None if state is None else Progress(trees.detach(state), trees.detach(state))
        )
        self._finished = self._broken = False
        self._made = 0  # updates, for the advice after so many
        self._before: tuple[int, int, Progress | None] | None = None

    def __next__(self) -> Update:
        if not self._ranks.shards and not SAMPLED:  # the usual case
            return self._next()
        with traced_update(self._net), self._ranks.whole(self._net):
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
                self._weights(), {**self._need_stream()._plan(), "gradient": self._gradient}
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
        if self._made == ADVISE_AFTER:
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
        if self._stream is not None and self._stream._handed_off:
            entering = self._stream._entering_state(self._net)
            return Progress(entering, entering)
        return Progress(None, None)

    def _moved(self, state: State) -> State:
        """The tensors on the net's device: checkpoints are read to the CPU."""
        return (
            None if state is None else trees.map_leaves(lambda leaf: leaf.to(self._device), state)
        )

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
            stream._hand_over(self._moved(place["entering"]), self._net)
        stream._start(handed_off=place.get("entering") is not None)
        self._turn = stream._generation
        self._finished, self._broken, self._progress, self._before = False, False, None, None
        self._checked = self._ranks.count == 1
        if place["state"] is not None:
            past = (
                stream.read(stream.position - place["past"], stream.position)
                if place["past"]
                else None
            )
            steps = () if past is None else (past,)
            kept = {
                name: self._moved(place.get(name))
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
