"""Records of traced backward passes: norms by step and lane, of the last few passes.

A pass is one run of autograd's engine. `tt.Exact` makes several runs, one for each segment from the
last to the first. They are joined into one pass: the state after one run entered the run before it.

Shapes: `T` steps, `B` lanes, `H` size of a state or gate.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Variable

from throughtime.errors import ConfigError

STEP_NAME = re.compile(r"(?P<track>.+)\.(?P<leaf>[^.\[\]]+)(\[(?P<step>-?\d+)\])?")
OUTSIDE = -1  # torch's task id outside of a backward pass


@dataclass(eq=False)
class CallRecord:
    """The gradients of consecutive steps of one track, from one call of a layer or cell.

    Attributes:
        start: the first step, counted over all calls of the track.
        gradients: by leaf, `(T, B, ...)`, in the order of time.
        entering: by leaf, the gradient of the state entering the first step, `(B, ...)`.
        before: the state entering the first step.
        after: the state after the last step.
        from_graph: whether the state entering requires a gradient.
        gate_sum: the retention gate, summed over steps and lanes, `(H,)`.
        gate_count: the number of values in that sum.
    """

    start: int
    gradients: dict[str, Tensor]
    entering: dict[str, Tensor]
    before: list[Tensor]
    after: list[Tensor]
    from_graph: bool
    gate_sum: Tensor | None = None
    gate_count: int = 0


@dataclass(frozen=True, eq=False)
class TrackRecord:
    """All steps of one track in one run of the engine.

    Attributes:
        norms: by leaf, `(T, B)`. Steps without a gradient, and lanes that a call lacked, are zero.
        tensors: by leaf, `(T, B, H)`; empty where only norms are kept.
        edges: by step, then by leaf, the gradient norm of the state entering a call.
        gate_sum: see `CallRecord`.
        gate_count: see `CallRecord`.
        before: the state entering the first step.
        after: the state after the last step.
        from_graph: whether the state entering requires a gradient.
    """

    norms: dict[str, Tensor]
    tensors: dict[str, Tensor]
    edges: dict[int, dict[str, Tensor]]
    gate_sum: Tensor | None
    gate_count: int
    before: list[Tensor]
    after: list[Tensor]
    from_graph: bool

    @classmethod
    def from_calls(cls, track: "Track", calls: Sequence[CallRecord]) -> "TrackRecord":
        """Put calls, ordered by their steps, one after another."""
        first = calls[0]
        tensors = {leaf: _joined(leaf, calls) for leaf in first.gradients}
        edge_calls = calls if track.all_edges else calls[:1]
        gates = [call.gate_sum for call in calls if call.gate_sum is not None]
        return cls(
            {leaf: norms(gradient, 2) for leaf, gradient in tensors.items()},
            tensors if track.history.tensors else {},
            {
                call.start - first.start: {
                    leaf: norms(gradient.flatten(), 0) for leaf, gradient in call.entering.items()
                }
                for call in edge_calls
            },
            torch.stack(gates).sum(0) if gates else None,
            sum(call.gate_count for call in calls),
            first.before,
            calls[-1].after,
            first.from_graph,
        )

    @property
    def steps(self) -> int:
        """T."""
        return len(next(iter(self.norms.values())))


def _joined(leaf: str, calls: Sequence[CallRecord]) -> Tensor:
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
    if len(parts) == 1:
        return parts[0]
    lanes = max(part.shape[1] for part in parts)
    return torch.cat([padded(part, lanes, 1) for part in parts])


def padded(rows: Tensor, size: int, dim: int) -> Tensor:
    """The tensor with zeros up to `size` along one dimension."""
    missing = size - rows.shape[dim]
    if not missing:
        return rows
    shape = [*rows.shape[:dim], missing, *rows.shape[dim + 1 :]]
    return torch.cat([rows, rows.new_zeros(shape)], dim)


def norms(gradient: Tensor, dims: int) -> Tensor:
    """The norm over all but the first `dims` dimensions.

    In double precision where the device has it, since squares of small numbers vanish in single.
    """
    flat = gradient.flatten(dims) if gradient.dim() > dims else gradient.unsqueeze(dims)
    kind = torch.float64 if flat.device.type != "mps" else torch.float32
    if flat.is_complex():
        kind = torch.complex128
    return torch.linalg.vector_norm(flat, dim=dims, dtype=kind)


@dataclass(eq=False)
class RunRecord:
    """One run of the engine: first the calls of each track, then the record of each track."""

    calls: dict["Track", dict[int, CallRecord]] = field(
        default_factory=dict["Track", dict[int, CallRecord]]
    )
    tracks: dict[str, TrackRecord] = field(default_factory=dict[str, TrackRecord])

    def finish(self) -> None:
        """Turn calls into tracks."""
        for track, calls in self.calls.items():
            ordered = [calls[start] for start in sorted(calls)]
            self.tracks[track.name] = TrackRecord.from_calls(track, ordered)
        self.calls = {}

    def precedes(self, later: "RunRecord") -> bool:
        """Whether `later` is the next segment of the same pass.

        A segment starts from a state that requires a gradient, and one lane of that state left this
        run, which had changed it.
        """
        for name, track in self.tracks.items():
            other = later.tracks.get(name)
            if other is None or not other.from_graph:
                continue
            for state in track.after:
                unchanged = any(_share_a_lane(before, state) for before in track.before)
                if not unchanged and any(_share_a_lane(entry, state) for entry in other.before):
                    return True
        return False

    def forget_states(self) -> None:
        """Free the states once the run needs no further comparison."""
        for track in self.tracks.values():
            track.before.clear()
            track.after.clear()


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

    runs: tuple[RunRecord, ...]  # in the order of time

    @property
    def names(self) -> tuple[str, ...]:
        """Every state and gate with a gradient: `layer0.h`, `layer0.c`, `layer0.f` and so on."""
        names = [
            f"{name}.{leaf}"
            for run in self.runs
            for name, track in run.tracks.items()
            for leaf in track.norms
        ]
        return tuple(dict.fromkeys(names))

    def __getitem__(self, name: str) -> Tensor:
        """Gradient norms per lane: `(T, B)` for `layer0.c`, `(B,)` for `layer0.c[17]`.

        Raises:
            ConfigError: no such name, or no such step.
        """
        track, leaf, step = self._parsed(name)
        return _at(side_by_side([t.norms[leaf] for _, t in self._track(track)]), name, step)

    def tensor(self, name: str) -> Tensor:
        """The gradient itself: `(T, B, H)` for `layer0.c`, `(B, H)` for `layer0.c[17]`.

        Raises:
            ConfigError: no such name or step, or the trace keeps norms only.
        """
        track, leaf, step = self._parsed(name)
        parts = [t.tensors for _, t in self._track(track)]
        if not any(parts):
            raise ConfigError(
                f"'{name}': this trace keeps norms only; to have the gradients themselves,"
                " tt.trace(net, tensors=True)"
            )
        return _at(side_by_side([tensors[leaf] for tensors in parts]), name, step)

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
        return {
            start + step: edge[leaf].item()
            for start, record in self._track(track)
            for step, edge in record.edges.items()
            if leaf in edge
        }

    def mean_retention_gate(self) -> dict[str, Tensor]:
        """The mean of the gate that scales the past, over steps and lanes, by layer, `(H,)`.

        That is f of an LSTM and z of a GRU. Other layers are left out.
        """
        means: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for run in self.runs for name in run.tracks):
            records = [record for _, record in self._track(name)]
            sums = [record.gate_sum for record in records if record.gate_sum is not None]
            if sums:
                means[name] = torch.stack(sums).sum(0) / sum(r.gate_count for r in records)
        return means

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

    def _track(self, name: str) -> Iterator[tuple[int, TrackRecord]]:
        """The records of a track in all runs, each with its first step in the pass."""
        start = 0
        for run in self.runs:
            if name in run.tracks:
                yield start, run.tracks[name]
                start += run.tracks[name].steps


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
        self._running: WeakValueDictionary[int, RunRecord] = WeakValueDictionary()
        self._lock = Lock()  # another thread may read while a pass ends

    def calls_of(self, track: "Track") -> dict[int, CallRecord]:
        """The calls of a track in the engine's present run, by their first step."""
        self.sampler.note_backward()
        task = backward_task()
        run = self._running.get(task)
        if run is None:
            run = self._running[task] = RunRecord()
            engine: Any = Variable._execution_engine  # as DistributedDataParallel does
            engine.queue_callback(partial(self._finish, run))
        return run.calls.setdefault(track, {})

    def passes(self) -> tuple[BackwardRecord, ...]:
        """The last ones, the oldest first."""
        with self._lock:
            return tuple(self._passes)

    def _finish(self, run: RunRecord) -> None:
        """Put a run that has ended before the pass that it leads to, or begin a pass with it."""
        with torch.no_grad():
            run.finish()
        with self._lock:
            last = self._passes[-1] if self._passes else None
            if last is not None and run.precedes(last.runs[0]):
                last.runs[0].forget_states()
                self._passes[-1] = BackwardRecord((run, *last.runs))
                return
            if last is not None:
                last.runs[0].forget_states()
            self.count += 1
            self._passes.append(BackwardRecord((run,)))


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

    def record(self, call: CallRecord) -> None:
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
