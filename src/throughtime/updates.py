"""The verb: a stream, a net and a gradient policy become updates.

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk
from throughtime.distributed import ranks_of
from throughtime.errors import ConfigError, DataError, RunError, check_whole
from throughtime.gradient import (
    Exact,
    LossFn,
    Objective,
    Policy,
    Progress,
    Scaler,
    Truncated,
    Update,
    UpdatePolicy,
)
from throughtime.gradient.executor import Executor
from throughtime.nn.fuse import ADVISE_AFTER, advise
from throughtime.predict import check_standardised
from throughtime.state import State
from throughtime.stream import Stream
from throughtime.stream._queue import ChunkQueue


def updates(
    net: Carried,
    stream: Stream | Iterable[Chunk],
    loss_fn: LossFn,
    *,
    gradient: Policy | UpdatePolicy,
    state: State = None,
    policy_state: Any = None,
    scaler: Scaler | None = None,
    accumulate: int = 1,
    finite: Literal["next", "now"] = "next",
) -> "Updates":
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
            single column, as the outputs. Other losses are a `tt.SequenceLoss`.
        gradient: `tt.Truncated(...)` or another policy; see `throughtime.gradient.Policy` to write
            one.
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
            against `(N, 1)`, which pairs each step with the targets of all others; or it is no mean
            over steps, such as a root of one, and is to be that of segments, ranks or several
            updates. Otherwise the latter is a warning.
        DataError: chunks that are not adjacent, or have no targets.
        ConfigError: `gradient` is not a policy, or one that breaks the contract of
            `throughtime.gradient.Policy`; or `accumulate` is below 1, or used with
            `tt.Randomized`, whose updates are not means; or `finite` is neither "next" nor "now".
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
    methods = [callable(getattr(gradient, name, None)) for name in ("plan", "update")]
    if isinstance(gradient, type) or not any(methods):
        raise ConfigError(
            f"gradient={gradient!r} is no object with a method plan: expected a policy, as"
            " tt.Truncated(stride=100) makes one, or an object of your own with a method plan, or"
            " update (see throughtime.gradient.Policy)"
        )
    accumulate = check_whole("accumulate", accumulate, 1)
    if finite not in ("next", "now"):
        raise ConfigError(f"finite={finite!r}: expected 'next' or 'now'")
    objective = Objective(loss_fn, scaler)
    return Updates(
        net, stream, objective, gradient, state, policy_state, accumulate, late=finite == "next"
    )


class Updates(Iterator[Update]):
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
        gradient: Policy | UpdatePolicy,
        state: State,
        policy_state: Any,
        accumulate: int,
        *,
        late: bool,
    ) -> None:
        self._net, self._gradient, self._accumulate = require_carried(net), gradient, accumulate
        self._stream = stream if isinstance(stream, Stream) else None
        if self._stream is not None:
            check_standardised(net, self._stream)
        self._ranks = ranks_of(net, self._stream)
        source = stream if isinstance(stream, Stream) else ChunkQueue(stream)
        source._place(objective.placement(net, self._ranks.device))
        if state is not None:
            state = trees.detach(state)
        elif isinstance(stream, Stream):
            entering = stream._entering_state(net)
            stream._start(handed_off=entering is not None)
            state = entering if stream._schedule.handed_off else None
        several = self._ranks.count > 1
        self._executor = Executor(
            net,
            source,
            objective,
            gradient,
            self._ranks if several else None,
            late=late and not several,
        )
        at = source.position
        self._executor.move(Progress(at, state, at, state, policy_state))
        self._plain = accumulate == 1 and not several and not self._ranks.shards
        # "new" before the first checks, "busy" within an update, and after an error in one
        self._status: Literal["new", "ready", "busy", "finished"] = "new"
        self._generation = 0 if self._stream is None else self._stream._generation
        self._count = 0  # updates
        # epoch and progress before the last update
        self._before: tuple[int, Progress] | None = None

    def __bool__(self) -> bool:
        return True  # else some would be false at the end, and others an error

    def __len__(self) -> int:
        """The number of updates to come in this epoch, as `tqdm` asks for it.

        One stride or recording is one update, unless none of its steps has a target.

        Raises:
            TypeError: the number is not known before the steps are played.
        """
        if self._status == "finished":
            return 0
        stream, each = self._stream, self._accumulate
        if stream is not None and not stream._collator.warm_up:
            step = self._executor.at.step
            left = [end - step for end in stream._schedule.common_resets if end >= step]
            match self._gradient:
                case Truncated(stride=every, jitter=False) | Exact(cut_every=int(every)):
                    return math.ceil(left[-1] / every / each)
                case Exact():
                    return math.ceil(sum(map(bool, left)) / each)
                case _:
                    pass
        raise TypeError(
            "the number of these updates is not known beforehand: a policy other than Truncated and"
            " Exact, jitter, a warm-up, or an iterable of chunks. Count them as they come:"
            " enumerate(updates)"
        )

    def __next__(self) -> Update:
        if self._status == "finished":
            raise StopIteration
        executor, stream = self._executor, self._stream
        if self._status != "ready" or executor.unread:
            self._check()
        if stream is not None:
            if stream._generation != self._generation:
                raise DataError(
                    "the stream was started again or moved while its updates were taken: the"
                    " carried state belongs to other steps. Give tt.evaluate, and every other loop,"
                    " a Stream of its own."
                )
            # after the checks: a refused call must not save a later position
            self._before = stream.epoch, executor.at
        self._status = "busy"
        if self._plain:  # the usual case
            update = executor.step()
            while update is not None and not update.weight:
                update = executor.step()
        else:
            with self._ranks.unsharded(self._net):
                update = executor.reduced(self._accumulate)
        if update is None:
            self._status = "finished"
            if stream is not None and stream.hand_off and self.state is not None:
                # each lane's state goes to the lane of the next part
                stream._hand_over(self._ranks.shift_lanes(self.state), self._net)
            raise StopIteration
        self._count += 1
        # ranks compare their weights once more after the first update
        self._status = "new" if self._count == 1 and self._ranks.count > 1 else "ready"
        if self._count == ADVISE_AFTER:
            advise(self._net, update.chunk.lanes)
        return update

    def _check(self) -> None:
        """The checks before the first update, after an error, and after an update on a device."""
        self._read_flag()
        if self._status == "busy":
            raise RunError(
                "these updates ended with an error in the middle of a step: the stream has moved on"
                " and the state has not. Start again with tt.updates(...), or from a saved position"
                " with load_state_dict"
            )
        if self._status != "new":
            return
        first, ranks, stream = not self._count, self._ranks, self._stream
        lost = first and stream is not None and stream.position > 0 and self.state is None
        if ranks.count > 1 and stream is not None:
            policy = {"gradient": self._gradient, "accumulate": self._accumulate}
            with ranks.unsharded(self._net):
                weights = self._executor.weights()
                ranks.check_equal(weights, {**stream._plan(), **policy} if first else None)
                if lost:  # the others would wait for this rank
                    ranks.signal_failure([*weights.values()])
        if lost:
            raise DataError(
                f"the stream is at step {self._executor.at.step} and no state came with it: it"
                " would go on from the initial state. Resume with updates.load_state_dict(...), or"
                " give tt.updates the carried state."
            )

    def _read_flag(self) -> None:
        """Wait for the last update on a device; one that was not finite ends these updates."""
        executor = self._executor
        if executor.unread and self._status != "busy":
            status, self._status = self._status, "busy"
            executor.read_flags()
            self._status = status

    @property
    def state(self) -> State:
        """The carried state after the last update; at the end of an epoch, after its last step."""
        return self._executor.at.carried

    @property
    def policy_state(self) -> Any:
        """What the gradient policy remembers after the last update.

        Waits for the flag of that update on a device, see `finite` of `tt.updates`.

        Raises:
            RunError: that update was not finite.
        """
        self._read_flag()
        return self._executor.at.memory

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
        at, position = self._executor.at, stream.state_dict()
        entering = stream._entering_state(self._net)
        if self._status == "finished":
            at = Progress(0, entering, 0, entering, at.memory)
        elif self._before is not None and (self._status == "busy" or not after_step):
            epoch, at = self._before
            position |= {"epoch": epoch, "position": at.step}
        return {
            "stream": position,
            "gradient": repr(self._gradient),
            "accumulate": self._accumulate,
            "policy": at._asdict(),
            "entering": entering,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Continue from a position saved by `state_dict`, on a stream over the same recordings.

        Raises:
            DataError: the position belongs to another stream or policy; each difference is named.
        """
        stream = self._require_stream()
        for name, own in (("gradient", repr(self._gradient)), ("accumulate", self._accumulate)):
            if values[name] != own:
                raise DataError(
                    f"the saved position belongs to {name}={values[name]}, these updates to"
                    f" {name}={own}; resume with the same policy"
                )
        stream.load_state_dict(values["stream"])
        # checkpoints are read to the CPU
        moved = trees.map_tensors(lambda leaf: leaf.to(self._ranks.device), dict(values))
        entering = moved["entering"]
        if entering is not None:
            stream._hand_over(entering, self._net)
        stream._start(handed_off=entering is not None)
        self._executor.move(Progress(**moved["policy"]))
        self._generation = stream._generation
        self._status, self._count, self._before = "new", 0, None

    def _require_stream(self) -> Stream:
        if self._stream is None:
            raise DataError(
                "only a tt.Stream can return to a saved position and read a step again; to resume,"
                " give tt.updates a Stream, not bare chunks"
            )
        return self._stream
