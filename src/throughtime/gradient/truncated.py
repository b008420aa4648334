"""Truncated backpropagation through time, Williams & Peng's BPTT(h; h').

    every h' steps:  g = d/dw  (1/N) * sum of the losses of the newest h' steps,
                     the state h steps ago taken as a constant

h' is `stride` (k1), h is `horizon` (k2). Each loss is counted once. Its credit flows back between
`horizon - stride + 1` and `horizon` steps. With `horizon == stride` this is the usual TBPTT(k, k),
in which the credit of the first loss of every chunk flows back one step. Not to be confused with
counting every loss of the window, which multiplies the gradient by about h/h', nor with counting
the last loss only.

The window is run again under the current weights, so all of it belongs to the same model. A shorter
last stride of an epoch looks back as far as any other, unless `horizon == stride`, where no step is
run twice. Cost per step: h/h' forward and backward passes; memory for the graph of one window.

A stream of windows (`tt.windows`) starts each of them from the initial state, or from another one
(`start`, see `_starts.py`).

References: R. J. Williams and J. Peng, An efficient gradient-based algorithm for on-line training
of recurrent network trajectories, Neural Computation 2 (1990).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source, join
from throughtime.errors import ConfigError, DataError, counted
from throughtime.gradient import _retained, schedule
from throughtime.gradient._fused import try_fused
from throughtime.gradient._memory import measure_graph
from throughtime.gradient._segments import (
    Segment,
    forward,
    join_outputs,
    no_autocast,
    run_chunk,
)
from throughtime.gradient._starts import STARTS, Start, StartStates, WindowStarts
from throughtime.gradient.objective import Objective, check_finite
from throughtime.gradient.policy import Update, empty_update
from throughtime.state import State


class TruncatedState(NamedTuple):
    """Between two updates of `Truncated`.

    Attributes:
        carried: the state after the last step.
        edge: the state entering the first step of `past`; `None` for the initial state.
        past: the last steps, which the next window runs again.
        since_reset: `(B,)`, steps since each lane's last reset, with a warm-up; on the host.
        segments: those of the last horizon with their graphs, where graphs are retained.
        starts: the states in which windows ended, unless they start from zero.
    """

    carried: State = None
    edge: State = None
    past: Chunk | None = None
    since_reset: Tensor | None = None
    segments: tuple[Segment, ...] = ()
    starts: StartStates | None = None


@dataclass(frozen=True)
class Truncated:
    """Every `stride` steps, back through the last `horizon`; each loss counted once.

    Args:
        stride: steps between two updates (k1).
        horizon: steps that credit may flow back (k2), at least `stride`, not only multiples of it;
            default `stride`.
        jitter: begin every epoch with a stride of random length (from torch's generator). Strides
            then end at other steps in each epoch, and no step always has a credit of one step.
        burn_in: steps before the window that are run again under the new weights, without a graph,
            so that the state entering the window is less stale.
        warm_up: first steps after every reset whose loss does not count. The `warm_up` of a
            `tt.Stream` does the same for every policy.
        graphs: "recompute" runs every window again under the present weights. "retain" keeps the
            graphs of its strides, which belong to the weights they were run with: one forward pass
            instead of `horizon / stride`, for a copy of the weights per stride, and no checkpoint
            to resume from. "auto" retains where that is faster, in nets that loop over steps in
            Python (0.75 to 1.0 of the time; with fused layers 1.2 to 1.7), if the copies take less
            memory than the graphs. At fixed weights the gradients are the same.
        start: the state that enters a recording, for streams of `tt.windows`. "zero": the net's
            initial state. "carried": the state in which the window before it ended when it was last
            played; the initial state until then, and for the first window of a recording. It takes
            memory, and place in a checkpoint, for a state of every window. "noise": normal numbers
            with the mean and deviation of the states in which windows ended, a running mean. No
            gradient flows into either. Give `policy_state` to `tt.updates` from epoch to epoch, or
            each epoch starts anew.

    Raises:
        ConfigError: a stride below 1, a horizon below the stride, a negative `burn_in`, or one
            together with retained graphs; a `start` other than "zero" with a horizon that is not
            the stride, or with `burn_in`. When updates are made: `start="carried"` for recordings
            none of which continues another, or on several ranks.

    Cost: `horizon / stride` forward and backward passes per step, and `burn_in / stride` forward
    passes.

    Example:
        >>> import throughtime as tt
        >>> tt.Truncated(stride=100, horizon=400).describe()
        'an update every 100 steps, credit back through 301 to 400 steps (350.5 on average)'

    References: Williams & Peng, Neural Computation 2 (1990).
    """

    stride: int
    horizon: int | None = None
    jitter: bool = False
    burn_in: int = 0
    warm_up: int = 0
    graphs: Literal["recompute", "retain", "auto"] = "recompute"
    start: Start = "zero"

    def __post_init__(self) -> None:
        schedule.check_horizon(self.stride, self._horizon)
        schedule.check_whole("burn_in", self.burn_in, 0)
        schedule.check_whole("warm_up", self.warm_up, 0)
        if self.graphs not in ("recompute", "retain", "auto"):
            raise ConfigError(f"graphs={self.graphs!r}: expected 'recompute', 'retain' or 'auto'")
        if self.burn_in and self.graphs != "recompute":
            raise ConfigError(
                f"burn_in={self.burn_in} runs steps again under the new weights, which retained"
                " graphs never are: graphs='recompute'"
            )
        if self.start not in STARTS:
            raise ConfigError(f"start={self.start!r}: expected 'zero', 'carried' or 'noise'")
        if self.start != "zero" and (self._horizon != self.stride or self.burn_in):
            raise ConfigError(
                f"start={self.start!r} with horizon={self._horizon}, stride={self.stride},"
                f" burn_in={self.burn_in}: no step before a window is run again, and credit ends"
                f" with it. Leave horizon and burn_in out: tt.Truncated({self.stride},"
                f" start={self.start!r})"
            )

    @property
    def _horizon(self) -> int:
        return self.stride if self.horizon is None else self.horizon

    def describe(self) -> str:
        """The setting in words: guaranteed and mean horizon."""
        least, most = self._horizon - self.stride + 1, self._horizon
        text = (
            f"an update every {counted(self.stride, 'step')}, credit back through {least} to"
            f" {counted(most, 'step')}"
            f" ({(least + most) / 2:g} on average)"
        )
        if self.jitter:
            text += ", the first stride of an epoch of random length"
        if self.warm_up:
            text += f", the first {counted(self.warm_up, 'step')} after a reset not counted"
        if self.burn_in:
            text += f", the {counted(self.burn_in, 'step')} before run again under the new weights"
        if self.start != "zero":
            text += f", windows start from {self.start} states"
        return text

    def init(self, carried: State, previous: TruncatedState | None) -> TruncatedState:
        """The state before the first update of an epoch."""
        starts = None if previous is None else previous.starts
        return TruncatedState(carried, carried, starts=starts and starts.begin_epoch())

    def state_dict(self, state: TruncatedState) -> dict[str, Any]:
        """The state as plain values and state trees; of the past steps, their number.

        Raises:
            DataError: graphs are retained, which no file can hold.
        """
        if state.segments:
            raise DataError(
                f"{self!r} retains graphs of earlier weights, which no file can hold, so training"
                " cannot be resumed to the bit from here: take graphs='recompute'"
            )
        return {
            "carried": state.carried,
            "edge": state.edge,
            "past": 0 if state.past is None else state.past.steps,
            "since_reset": state.since_reset,
            "starts": None if state.starts is None else state.starts.state_dict(),
        }

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> TruncatedState:
        """The state that `state_dict` saved; reads the past steps again."""
        past, position = values["past"], source.position
        return TruncatedState(
            values["carried"],
            values["edge"],
            source.read(position - past, position) if past else None,
            None if values["since_reset"] is None else values["since_reset"].cpu(),
            starts=values["starts"] and StartStates.load(self.start, values["starts"], source),
        )

    def update(
        self, net: Carried, source: Source, objective: Objective, state: TruncatedState
    ) -> tuple[Update | None, TruncatedState]:
        """The update of the next stride with a valid step; others only carry the state on."""
        stride = self.stride
        if self.jitter and not source.position:
            stride = objective.same_on_ranks(int(torch.randint(1, stride + 1, (), device="cpu")))
        while (chunk := source.take(stride)) is not None:
            stride = self.stride
            since = None
            if self.warm_up:
                chunk, since = self._mask_warm_up(chunk, state)
            if self.start != "zero":
                update, state = self._from_starts(net, source, chunk, objective, state)
            elif self.graphs != "recompute" and self._retains(net, source, chunk, objective, state):
                update, state = self._retain(net, source, chunk, objective, state)
            else:
                update, state = self._recompute(net, source, chunk, objective, state)
            if since is not None:
                state = state._replace(since_reset=since)
            if update is not None:
                return update, state
        if state.starts is not None:
            state = state._replace(starts=state.starts.end_epoch(state.carried))
        return None, state

    def _from_starts(
        self,
        net: Carried,
        source: Source,
        chunk: Chunk,
        objective: Objective,
        state: TruncatedState,
    ) -> tuple[Update | None, TruncatedState]:
        """The update of a chunk of windows that start from other states than the initial one."""
        entering = state.edge
        if entering is None:
            entering = net.initial_state(chunk.lanes, like=chunk.inputs)
        starts = state.starts or StartStates.new(self.start, source, entering)
        windows = WindowStarts(net, chunk, starts)
        if 0 in windows.gates:
            entering = windows.gates.pop(0)(entering)
        update, after = self._recompute(
            net,
            source,
            windows.chunk,
            objective,
            TruncatedState(entering, entering),
            windows.gates,
        )
        if update is not None:
            update = replace(update, chunk=chunk)
        return update, after._replace(starts=windows.after())

    def _mask_warm_up(self, chunk: Chunk, state: TruncatedState) -> tuple[Chunk, Tensor]:
        """The chunk without the targets of a warm-up, and the steps since the last resets.

        A state that the user passed in counts as warm.
        """
        since = state.since_reset
        if since is None:
            steps = 0 if state.edge is None else self.warm_up
            since = torch.full((chunk.lanes,), steps, device="cpu")
        return chunk.warmed_up(self.warm_up, since)

    def _retains(
        self,
        net: Carried,
        source: Source,
        chunk: Chunk,
        objective: Objective,
        state: TruncatedState,
    ) -> bool:
        """Whether to retain graphs: as asked for, or where that is faster and memory allows it."""
        if self._horizon == self.stride:
            return False
        if self.graphs == "retain" or state.segments:
            return True
        if source.position > chunk.steps:  # decided once, at the start of an epoch
            return False
        size = measure_graph(net, lambda n: chunk[0:n], state.carried, objective)
        strides = -(-self._horizon // self.stride)
        copies = sum(weight.nbytes for weight in net.parameters()) * strides
        return size.nodes >= 1 and copies < size.step * self._horizon

    def _retain(
        self,
        net: Carried,
        source: Source,
        chunk: Chunk,
        objective: Objective,
        state: TruncatedState,
    ) -> tuple[Update | None, TruncatedState]:
        update, after, segments = _retained.update(
            net,
            chunk,
            source.position - chunk.steps,
            objective,
            (state.edge, state.segments),
            (self.stride, self._horizon),
        )
        return update, TruncatedState(after, after, segments=segments)

    def _recompute(
        self,
        net: Carried,
        source: Source,
        chunk: Chunk,
        objective: Objective,
        state: TruncatedState,
        gates: Mapping[int, Callable[[State], State]] | None = None,
    ) -> tuple[Update | None, TruncatedState]:
        past, edge = state.past, state.edge
        horizon = self.stride if self.horizon is None else self.horizon
        counted = 0 if past is None else past.steps
        # chunks from an iterator are not read ahead without need
        following = source.remaining(self.stride) if horizon > self.stride else 0
        window = schedule.window(
            0, counted, counted + chunk.steps, following, self.stride, horizon, self.burn_in
        )
        steps = chunk if past is None else join((past, chunk))
        if edge is None:
            edge = net.initial_state(chunk.lanes, like=chunk.inputs)
        result = None
        if chunk.valid_steps and net._fused_net is not False and not gates:
            result = try_fused(net, steps, chunk, edge, window, objective)
        if result is not None:
            loss, outputs, after, boundary, finite = result
        elif not objective.counts(chunk):
            with torch.no_grad():
                outputs, after, boundary = _run_window(net, steps, edge, window, gates)
            after = trees.detach(after)
            update = empty_update(objective, chunk, after, outputs)
            return update, self._next_state(state, steps, window, after, boundary)
        else:
            outputs, after, boundary = _run_window(net, steps, edge, window, gates)
            loss, finite = _backward_window(objective, outputs, chunk), None
            outputs, after = outputs.detach(), trees.detach(after)
        if not finite and objective.scaler is None:
            begin = source.position - chunk.steps
            result = loss, outputs
            check_finite(net, objective, result, chunk, begin, everywhere=finite is False)
        weight = None if objective.reducer is None else objective.loss_weight(chunk)
        update = Update(loss, chunk.valid_steps, after, outputs, chunk, None, weight)
        return update, self._next_state(state, steps, window, after, boundary)

    @staticmethod
    def _next_state(
        state: TruncatedState, steps: Chunk, window: schedule.Window, after: State, boundary: State
    ) -> TruncatedState:
        if window.keep == window.stop:
            return TruncatedState(after, after)
        edge = state.edge if window.keep == 0 else trees.detach(boundary)
        return TruncatedState(after, edge, steps[window.keep : window.stop])


def _run_window(
    net: Carried,
    steps: Chunk,
    state: State,
    window: schedule.Window,
    gates: Mapping[int, Callable[[State], State]] | None,
) -> tuple[Tensor, State, State]:
    """The outputs that count, the state at the end, and the state entering step `keep`."""
    if not window.start and window.keep == window.stop and not gates:  # the usual case
        y, end = run_chunk(net, steps, state)
        return (y[window.counted :] if window.counted else y), end, end
    bounds = sorted({0, window.start, window.keep, window.stop, *(gates or ())})
    outputs: list[Tensor] = []
    boundary = end = state
    results = forward(net, steps, state, bounds, graph_from=window.start, gates=gates)
    for stop, (y, end) in zip(bounds[1:], results, strict=True):
        if stop == window.keep:
            boundary = end
        if stop > window.start:
            outputs.append(y)
    counted = window.counted - window.start
    y = join_outputs(outputs)
    return y[counted:] if counted else y, end, boundary


def _backward_window(objective: Objective, outputs: Tensor, chunk: Chunk) -> Tensor:
    """Add the gradient of the loss of `chunk` to `.grad`; returns the loss, detached."""
    loss = objective.loss(outputs, chunk)
    if not loss.requires_grad:
        objective.check_depends([])
    scaled = objective.scaled(loss)
    if torch.is_autocast_enabled(loss.device.type):
        with no_autocast(loss):
            scaled.backward()
    else:  # the usual case, without the cost of a context
        scaled.backward()
    return loss.detach()
