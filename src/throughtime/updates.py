"""The verb: a stream, a net and a gradient policy become updates.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Literal

from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.diagnose.trace import SAMPLED, traced_update
from throughtime.distributed import Ranks, ranks_of
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Accumulation, LossFn, Objective, Policy, Scaler, Update
from throughtime.gradient._finite import LateChecks
from throughtime.gradient.objective import trainable_weights
from throughtime.gradient.policy import S, check_result, check_state
from throughtime.nn.fuse import ADVISE_AFTER, advise
from throughtime.state import State
from throughtime.stream import Stream
from throughtime.stream._queue import ChunkQueue


def updates(
    net: Carried,
    stream: Stream | Iterable[Chunk],
    loss_fn: LossFn,
    *,
    gradient: Policy[S],
    state: State = None,
    policy_state: S | None = None,
    scaler: Scaler | None = None,
    accumulate: int = 1,
    finite: Literal["next", "now"] = "next",
) -> "Updates[S]":
    """Iterate over one epoch of the stream: every update leaves its gradient in `.grad`.

    The optimizer, clipping, schedulers and the loop stay yours; call `optimizer.step()` and
    `optimizer.zero_grad()` in the body. No graph outlives an update.

    Args:
        net: made by `tt.carry`.
        stream: a `tt.Stream` (any chunk length: the policy cuts as it needs), or any iterable of
            adjacent chunks. It starts its epoch again unless `state` is given or a `state_dict`
            was loaded.
        loss_fn: any function of outputs `(N, C)` and targets that returns their mean loss, as
            `nn.CrossEntropyLoss()` and `nn.MSELoss()` do; N counts the valid steps of the update.
            Targets are `(N,)` if they are classes and `(N, C)` if they are numbers: `(N, 1)` for a
            single column, as the outputs.
        gradient: `tt.Truncated(...)` or another policy; see `tt.Policy` to write one.
        state: the carried state at the present step of the stream; default: the initial state.
        policy_state: `policy_state` of the last epoch's updates, for a policy that learns from
            epoch to epoch, as `tt.Adaptive` does.
        scaler: a `torch.amp.GradScaler`; its `step` and `update` stay in the loop.
        accumulate: how many updates of the policy make one: the mean of their gradients, weighted
            by their valid steps, with the state carried from one to the next; fewer at the end of
            an epoch. Ranks reduce once for all of them.
        finite: when a loss or gradient that is not finite ends a loop on an accelerator. "next":
            one flag of every update is read before the next one is made, so the host never waits
            for the gradient that it has just asked for. Until then such a gradient is zero on the
            device: the optimizer's step leaves the weights finite, and only momentum and weight
            decay move them. "now" reads before the update is returned, as always on the CPU, for
            several ranks and for `tt.Exact` and `tt.Randomized`. With a `scaler`, which skips such
            steps itself, nothing is checked.

    Returns:
        An iterator over `Update` objects. A stride with no valid step carries the state and yields
        nothing.

    Raises:
        ModelError: the net is not carried, or breaks its contract; or `loss_fn` broadcasts `(N,)`
            against `(N, 1)`, which pairs each step with the targets of all others.
        DataError: chunks that are not adjacent, or have no targets.
        ConfigError: `gradient` is not a policy, or one that breaks the contract of `tt.Policy`; or
            `accumulate` is below 1, or used with `tt.Randomized`, whose updates are not means; or
            `finite` is neither "next" nor "now".
        RunError: a loss or a gradient is not finite; the chunk, its recordings and the parameter
            are named.

    Cost: the policy's; besides it some 20 microseconds per update on a CPU.

    Example:
        >>> import torch, throughtime as tt
        >>> recording = {"inputs": torch.randn(50, 3), "targets": torch.randn(50)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=20)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> policy = tt.Truncated(stride=20)
        >>> for update in tt.updates(net, stream, torch.nn.MSELoss(), gradient=policy):
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     print(update.steps)
        20
        20
        10
    """
    _check_policy(gradient)
    ranks = ranks_of(net, stream if isinstance(stream, Stream) else None)
    if finite not in ("next", "now"):
        raise ConfigError(f"finite={finite!r}: expected 'next' or 'now'")
    alone = ranks.count == 1
    late = LateChecks() if alone and finite == "next" else None
    objective = Objective(loss_fn, scaler, None if alone else ranks, late)
    policy = gradient if accumulate == 1 else Accumulation(gradient, accumulate)
    return Updates(net, stream, objective, policy, (state, policy_state), ranks)


def _check_policy(gradient: object) -> None:
    """Refuse what is not a policy before any step is taken."""
    methods = ("init", "update", "state_dict", "load_state_dict")
    missing = [name for name in methods if not callable(getattr(gradient, name, None))]
    if missing or isinstance(gradient, type):
        fault = f"has no method {', '.join(missing)}" if missing else "is a class, not a policy"
        raise ConfigError(
            f"gradient={gradient!r} {fault}: expected a policy, as tt.Truncated(stride=100) makes"
            f" one, or an object of your own with {', '.join(methods)} (see tt.Policy)"
        )


class Updates(Iterator[Update], Generic[S]):
    """The iterator that `tt.updates` returns; `state_dict()` resumes it to the bit.

    Between two updates these hold:

    - `.grad` holds the gradient of the update just returned, added to what was there before; the
      weights are changed by the loop alone. No graph is alive.
    - The position of the stream is that of the update just returned. Nothing else may move the
      stream meanwhile: that is a `DataError`, since the carried state belongs to these steps.
    - On several ranks all make the same number of updates, with the same gradient and weights.
    - After an error in an update the position is unknown. Load a `state_dict` to go on.

    Example:
        >>> import torch, throughtime as tt
        >>> data = {"inputs": torch.randn(60, 3), "targets": torch.randn(60)}
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> def epoch():
        ...     stream = tt.Stream(data, lanes=1, chunk=20)
        ...     return tt.updates(net, stream, torch.nn.MSELoss(), gradient=tt.Truncated(20))
        >>> updates = epoch()
        >>> update = next(updates)
        >>> saved = updates.state_dict()
        >>> resumed = epoch()
        >>> resumed.load_state_dict(saved)
        >>> len(list(resumed))
        2
    """

    def __init__(
        self,
        net: Carried,
        stream: Stream | Iterable[Chunk],
        objective: Objective,
        gradient: Policy[S],
        states: tuple[State, S | None],
        ranks: Ranks,
    ) -> None:
        self._net, self._objective = require_carried(net), objective
        self._gradient, self._ranks = gradient, ranks
        self._stream = stream if isinstance(stream, Stream) else None
        self._source = stream if isinstance(stream, Stream) else ChunkQueue(stream)
        self._source._place(objective.placement(net, ranks.device))
        carried, previous = states
        if carried is not None:
            carried = trees.detach(carried)
        elif isinstance(stream, Stream):
            stream._start(handed_off=stream.hand_off and stream._entering_state(net) is not None)
            carried = stream._entering_state(net) if stream._schedule.handed_off else None
        self._state = check_state(gradient, gradient.init(carried, previous))
        self._checked = False
        self._generation = 0 if self._stream is None else self._stream._generation
        self._finished = self._failed = False
        self._count = 0  # updates, for the advice after so many
        self._before: tuple[int, int, S] | None = None

    def __next__(self) -> Update:
        if not self._ranks.shards and not SAMPLED:  # the usual case
            return self._next()
        with traced_update(self._net), self._ranks.unsharded(self._net):
            return self._next()

    def _next(self) -> Update:
        if self._finished:
            raise StopIteration
        stream = self._stream
        late = self._objective.late
        if self._failed or not self._checked or (late is not None and late.flags):
            self._check()
        elif self._count == 1 and self._ranks.count > 1:
            self._ranks.check_equal(self._weights())
        if stream is not None and stream._generation != self._generation:
            raise DataError(
                "the stream was started again or moved while its updates were taken: the carried"
                " state belongs to other steps. Give tt.evaluate, and every other loop, a Stream of"
                " its own."
            )
        if stream is not None:  # after the checks: a refused call must not save a later position
            self._before = stream.epoch, stream.position, self._state
        self._failed = True
        if self._ranks.count == 1:  # the usual case
            result = self._gradient.update(self._net, self._source, self._objective, self._state)
            if type(result) is not tuple or not self._count:
                check_result(self._gradient, result)
            update, self._state = result
        else:
            update = self._reduced_update()
        self._failed = False
        if update is None:
            self._finish()
            raise StopIteration
        self._count += 1
        if self._count == ADVISE_AFTER:
            advise(self._net, update.chunk.lanes)
        return update

    def _read_flag(self) -> None:
        """Wait for the last update on a device; one that was not finite ends these updates."""
        late = self._objective.late
        if late is not None and late.flags and not self._failed:
            if self._stream is not None and self._before is not None:
                self._stream._read_ahead(self._stream.position - self._before[1])
            self._failed = True
            late.read()
            self._failed = False

    def _check(self) -> None:
        """The checks before the first update, after an error, and after an update on a device."""
        self._read_flag()
        if self._failed:
            raise RunError(
                "these updates ended with an error in the middle of a step: the stream has moved on"
                " and the state has not. Start again with tt.updates(...), or from a saved position"
                " with load_state_dict"
            )
        if self._checked:
            return
        if self._ranks.count > 1:
            stream = self._require_stream()
            plan = {**stream._plan(), "gradient": self._gradient, **stream._sample}
            self._ranks.check_equal(self._weights(), plan)
        if self._stream is not None and self._stream.position > 0 and self.state is None:
            if self._ranks.count > 1:  # the others would wait for this rank
                self._ranks.signal_failure(list(self._weights().values()))
            raise DataError(
                f"the stream is at step {self._stream.position} and no state came with it: it would"
                " go on from the initial state. Resume with updates.load_state_dict(...), or give"
                " tt.updates the carried state."
            )
        self._checked = True

    def _reduced_update(self) -> Update | None:
        """The next update with a valid step on any rank.

        `.grad` is set aside meanwhile: its old value belongs to this rank alone.
        """
        weights = list(self._weights().values())
        before = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        reduced: Update | None = None
        try:
            while reduced is None and (update := self._local_update(weights)) is not None:
                reduced = self._ranks.reduce_update(update, weights)
        finally:
            for weight, grad in zip(weights, before, strict=True):
                if reduced is None or weight.grad is None:
                    weight.grad = grad
                elif grad is not None:
                    weight.grad = weight.grad + grad
        return reduced

    def _local_update(self, weights: list[Tensor]) -> Update | None:
        """This rank's update; signals a failure to the other ranks, which would wait for it."""
        try:
            result = self._gradient.update(self._net, self._source, self._objective, self._state)
            update, self._state = check_result(self._gradient, result)
        except Exception:
            self._ranks.signal_failure(weights)
            raise
        return update

    def _weights(self) -> dict[str, Tensor]:
        return trainable_weights(self._net, self._objective.loss_fn)

    def _finish(self) -> None:
        """End the epoch; with a hand-off, each lane's state goes to the lane of the next part."""
        self._finished = True
        if self._stream is not None and self._stream.hand_off and self.state is not None:
            self._stream._hand_over(self._ranks.shift_lanes(self.state), self._net)

    @property
    def state(self) -> State:
        """The carried state after the last update; at the end of an epoch, after its last step."""
        return self._state.carried

    @property
    def policy_state(self) -> S:
        """The state of the gradient policy after the last update.

        Waits for the flag of that update on a device, see `finite` of `tt.updates`.

        Raises:
            RunError: that update was not finite.
        """
        self._read_flag()
        return self._state

    def state_dict(self, *, after_step: bool = True) -> dict[str, Any]:
        """The position in the stream and the state of the policy.

        With the weights, the optimizer and torch's random state it resumes to the same bits.

        Args:
            after_step: whether the optimizer has stepped on the last update. `False` saves the
                position before it, from which it is made again. So does an update that ended with
                an error, or is being made, as in the handler of a signal.

        Waits for the flag of the last update on a device, see `finite` of `tt.updates`.

        Raises:
            RunError: that update was not finite; called again, this saves the position before it.
            DataError: the chunks do not come from a `tt.Stream`, which alone can return to
                a position.
        """
        stream = self._require_stream()
        self._read_flag()
        state, position = self._state, stream.state_dict()
        if self._finished:
            entering = stream._entering_state(self._net) if stream.hand_off else None
            state = self._gradient.init(entering, state)
        elif self._before is not None and (self._failed or not after_step):
            epoch, step, state = self._before
            position |= {"epoch": epoch, "position": step}
        values: dict[str, Any] = {
            "stream": position,
            "gradient": repr(self._gradient),
            "policy": self._gradient.state_dict(state),
        }
        if stream.hand_off:
            values["entering"] = stream._entering_state(self._net)
        return values

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from a position saved by `state_dict`, on a stream over the same recordings.

        Raises:
            DataError: the position belongs to another stream or policy; each difference is named.
        """
        stream = self._require_stream()
        if self._objective.late is not None:
            self._objective.late.flags.clear()
        if values["gradient"] != repr(self._gradient):
            raise DataError(
                f"the saved position belongs to {values['gradient']}, these updates to"
                f" {self._gradient!r}; resume with the same policy"
            )
        stream.load_state_dict(values["stream"])
        # checkpoints are read to the CPU
        moved = trees.map_tensors(lambda _, leaf: leaf.to(self._ranks.device), dict(values))
        entering = moved.get("entering")
        if entering is not None:
            stream._hand_over(entering, self._net)
        stream._start(handed_off=entering is not None)
        self._generation = stream._generation
        self._finished, self._failed, self._checked, self._before = False, False, False, None
        state = self._gradient.load_state_dict(moved["policy"], self._source)
        self._state = check_state(self._gradient, state)

    def _require_stream(self) -> Stream:
        if self._stream is None:
            raise DataError(
                "only a tt.Stream can return to a saved position and read a step again; to resume,"
                " give tt.updates a Stream, not bare chunks"
            )
        return self._stream
