"""Records of traced backward passes: norms by step and lane, of the last few passes.

A pass is one run of autograd's engine, with the runs inside it: a segment of `tt.Exact` or
`tt.rollout`, or a reentrant checkpoint, runs again in the backward pass, and then backward in a run
of its own. What a layer computes there belongs to the pass in which it was computed.

The calls of a layer are steps in the opposite order of the backward pass.

Shapes: `T` steps, `B` lanes (rows of the batch), `H` size of a state or gate.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import Variable
from torch.nn import functional

from throughtime._device import real_type
from throughtime.errors import ConfigError

OUTSIDE = -1  # torch's task id outside of a backward pass
ENTERING = -1  # the step of the state that enters a call
_NAME = re.compile(r"(.+?)(?:\[(-?\d+)\])?")


@dataclass(frozen=True, eq=False)
class BackwardRecord:
    """One backward pass: the gradient norm of each state and gate, at each step, in each lane.

    Steps are counted from the first one that the pass reached. Names are `layer0.c`, and
    `layer0.c[17]` for one step.
    """

    _norms: Mapping[str, Tensor]
    _tensors: Mapping[str, Tensor]
    _edges: Mapping[str, Mapping[int, Tensor]]
    _gates: Mapping[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """Every state and gate with a gradient: `layer0.h`, `layer0.c`, `layer0.f` and so on."""
        return tuple(self._norms)

    def __getitem__(self, name: str) -> Tensor:
        """Gradient norms per lane: `(T, B)` for `layer0.c`, `(B,)` for `layer0.c[17]`.

        Raises:
            ConfigError: no such name, or no such step.
        """
        return self._steps(self._norms, name)

    def tensor(self, name: str) -> Tensor:
        """The gradient itself: `(T, B, H)` for `layer0.c`, `(B, H)` for `layer0.c[17]`.

        Raises:
            ConfigError: no such name or step, or the trace keeps norms only.
        """
        self[name]
        if not self._tensors:
            raise ConfigError(
                f"'{name}': this trace keeps norms only; to have the gradients themselves,"
                " tt.trace(net, tensors=True)"
            )
        return self._steps(self._tensors, name)

    def norms(self, name: str) -> Tensor:
        """Norms over all lanes, `(T,)`."""
        return self[name].square().sum(1).sqrt()

    def edges(self, name: str) -> dict[int, float]:
        """The gradient norm of each state that entered a call of the layer, by step, all lanes.

        Step 0 is the edge of the pass: the gradient that flows on into the past, or is cut. A cell
        is called at every step; it has the edge of the pass only. Empty for a gate, for the
        backward direction of a layer, and for a cell of your own, whose entering state has no name.
        """
        self[name]
        edges = self._edges.get(name, {})
        return {step: edge.square().sum().sqrt().item() for step, edge in edges.items()}

    def mean_retention_gate(self) -> dict[str, Tensor]:
        """The mean of the gate that scales the past, over steps and lanes, by layer, `(H,)`.

        That is f of an LSTM and z of a GRU. Other layers are left out.
        """
        return dict(self._gates)

    def _steps(self, values: Mapping[str, Tensor], name: str) -> Tensor:
        """All steps of a name, or one."""
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in self._norms:
            example = f"{self.names[0]}[0]" if self.names else "layer0.h[0]"
            raise ConfigError(
                f"no gradient of '{name}' was recorded; recorded are"
                f" {', '.join(self.names) or 'none'}, and '{example}'"
            )
        steps = values[match[1]]
        if match[2] is None:
            return steps
        if not -len(steps) <= int(match[2]) < len(steps):
            raise ConfigError(f"'{name}': the pass has {len(steps)} steps, 0 to {len(steps) - 1}")
        return steps[int(match[2])]


class EngineRun(dict["TracedCall", dict[tuple[str, int], Tensor]]):
    """One run of the engine: of each call, the last one first, values by leaf and step."""


@dataclass(frozen=True, eq=False)
class Track:
    """The steps of one layer in one direction, or of a cell.

    Attributes:
        name: `layer0`, `lstm.layer1`, `cell`.
        history: where its calls are recorded.
        reverse: whether its steps run from the last to the first.
        layer: whether it belongs to a layer, whose every call has an edge; a cell has too many.
    """

    name: str
    history: "History"
    reverse: bool = False
    layer: bool = False


class TracedCall:
    """One call of a layer in one direction, or of a cell.

    Args:
        track: what is called.
        steps: of the call.
        values: of one step, by state and gate, `(B, H)`.
        order: puts the lanes back into the caller's order.

    Attributes:
        gates: the retention gate of every step and lane, `(N, H)`.
    """

    def __init__(
        self, track: Track, steps: int, values: Mapping[str, Tensor], order: Tensor | None = None
    ) -> None:
        self.track, self.steps, self._order = track, steps, order
        self.values = {leaf: value.detach() for leaf, value in values.items()}
        self.gates: Tensor | None = None
        # what is computed in a backward pass belongs to it
        self._run = None if backward_task() == OUTSIDE else track.history.run()

    def watch(self, leaf: str, step: int, tensor: Tensor) -> None:
        """Record the gradient of a tensor whenever there is one."""
        if tensor.requires_grad:
            tensor.register_hook(partial(self._note, leaf, step))

    def _note(self, leaf: str, step: int, gradient: Tensor | None) -> None:
        if gradient is not None and not is_batched(gradient):
            run, history = self._run, self.track.history
            run = history.run() if run is None else run
            run.setdefault(self, {})[leaf, step] = history.kept(gradient, step == ENTERING)

    def in_time(self, leaf: str, kept: Mapping[tuple[str, int], Tensor], lanes: int) -> Tensor:
        """What is kept of a state or gate at all steps, `(T, B, ...)`; zeros where none came."""
        zero = self.track.history.kept(torch.zeros_like(self.values[leaf]))
        rows = torch.stack([kept.get((leaf, t), zero) for t in range(self.steps)])
        rows = rows.flip(0) if self.track.reverse else rows
        rows = rows if self._order is None else rows[:, self._order]
        return functional.pad(rows, [0, 0] * (rows.dim() - 2) + [0, lanes - rows.shape[1]])


class History:
    """The last `keep` passes, the runs in progress, and which passes are traced.

    That is the first one of every `every`. The decision is taken at a forward pass after a backward
    pass has run, since one backward pass may need several forward calls. A forward call inside a
    backward pass is a recomputation; it follows the decision for that pass.

    Args:
        keep: the number of passes.
        tensors: whether gradients are kept besides their norms.
        every: trace one pass in so many.

    Attributes:
        count: passes traced so far.
        passes: the last ones; replaced whole, since another thread may read it.
        ended: the task of a backward pass since the last decision.
        fixed: whether the decision is that for an update of `tt.updates`.
    """

    def __init__(self, keep: int, tensors: bool, every: int) -> None:
        self.keep, self.tensors, self.every, self.count, self.index = keep, tensors, every, 0, 0
        self.passes: tuple[BackwardRecord, ...] = ()
        self.ended: int | None = None
        self.fixed = False
        # A run is held by its callback in the engine; a pass that fails leaves nothing behind.
        self._running: WeakValueDictionary[int, EngineRun] = WeakValueDictionary()

    def decide(self) -> bool:
        """Whether to trace what is computed now."""
        task = backward_task()
        if not self.fixed and self.ended is not None and (task == OUTSIDE or task != self.ended):
            self.index, self.ended = self.index + 1, None
        return self.index % self.every == 0

    def note_backward(self, outer: int, gradient: Tensor | None) -> None:
        """A backward pass of what was not traced; `outer` is the one that computed it, if any."""
        if gradient is not None and not is_batched(gradient):
            self.ended = backward_task() if outer == OUTSIDE else outer

    def run(self) -> EngineRun:
        """The engine's present run."""
        task = self.ended = backward_task()
        run = self._running.get(task)
        if run is None:
            run = self._running[task] = EngineRun()
            engine: Any = Variable._execution_engine  # as DistributedDataParallel does
            engine.queue_callback(partial(self._finish, run))
        return run

    def kept(self, gradient: Tensor, edge: bool = False) -> Tensor:
        """What is kept of a gradient `(B, ...)`: itself, or its norms."""
        with torch.no_grad():
            plain = self.tensors and not edge
            return gradient.detach() if plain else vector_norms(gradient, 1)

    def _finish(self, run: EngineRun) -> None:
        """Record a run that has ended."""
        tracks: dict[Track, list[TracedCall]] = {}
        for call in run:
            tracks.setdefault(call.track, []).insert(0, call)
        norms, plain, gates = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        edges: dict[str, dict[int, Tensor]] = {}
        for track, calls in tracks.items():
            lanes = max(len(value) for call in calls for value in call.values.values())
            for leaf in calls[0].values:
                name, step = f"{track.name}.{leaf}", 0
                plain[name] = torch.cat([call.in_time(leaf, run[call], lanes) for call in calls])
                norms[name] = vector_norms(plain[name], 2) if self.tensors else plain[name]
                for call in calls if track.layer else calls[:1]:
                    if (leaf, ENTERING) in run[call]:
                        edges.setdefault(name, {})[step] = run[call][leaf, ENTERING]
                    step += call.steps
            kept = [call.gates for call in calls if call.gates is not None]
            if kept:
                gates[track.name] = torch.cat(kept).mean(0)
        run.clear()
        if norms:
            record = BackwardRecord(norms, plain if self.tensors else {}, edges, gates)
            self.count, self.passes = self.count + 1, (*self.passes, record)[-self.keep :]


def vector_norms(gradient: Tensor, dims: int) -> Tensor:
    """The norm over all but the first `dims` dimensions.

    In double precision where the device has it, since squares of small numbers vanish in single.
    """
    flat = gradient.reshape(*gradient.shape[:dims], -1)
    kind = torch.complex128 if flat.is_complex() else real_type(flat)
    return torch.linalg.vector_norm(flat, dim=dims, dtype=kind)


def backward_task() -> int:
    """The number of the engine's present run; torch has no public name for it."""
    return torch._C._current_graph_task_id()


def is_batched(gradient: Tensor) -> bool:
    """Whether these are rows of a Jacobian (`is_grads_batched`), not the gradient of a loss."""
    module: Any = _functorch
    return module.is_legacy_batchedtensor(gradient)
