"""The executor: runs a window, and adds its gradient to `.grad` once.

    read        steps are taken from the source chunk by chunk, and kept for the way back
    run         the lead without a graph; then one segment with its graph, or several that run again
    deliver     one backward pass; `.grad` gets the sum if all of it is finite, else stays as it was

It alone knows of ranks, accumulated updates, finite checks and the fused step. Lanes that
start a recording are reset by the net itself (`carry/carried.py`), which splits the call there.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import cmath
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime._device import is_accelerator
from throughtime.carry.carried import Carried, device_of, pack
from throughtime.chunk import Chunk, Source, join
from throughtime.errors import ConfigError, ModelError, RunError, listed
from throughtime.gradient._fused import try_fused
from throughtime.gradient.objective import (
    Objective,
    pooled,
    require_gradient,
    sizes,
    trainable_weights,
)
from throughtime.gradient.segment import (
    TRIAL_STEPS,
    Rebuild,
    Replay,
    Segment,
    automatic_chunk,
    flatten,
    graph_bytes,
    preserve_rng_and_buffers,
)
from throughtime.gradient.window import Credit, Policy, Progress, UpdatePolicy, Window
from throughtime.state import State
from throughtime.stream._queue import ChunkQueue

KEPT_LANE_STEPS = 65_536  # of the steps of a window that can be read again
_KEPT = "`.grad` and the weights are unchanged"
_ZEROED = (
    "It is the update before this one. Its `.grad` was set to zero on the device, so the"
    " optimizer's step left the weights finite: only momentum and weight decay moved them. To"
    " stop before that step, write tt.updates(..., finite='now')"
)


@dataclass(frozen=True, eq=False)
class Update:
    """One update: its gradient is in `.grad`.

    Attributes:
        loss: mean over the valid steps, a detached scalar tensor. Reading its value is left to you:
            it waits for the device.
        steps: number of valid steps behind it.
        state: the carried state after the last step, detached.
        outputs: `(T, B, C)` detached, of the steps in `chunk`; a tuple or a dict of several.
        chunk: the steps whose losses count. Of several segments, or of several accumulated
            updates, it is the last part, so that memory stays flat; unless a `tt.SequenceLoss`
            takes all segments together.
        weight: of this gradient among others: the valid steps, or the sum of their class weights.
            On several ranks `loss`, `steps` and `weight` are those of all of them, `outputs` and
            `chunk` this rank's.
    """

    loss: Tensor
    steps: int
    state: State
    outputs: Any
    chunk: Chunk
    weight: float

    def __repr__(self) -> str:
        return f"Update(loss={self.loss.item():.6g}, steps={self.steps})"


class OwnGrads:
    """Inside the block, `.grad` is that of the block alone.

    After it, it has been added, times `scale`, to what was there before; after an error, `.grad`
    is as it was.
    """

    def __init__(self, weights: Collection[Tensor], *, discard: bool = False) -> None:
        self._weights, self._discard, self.scale = weights, discard, 1.0

    def __enter__(self) -> Self:
        self._before = {w: w.grad for w in self._weights if w.grad is not None}
        for weight in self._before:
            weight.grad = None
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        keep = kind is None and not self._discard
        if keep and not self._before and self.scale == 1:  # the usual case
            return
        for weight in self._weights:
            grad, before = weight.grad, self._before.get(weight)
            if not keep or grad is None:
                weight.grad = before
            elif before is None:
                weight.grad = grad * self.scale
            elif before.is_sparse:
                weight.grad = grad * self.scale + before
            else:
                weight.grad = before.add_(grad, alpha=self.scale)


class StepReader:
    """The steps of an epoch: each is taken from the source once, and read again on the way back.

    Args:
        source: the steps.
        begin: the first one that may be asked for.
    """

    def __init__(self, source: Source, begin: int) -> None:
        self._source, self._end = source, source.position
        self._begins = [begin] if begin < self._end else []
        self._chunks = [source.read(begin, self._end) for begin in self._begins]

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of the epoch; takes those that are new."""
        begins, chunks, source = self._begins, self._chunks, self._source
        if stop > self._end:
            if chunks and begins[-1] + chunks[-1].steps < self._end:  # read on the way back
                begins[:], chunks[:] = [], []
            chunk = source.take(stop - self._end)
            if chunk is None or chunk.steps < stop - self._end:
                raise ConfigError(
                    f"the policy's window ends at step {stop}, after the end of the epoch: its new"
                    " steps are at most source.remaining(n)"
                )
            begins.append(self._end)
            chunks.append(chunk)
            self._end = stop
        if not begins or start < begins[0] or stop > begins[-1] + chunks[-1].steps:
            # on the way back, so with some of the steps before
            block = KEPT_LANE_STEPS // (8 * chunks[0].lanes) if chunks else 0
            first = max(0, min(start, stop - block))
            begins[:], chunks[:] = [first], [source.read(first, stop)]
        index = bisect_right(begins, start) - 1
        first, chunk = begins[index], chunks[index]
        if stop - first <= chunk.steps:  # the usual case
            whole = start == first and stop - first == chunk.steps
            return chunk if whole else chunk[start - first : stop - first]
        parts = zip(begins[index:], chunks[index:], strict=True)
        return join([c[max(0, start - at) : stop - at] for at, c in parts if at < stop])

    def forget(self, step: int | None = None) -> None:
        """Forget the steps before one; default: the oldest, if they are many and can be re-read."""
        begins, chunks = self._begins, self._chunks
        if step is None:
            many = self._end - KEPT_LANE_STEPS // chunks[-1].lanes
            step = 0 if self._source.once else many
        while chunks and begins[0] + chunks[0].steps <= step:
            del begins[0], chunks[0]


class _Part(NamedTuple):
    """The mean loss of the steps of one segment, and its weight."""

    begin: int
    stop: int
    loss: Tensor
    weight: float


# The update, and the state entering step `keep`
_Result: TypeAlias = tuple[Update, State]


class Executor:
    """Runs the windows of a policy, one after another.

    Args:
        net: made by `tt.carry`.
        source: the steps of an epoch.
        objective: the loss.
        policy: which windows.
        ranks: the `throughtime.distributed.Ranks` that train the net, if there are several.
        late: whether the finite check of an accelerator is read before the next update.

    Attributes:
        at: where the last update ended.
        unread: sizes of loss and gradients on an accelerator, names of these, and the error.
    """

    def __init__(
        self,
        net: Carried,
        source: Source,
        objective: Objective,
        policy: Policy | UpdatePolicy,
        ranks: Any = None,
        *,
        late: bool = False,
    ) -> None:
        self.net, self.source, self.objective, self.ranks = net, source, objective, ranks
        self.late = late
        self.policy: Any = policy
        self.unread: list[tuple[Tensor, list[str | None], Callable[[str | None], RunError]]] = []
        self._step_bytes = 0.0  # of a graph, once measured
        self._known: tuple[object, dict[str, Tensor]] = None, {}
        self._makes_updates = isinstance(policy, UpdatePolicy)
        self.move(Progress(source.position, lead=source.position))

    def move(self, at: Progress) -> None:
        """Go on from another place, at which the source is."""
        self.at, self._reader = at, StepReader(self.source, at.lead)
        self.unread.clear()

    def weights(self) -> dict[str, Tensor]:
        """What gets a gradient, by name."""
        return trainable_weights(self.net, self.objective.loss_fn)

    def step(self, *, mean: bool = False) -> Update | None:
        """Run the next window, whose weight is 0 if no step of it is valid.

        Args:
            mean: whether the gradient is going to be one of several, weighted by `weight`.

        Returns:
            None at the end of the epoch.

        Raises:
            ConfigError: the policy's plan is none, or has no place in such a mean.
        """
        at, policy = self.at, self.policy
        with OwnGrads(self._known_weights(anew=mean).values()) as grads:
            if self._makes_updates:
                result = policy.update(self.net, self.source, self.objective, at)
            elif self.ranks is None:
                result = policy.plan(self.source, at, self.probe)
            else:
                result = self._same_plan()
            w, after = result if type(result) is tuple and len(result) == 2 else (result, None)
            update: Any = w
            if type(w) is Window:
                lead, keep, stop = at.lead, w.keep, w.stop
                if not (
                    lead == w.lead <= w.start <= w.counted < stop > at.step and lead <= keep <= stop
                ):
                    raise self._misplanned(result)
                if mean and w.per is not None:
                    raise ConfigError(
                        f"accumulate with {policy!r}: its updates are unbiased as they are, and"
                        " would not be when weighted by their steps. Leave out"
                        " optimizer.zero_grad() between them, or take a larger mean_horizon"
                    )
                update, edge = self._run(w, at)
                edge = update.state if keep == stop else at.edge if keep == lead else edge
                self._reader.forget(keep)
                self.at = Progress(stop, update.state, keep, edge, after)
            elif self._makes_updates and isinstance(w, Update | None) and type(after) is Progress:
                self.at = after
            elif w is None and type(result) is tuple and not self._makes_updates:
                self.at = at._replace(memory=after)
            else:
                raise self._misplanned(result)
            if mean and update is not None:
                grads.scale = update.weight
        if update is None and not self.source.remaining(1):
            self.source.take(1)  # ends the epoch
        return update

    def _misplanned(self, result: Any) -> ConfigError:
        return ConfigError(
            f"{type(self.policy).__name__} returned {result!r:.300}, expected from plan (window,"
            " memory), from update (update, progress), and None in place of the first at the end of"
            f" the epoch. A Window has lead={self.at.lead}, where a state is known, a stop after"
            f" step {self.at.step}, where the last update ended, lead <= start <= counted < stop,"
            " and lead <= keep <= stop"
        )

    def _known_weights(self, *, anew: bool) -> Mapping[str, Tensor]:
        """What gets a gradient: looked up anew, unless the guards of a fused step know the net."""
        fused, (known, weights) = self.net._fused_net, self._known
        if anew or not fused or fused is not known:
            weights = self.weights()
            self._known = fused, weights
        return weights

    def reduced(self, accumulate: int) -> Update | None:
        """The mean of several windows, and of all ranks, by their weights.

        Args:
            accumulate: how many windows.

        Returns:
            The update; None at the end of the epoch, on every rank.
        """
        ranks, weights = self.ranks, [*self.weights().values()]
        self.objective.split |= accumulate > 1 or ranks is not None
        with OwnGrads(weights):
            while True:
                try:
                    update = self._mean(accumulate, weights)
                except Exception:
                    if ranks is not None:
                        ranks.signal_failure(weights)
                    raise
                if update is not None and ranks is not None:
                    update = ranks.reduce_update(update, weights)
                    if update is None:
                        continue  # no rank has a valid step
                if update is None or update.weight:
                    return update

    def _mean(self, accumulate: int, weights: Sequence[Tensor]) -> Update | None:
        """The mean of several windows by their weights.

            g = (m_1 g_1 + ... + m_n g_n) / (m_1 + ... + m_n)

        All belong to the same weights, as if the windows were played side by side in n times the
        lanes; the state is carried from one to the next.
        """
        if accumulate == 1:
            return self.step()
        last: Update | None = None
        loss, steps, total = 0.0, 0, 0.0
        for _ in range(accumulate):
            if last is not None and not self.source.remaining(1):
                break  # the source ends once, which the next call finds
            update = self.step(mean=True)
            if update is None:
                break
            last, m = update, update.weight
            loss, steps, total = loss + update.loss * m, steps + update.steps, total + m
        if last is None or not total:
            return last
        share: Any = 1 / total
        if self.unread:  # one part that is not finite is the whole update
            share = torch.cat([values for values, *_ in self.unread]).isfinite().all() / total
        for weight in weights:
            weight.grad = None if weight.grad is None else weight.grad * share
        return replace(last, loss=loss / total, steps=steps, weight=total)

    def _same_plan(self) -> Any:
        """The next window; what a policy draws at random is equal on all ranks."""
        plan = partial(self.policy.plan, self.source, self.at, self.probe)
        before, result = torch.get_rng_state(), plan()
        after = torch.get_rng_state()
        if not torch.equal(before, after):
            torch.set_rng_state(self.ranks.gather(before)[0])
            result = plan()
            torch.set_rng_state(after)
        return result

    def probe(self, policy: Policy | UpdatePolicy, steps: int) -> list[Tensor]:
        """The gradient of the next steps by another policy, as a mean; nothing is changed.

        Args:
            policy: which windows.
            steps: at most those that are left.

        Returns:
            A tensor for each of `weights()`, that of all ranks; empty if no step counts.
        """
        objective, weights, begin = copy(self.objective), [*self.weights().values()], self.at.step
        objective.scaler, objective.split = None, True
        objective.set_stride(getattr(self.policy, "stride", None), type(self.policy).__name__)
        ahead = ChunkQueue([self.source.read(begin, begin + steps)])
        other = Executor(self.net, ahead, objective, policy, self.ranks)
        other.at = Progress(carried=self.at.carried, edge=self.at.carried)
        preserved = preserve_rng_and_buffers(self.net, device_of(self.net))
        with preserved, OwnGrads(weights, discard=True):
            if other.reduced(max(2, steps)) is None:
                return []
            return [torch.zeros_like(w) if w.grad is None else w.grad.to_dense() for w in weights]

    def _run(self, w: Window, at: Progress) -> _Result:  # noqa: C901  (one call fewer per update)
        """Run a window; all segments but the last run again in the backward pass."""
        objective, kept, whole = self.objective, list[State](), w.chunk is None
        length = w.stop - w.start if whole else self._length(w)
        chunk = self._reader.read(w.counted if whole else w.lead, min(w.stop, w.start + length))
        state = at.edge
        if state is None:  # it may be learned
            state = self.net.initial_state(chunk.lanes, like=chunk.inputs)
        if whole and self.net._fused_net is not False:
            result = self._run_fused(w, chunk, state)
            if result is not None:
                return result
        if w.lead < w.start:
            with torch.no_grad():
                _, state = self._forward(w.lead, w.start, state, w, kept)
        parts, seen, replay, valid = list[_Part](), list[Any](), None, 0
        y = loss = chunk.inputs  # of the segments to come
        joined: list[tuple[Tensor, Chunk]] = []  # for a loss of all segments together
        if not whole:
            replay = Replay(self.net, [*self.weights().values()], chunk.inputs.device)
        if w.stop - w.start > length or w.per is not None:
            objective.require_parts(w.per)
        for begin in range(w.start, w.stop, length):
            stop = min(begin + length, w.stop)
            gate = None if begin == w.start else self._gate(w, begin)
            if replay is None or (stop == w.stop and gate is None):  # else the first to run again
                chunk = chunk if whole else self._reader.read(max(begin, w.counted), stop)
                weight = objective.weight(chunk)
                with nullcontext() if weight or joined else torch.no_grad():
                    y, state = self._forward(begin, stop, state, w, kept)
                loss = y = y if len(y) == chunk.steps else y[len(y) - chunk.steps :]
                if not joined:
                    loss, weight = objective(y, chunk, weight)
                if replay is not None:
                    replay.reached = loss.requires_grad
            else:
                leaves, rebuild = flatten(state)
                run = partial(self._run_segment, w, begin, stop, rebuild, kept, seen)
                inputs, span = (*leaves, *replay.inputs), (begin, stop)
                results: Any = Segment.apply(run, span, replay, gate, len(leaves), *inputs)
                loss, *leaves = results
                y, chunk, weight, rebuild = seen
                state = rebuild(leaves)
                self._reader.forget()
            if joined or (objective.joins and stop < w.stop):
                joined.append((loss, chunk))
                continue
            parts.append(_Part(max(begin, w.counted), stop, loss, weight))
            valid += chunk.valid_steps
            if replay is not None and loss.is_cpu and objective.scaler is None:
                self._check_finite(loss.detach(), {}, parts[-1:], y, chunk)
        if joined:
            outputs, chunks = zip(*joined, strict=True)
            y, chunk = torch.cat(outputs), join(chunks)
            loss, weight = objective(y, chunk)
            if replay is not None:
                replay.reached = loss.requires_grad
            parts, valid = [_Part(w.counted, w.stop, loss, weight)], chunk.valid_steps
        state, y, edge = _detach(state), y.detach(), _detach(kept[-1]) if kept else None
        total = parts[0].weight
        if len(parts) > 1:
            loss, total = pooled([(part.loss, part.weight) for part in parts], y)
        outputs = y if objective.unpack is None else objective.unpack(y)
        update = Update(loss.detach(), valid if total else 0, state, outputs, chunk, total)
        if w.per is not None:  # all ranks take part, whatever counts on this one
            mean = total if self.ranks is None else self.ranks.mean(total)
            loss = loss * (mean / (w.per * chunk.lanes))
        if total:
            self._deliver(loss, parts, y, chunk, replay)
        return update, edge

    def _run_fused(self, w: Window, chunk: Chunk, state: State) -> tuple[Update, State] | None:
        """The update by one call of a kernel, where the net and the loss allow it."""
        objective = self.objective
        weight = objective.weight(chunk)
        if not weight or objective.sequences or w.lead < w.start or not w.per is w.enter is None:
            return None
        steps = chunk if w.lead == w.counted else self._reader.read(w.lead, w.stop)
        result = try_fused(self.net, steps, chunk, state, w.keep - w.lead, objective)
        if result is None:
            return None
        loss, y, after, edge, finite = result
        if not finite:
            part = _Part(w.counted, w.stop, loss, weight)
            self._check_finite(loss, self.weights(), [part], y, chunk)
        return Update(loss, chunk.valid_steps, after, y, chunk, weight), edge

    def _run_segment(
        self,
        w: Window,
        begin: int,
        stop: int,
        rebuild: Rebuild,
        kept: list[State],
        seen: list[Any],
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        """The loss of a segment and the state after it, leaf by leaf.

        `seen` gets its outputs, steps, weight, and what builds the state.
        """
        graph, objective, skip = torch.is_grad_enabled(), self.objective, w.counted - begin
        y, after = self._forward(begin, stop, rebuild(leaves), w, kept)
        chunk = self._reader.read(begin, stop)
        if skip > 0:
            y, chunk = y[skip:], chunk[skip:]
        with torch.enable_grad():  # of a segment without a graph, weights of the loss would show
            loss, weight = (y, 0.0) if objective.joins else objective(y, chunk)
        if loss.requires_grad and not graph and not isinstance(objective.function, nn.Module):
            raise ModelError(
                "loss_fn is a function with weights of its own inside: they would get no gradient"
                " here. Give the module itself, loss_fn=module, whose forward takes outputs and"
                " targets."
            )
        after, rebuild = flatten(after)
        seen[:] = y.detach(), chunk, weight, rebuild
        return loss, *after

    def _length(self, w: Window) -> int:
        """Steps per segment of a window."""
        if isinstance(w.chunk, int):
            return w.chunk
        if not self._step_bytes:
            # of the epoch's start, so that a resumed run has segments of equal length
            known = self.source.position + self.source.remaining(TRIAL_STEPS)
            few = self.source.read(0, min(TRIAL_STEPS, known))
            self.net.prepare(few.inputs)  # the graphs of its trials do not count

            def run() -> tuple[Any, ...]:
                state = self.net.initial_state(few.lanes, like=few.inputs)
                y, after = self.net(few.inputs, state)
                self.objective.bind(self.net.adapter.unpack)
                return y, after, None if self.objective.joins else self.objective(pack(y), few)

            self._step_bytes = graph_bytes(self.net, few, run)
        return automatic_chunk(w.stop - w.start, self._step_bytes)

    def _gate(self, w: Window, step: int) -> Any:
        """The gate of a step, on credit that a scaler has scaled."""
        gate, scaler = w.gate, self.objective.scaler
        if gate is None or scaler is None:
            return gate and partial(gate, step)
        scale = scaler.scale(torch.ones((), device=device_of(self.net)))

        def unscaled(credit: Credit) -> Credit:
            plain = gate(step, [leaf if leaf is None else leaf / scale for leaf in credit])
            return [leaf if leaf is None else leaf * scale for leaf in plain]

        return unscaled

    def _forward(
        self, begin: int, end: int, state: State, w: Window, kept: list[State]
    ) -> tuple[Tensor, State]:
        """Run steps, in several calls where a state is kept or changed; outputs and state."""
        net, read, enter, cuts = self.net, self._reader.read, w.enter, [begin, end]
        if begin < w.keep < end:
            cuts.insert(1, w.keep)
        if enter is not None:
            cuts = sorted({*cuts, *(begin + step for step in read(begin, end).reset_steps)})
        outputs: list[Tensor] = []
        for start, stop in pairwise(cuts):
            part = read(start, stop)
            x = part.inputs
            if start == begin and torch.is_autocast_enabled(x.device.type):
                # the cache may hold weights of another moment, or casts made without a graph
                torch.clear_autocast_cache()
            if start == w.keep and not kept:  # else it runs again
                kept.append(state)
            resets = part.resets if part.any_reset else None
            if enter is not None and part.any_reset:  # at its first step alone
                state, resets = enter(part, state, net.initial_state(part.lanes, like=x)), None
            y, state = net(x, state, resets)
            if not isinstance(y, Tensor):
                self.objective.bind(net.adapter.unpack)
                y = pack(y)
            outputs.append(y)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _deliver(
        self, loss: Tensor, parts: Sequence[_Part], y: Tensor, chunk: Chunk, replay: Any = None
    ) -> None:
        """Add the gradient of a loss to `.grad`, once, if it is finite."""
        kind, scaler = loss.device.type, self.objective.scaler
        if loss.requires_grad:
            autocast = torch.is_autocast_enabled(kind)  # which torch recommends to leave here
            with torch.autocast(kind, enabled=False) if autocast else nullcontext():
                (loss if scaler is None else scaler.scale(loss)).backward()
        require_gradient(loss.requires_grad if replay is None else replay.reached)
        if scaler is None:
            known, weights = self._known  # those of a fused step are fewer
            weights = self.weights() if known else weights
            self._check_finite(loss.detach(), weights, parts, y, chunk, replay)

    def _check_finite(
        self,
        loss: Tensor,
        weights: Mapping[str, Tensor],
        parts: Sequence[_Part],
        y: Tensor | None,
        chunk: Chunk,
        replay: Replay | None = None,
    ) -> None:
        """Refuse a loss or a gradient that is not finite; all parameters are read.

        On an accelerator the gradient is set to zero there instead, and the flag is read before the
        next update: the host never waits for what it has just asked for.
        """
        grads = {n: g for n, w in weights.items() if (g := w.grad) is not None and g.numel()}
        tensors = [loss, *grads.values()]
        if loss.is_cpu and all(map(cmath.isfinite, [t.sum().item() for t in tensors])):
            return
        values = sizes(tensors)

        def error(name: str | None) -> RunError:
            part, steps, outputs = _part_at_fault(parts, name, replay), chunk, y
            if part is not parts[-1]:
                steps, outputs = self._reader.read(part.begin, part.stop), None
            subject = "the loss" if name is None else f"the gradient of '{name}'"
            return RunError(
                f"{subject} is not finite (NaN or infinite) in the chunk of steps {part.begin} to"
                f" {part.stop - 1} of the epoch (recording"
                f" {listed(self.objective.recordings_at_fault(outputs, steps))}), whose part of the"
                f" loss is {part.loss.item():.6g}. {_ZEROED if late else _KEPT}. Check the inputs"
                " and targets of these steps. If they are sound, the net or its gradient explodes:"
                " lower the learning rate, or cut or clip the credit (a shorter horizon,"
                " clip_grad_norm_, or tt.Exact with clip_adjoint)."
            )

        late = self.late and replay is None and is_accelerator(loss)
        if late and all(type(grad) is Tensor for grad in grads.values()):
            wrong = ~values.isfinite().all()
            for grad in grads.values():
                (grad._values() if grad.is_sparse else grad).masked_fill_(wrong, 0)
            self.unread.append((values, [None, *grads], error))
        elif not all(map(cmath.isfinite, values.tolist())):
            for name, grad in {None: loss, **grads}.items():
                numbers = grad.coalesce().values() if grad.is_sparse else grad
                if not bool(numbers.isfinite().all()):  # else a sum of finite numbers overflows
                    raise error(name)

    def read_flags(self) -> None:
        """Wait for the last update on an accelerator.

        Raises:
            RunError: a loss or gradient was not finite.
        """
        unread, self.unread = self.unread, []
        if unread:
            numbers = iter(torch.cat([values for values, *_ in unread]).tolist())  # one wait
            for _, names, error in unread:
                for name in names:
                    if not math.isfinite(next(numbers)):
                        raise error(name)


def _detach(state: State) -> State:
    """As `trees.detach`, in half its time: every update needs it, up to twice."""
    if isinstance(state, Tensor):
        return state.detach()
    if type(state) is tuple:
        return tuple(map(_detach, state))
    if type(state) is dict:
        return dict(zip(state, map(_detach, state.values()), strict=True))
    return trees.detach(state)


def _part_at_fault(parts: Sequence[_Part], name: str | None, replay: Replay | None) -> _Part:
    """The first part whose loss is not finite; else the last with such a gradient."""
    wrong = (part for part in parts if not bool(part.loss.isfinite()))
    if name is None or replay is None or len(parts) == 1:
        return next(wrong, parts[-1])
    if bool(replay.arriving.isfinite().all()):
        wrong = (parts[i] for i, values in replay.notes if not bool(values.isfinite().all()))
    return next(wrong, parts[-1])
