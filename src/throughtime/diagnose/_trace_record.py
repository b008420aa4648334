"""Records of traced backward passes: norms by step and lane, of the last few passes.

A pass is one run of autograd's engine. `tt.Exact` makes several runs, one for each segment from the
last to the first. They are joined into one pass: the state after one run entered the run before it.

Shapes: `T` steps, `B` lanes (rows of the batch), `H` size of a state or gate.
"""

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Variable

from throughtime._device import real_type
from throughtime.errors import ConfigError

STEP_NAME = re.compile(r"(?P<track>.+)\.(?P<leaf>[^.\[\]]+)(\[(?P<step>-?\d+)\])?")
OUTSIDE = -1  # torch's task id outside of a backward pass


@dataclass(frozen=True, eq=False)
class TrackRecord:
    """Steps of one track in one run of the engine: those of one call, or of all calls.

    Attributes:
        start: the first step, counted over all calls of the track.
        gradients: by leaf, `(T, B, H)`. Steps without a gradient, and lanes that a call lacked, are
            zero. Empty in a finished record that keeps norms only.
        edges: by step, then by leaf, the gradient of the state entering a call, `(B, H)`.
        before: the state entering the first step.
        after: the state after the last step.
        from_graph: whether the state entering requires a gradient.
        gate_sum: the retention gate, summed over steps and lanes, `(H,)`.
        gate_count: the number of values in that sum.
        norms: of a finished record, by leaf, `(T, B)`.
    """

    start: int
    gradients: dict[str, Tensor]
    edges: dict[int, dict[str, Tensor]]
    before: list[Tensor]
    after: list[Tensor]
    from_graph: bool
    gate_sum: Tensor | None = None
    gate_count: int = 0
    norms: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @classmethod
    def from_calls(cls, track: "Track", calls: Sequence["TrackRecord"]) -> "TrackRecord":
        """Finish the calls of a run, ordered by their steps."""
        first = calls[0]
        gradients = {leaf: _joined(leaf, calls) for leaf in first.gradients}
        edge_calls = calls if track.all_edges else calls[:1]
        return cls(
            first.start,
            gradients if track.history.tensors else {},
            {step: edge for call in edge_calls for step, edge in call.edges.items()},
            first.before,
            calls[-1].after,
            first.from_graph,
            *_summed_gates(calls),
            norms={leaf: vector_norms(gradient, 2) for leaf, gradient in gradients.items()},
        )


def _summed_gates(records: Sequence[TrackRecord]) -> tuple[Tensor | None, int]:
    """The retention gate summed over the records, and the number of its values."""
    gates = [record.gate_sum for record in records if record.gate_sum is not None]
    return torch.stack(gates).sum(0) if gates else None, sum(r.gate_count for r in records)


def _joined(leaf: str, calls: Sequence[TrackRecord]) -> Tensor:
    """`(T, B, ...)`, with zeros between calls and in lanes that a call lacked."""
    parts: list[Tensor] = []
    end = calls[0].start
    for call in calls:
        rows = call.gradients[leaf]
        if call.start > end:
            parts.append(rows.new_zeros(call.start - end, *rows.shape[1:]))
        parts.append(rows)
        end = call.start + len(rows)
    return side_by_side(parts)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate steps, with zeros in the lanes that a part lacks."""
    lanes = max(part.shape[1] for part in parts)
    padded: list[Tensor] = []
    for part in parts:
        missing = part.new_zeros(len(part), lanes - part.shape[1], *part.shape[2:])
        padded.append(torch.cat([part, missing], 1) if missing.shape[1] else part)
    return torch.cat(padded) if len(padded) > 1 else padded[0]


def vector_norms(gradient: Tensor, dims: int) -> Tensor:
    """The norm over all but the first `dims` dimensions.

    In double precision where the device has it, since squares of small numbers vanish in single.
    """
    flat = gradient.flatten(dims) if gradient.dim() > dims else gradient.unsqueeze(dims)
    kind = torch.complex128 if flat.is_complex() else real_type(flat)
    return torch.linalg.vector_norm(flat, dim=dims, dtype=kind)


def _share_a_lane(a: Tensor, b: Tensor) -> bool:
    """Whether some lane is equal in both, up to the rounding of two kernels, and not zero."""
    if a.shape != b.shape or a.dim() < 2:
        return False
    a, b = a.flatten(1), b.flatten(1)
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    largest = b.abs().amax(1)
    return bool((((a - b).abs().amax(1) <= tolerance * largest) & (largest > 0)).any())


@dataclass(frozen=True, eq=False)
class BackwardRecord:
    """One backward pass: the gradient norm of each state and gate, at each step, in each lane.

    Steps are counted from the first one that the pass reached. Names are `layer0.c`, and
    `layer0.c[17]` for one step.
    """

    tracks: dict[str, tuple[TrackRecord, ...]]  # one record for each run of the engine, in time

    @property
    def names(self) -> tuple[str, ...]:
        """Every state and gate with a gradient: `layer0.h`, `layer0.c`, `layer0.f` and so on."""
        return tuple(
            f"{name}.{leaf}" for name, records in self.tracks.items() for leaf in records[0].norms
        )

    def __getitem__(self, name: str) -> Tensor:
        """Gradient norms per lane: `(T, B)` for `layer0.c`, `(B,)` for `layer0.c[17]`.

        Raises:
            ConfigError: no such name, or no such step.
        """
        track, leaf, step = self._parsed(name)
        return _at(side_by_side([record.norms[leaf] for record in self.tracks[track]]), name, step)

    def tensor(self, name: str) -> Tensor:
        """The gradient itself: `(T, B, H)` for `layer0.c`, `(B, H)` for `layer0.c[17]`.

        Raises:
            ConfigError: no such name or step, or the trace keeps norms only.
        """
        track, leaf, step = self._parsed(name)
        parts = [record.gradients for record in self.tracks[track]]
        if not any(parts):
            raise ConfigError(
                f"'{name}': this trace keeps norms only; to have the gradients themselves,"
                " tt.trace(net, tensors=True)"
            )
        return _at(side_by_side([gradients[leaf] for gradients in parts]), name, step)

    def norms(self, name: str) -> Tensor:
        """Norms over all lanes, `(T,)`."""
        return self[name].square().sum(1).sqrt()

    def edges(self, name: str) -> dict[int, float]:
        """The gradient norm of each state that entered a call of the layer, by step, all lanes.

        Step 0 is the edge of the pass: the gradient that flows on into the past, or is cut. A cell
        is called at every step; it has the edges of the pass and of the segments of `tt.Exact`.
        Empty for a gate, for the backward direction of a layer, and for a cell of your own, whose
        entering state has no name.
        """
        track, leaf, _ = self._parsed(name)
        edges: dict[int, float] = {}
        first = 0
        for record in self.tracks[track]:
            for step, edge in record.edges.items():
                if leaf in edge:
                    edges[first + step - record.start] = vector_norms(
                        edge[leaf].flatten(), 0
                    ).item()
            first += len(record.norms[leaf])
        return edges

    def mean_retention_gate(self) -> dict[str, Tensor]:
        """The mean of the gate that scales the past, over steps and lanes, by layer, `(H,)`.

        That is f of an LSTM and z of a GRU. Other layers are left out.
        """
        sums = {name: _summed_gates(records) for name, records in self.tracks.items()}
        return {name: gates / count for name, (gates, count) in sums.items() if gates is not None}

    def _parsed(self, name: str) -> tuple[str, str, int | None]:
        match = STEP_NAME.fullmatch(name)
        if match is None or f"{match['track']}.{match['leaf']}" not in self.names:
            example = f"{self.names[0]}[0]" if self.names else "layer0.h[0]"
            raise ConfigError(
                f"no gradient of '{name}' was recorded; recorded are"
                f" {', '.join(self.names) or 'none'}, and '{example}'"
            )
        step = match["step"]
        return match["track"], match["leaf"], None if step is None else int(step)

    def precedes(self, later: "BackwardRecord") -> bool:
        """Whether this run and the first one of `later` are segments of the same pass.

        A segment starts from a state that requires a gradient, and one lane of that state left this
        run, which had changed it.
        """
        for name in self.tracks.keys() & later.tracks.keys():
            track, other = self.tracks[name][0], later.tracks[name][0]
            for state in track.after if other.from_graph else ():
                unchanged = any(_share_a_lane(before, state) for before in track.before)
                if not unchanged and any(_share_a_lane(entry, state) for entry in other.before):
                    return True
        return False

    def forget_states(self) -> None:
        """Free the states of the first run once it needs no further comparison."""
        for record, *_ in self.tracks.values():
            record.before.clear()
            record.after.clear()


def _at(steps: Tensor, name: str, step: int | None) -> Tensor:
    if step is None:
        return steps
    if not -len(steps) <= step < len(steps):
        raise ConfigError(f"'{name}': the pass has {len(steps)} steps, 0 to {len(steps) - 1}")
    return steps[step]


class History:
    """The last `keep` passes, and the runs in progress.

    Args:
        keep: the number of passes.
        tensors: whether gradients are kept besides their norms.
        sampler: notified of every backward pass.
    """

    def __init__(self, keep: int, tensors: bool, sampler: "PassSampler") -> None:
        self.tensors, self.sampler, self.count = tensors, sampler, 0
        self._passes = deque[BackwardRecord](maxlen=keep)
        # A run is held by its callback in the engine; a pass that fails leaves nothing behind.
        self._running: WeakValueDictionary[int, EngineRun] = WeakValueDictionary()
        self._lock = Lock()  # another thread may read while a pass ends

    def calls_of(self, track: "Track") -> dict[int, TrackRecord]:
        """The calls of a track in the engine's present run, by their first step."""
        self.sampler.note_backward()
        task = backward_task()
        run = self._running.get(task)
        if run is None:
            run = self._running[task] = EngineRun()
            engine: Any = Variable._execution_engine  # as DistributedDataParallel does
            engine.queue_callback(partial(self._finish, run))
        return run.setdefault(track, {})

    def passes(self) -> tuple[BackwardRecord, ...]:
        """The last ones, the oldest first."""
        with self._lock:
            return tuple(self._passes)

    def _finish(self, run: "EngineRun") -> None:
        """Put a run that has ended before the pass that it leads to, or begin a pass with it."""
        tracks: dict[str, tuple[TrackRecord, ...]] = {}
        with torch.no_grad():
            for track, calls in run.items():
                ordered = [calls[start] for start in sorted(calls)]
                tracks[track.name] = (TrackRecord.from_calls(track, ordered),)
        record = BackwardRecord(tracks)
        with self._lock:
            last = self._passes[-1] if self._passes else BackwardRecord({})
            joined = record.precedes(last)
            last.forget_states()
            if joined:
                for name, records in last.tracks.items():
                    tracks[name] = (*tracks.get(name, ()), *records)
                self._passes[-1] = record
            else:
                self.count += 1
                self._passes.append(record)


class EngineRun(dict["Track", dict[int, TrackRecord]]):
    """One run of the engine: the calls of each track, by their first step."""


@dataclass(eq=False)
class Track:
    """The steps of one layer, direction or cell.

    Attributes:
        name: `layer0`, `lstm.layer1`, `cell`.
        history: where its calls are recorded.
        all_edges: whether every call has an edge of its own; a cell has too many.
        steps: so far, with a graph.
    """

    name: str
    history: History
    all_edges: bool = False
    steps: int = 0

    def begin(self, steps: int) -> int:
        """The first step of a call of so many."""
        start = self.steps
        self.steps += steps
        return start

    def record(self, call: TrackRecord) -> None:
        """Add a call to the engine's present run."""
        self.history.calls_of(self)[call.start] = call


class PassSampler:
    """Which backward passes are traced: the first one of every `every`.

    The decision is taken at a forward pass after a backward pass has run, since one backward pass
    may need several forward calls. A forward call inside a backward pass is a checkpoint's
    recomputation; it follows the decision for that pass.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._index = 0
        self._in_update = False
        self._ended: int | None = None  # the task of a backward pass since the last decision
        self._recomputing = OUTSIDE  # the task in which the last recomputation took place

    @property
    def active(self) -> bool:
        """Whether the pass in progress is traced."""
        return self._index % self.every == 0

    def note_backward(self) -> None:
        """A backward pass is running."""
        self._ended = backward_task()

    def decide(self) -> bool:
        """Whether to trace a forward call made now."""
        if self.every == 1 or self._in_update:
            return self.active
        task = backward_task()
        outside = task == OUTSIDE
        if self._ended is not None and (outside or task not in (self._ended, self._recomputing)):
            self._index += 1
            self._ended = None
        if not outside:
            self._recomputing = task
        return self.active

    def begin_update(self) -> bool:
        """Whether to trace the update of `tt.updates` that comes."""
        self._in_update = True
        if self._ended is not None:
            self._index += 1
        return self.active

    def end_update(self, counts: bool) -> None:
        """The next forward call or update belongs to another pass, if an update was made."""
        self._in_update, self._ended = False, OUTSIDE if counts else None


def backward_task() -> int:
    """The number of the engine's present run; torch has no public name for it."""
    return torch._C._current_graph_task_id()


def is_batched(gradients: Iterable[Tensor | None]) -> bool:
    """Whether these are rows of a Jacobian (`is_grads_batched`), as `tt.RTRL` computes them.

    They are not the gradient of a loss.
    """
    module: Any = _functorch
    test = module.is_legacy_batchedtensor
    return any(test(gradient) for gradient in gradients if gradient is not None)
