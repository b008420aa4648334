"""The forward pass over segments, and its checkpointed replay.

    forward:    s_0 -> s_1 -> ... -> s_n          states at the boundaries stored, nothing else
    backward:   for i = n-1 ... 0:  run segment i again from s_i, with a graph
                (g, a_i) += vector-Jacobian products of its loss, and of s_{i+1} with a_{i+1}

The cotangent a_i is the gradient of all later losses with respect to s_i. The sum of the g is the
gradient of plain autograd over all steps, in the memory of one segment and the stored states. The
last segment runs once. Cost per step: two forward passes and one backward pass (4/3 of plain
autograd, if a backward pass costs two forward passes). `_backward.py` has the backward pass.

References: T. Chen et al., Training deep nets with sublinear memory cost (2016); A. Gruslys et al.,
Memory-efficient backpropagation through time, NeurIPS 2016; A. Griewank and A. Walther, Revolve,
ACM TOMS 26 (2000).

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime._device import fork_rng, real_type
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, ModelError
from throughtime.gradient._memory import (
    BoundaryStates,
    Offload,
    RngSnapshots,
    preserve_rng_and_buffers,
)
from throughtime.state import State

Cotangents: TypeAlias = Sequence[Tensor | None]  # one for each leaf of a state
Verify: TypeAlias = Literal["first", "all", "off"]


@dataclass(eq=False)
class CreditGate:
    """A step at which the gradient of the state is multiplied: by zero (cut), one, or more.

        forward:  s -> s          backward:  a -> factor * a

    The factor is read when gradients flow, so one graph serves several truncations in turn.

    Attributes:
        factor: multiplies the cotangents of the state.
        watch: called with the cotangent of every leaf as it arrives, in their order.
    """

    factor: float = 1.0
    watch: Callable[[Cotangents], None] | None = None

    def __call__(self, state: State) -> State:
        """The same state, its gradient passing this gate."""
        if self.watch is not None and torch.is_grad_enabled():
            # a leaf without a graph has a gradient, too
            state = trees.map_leaves(
                lambda leaf: leaf if leaf.requires_grad else _as_leaf(leaf), state
            )
        active = [leaf.requires_grad for leaf in trees.tensors(state)]
        if not any(active):
            return state
        leaves = [leaf for leaf in trees.tensors(state) if leaf.requires_grad]
        passed = iter(_PassGate.apply(self, active, *leaves))
        return trees.map_leaves(lambda leaf: next(passed) if leaf.requires_grad else leaf, state)


class _PassGate(torch.autograd.Function):
    """The identity, except for its gradient."""

    @staticmethod
    def forward(ctx: Any, gate: CreditGate, active: list[bool], *leaves: Tensor) -> Any:
        ctx.gate, ctx.active = gate, active
        ctx.set_materialize_grads(False)
        return tuple(leaf.clone() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        factor = ctx.gate.factor
        if ctx.gate.watch is not None:
            rest = iter(cotangents)
            ctx.gate.watch([next(rest) if active else None for active in ctx.active])
        if factor == 0:
            return None, None, *[None] * len(cotangents)
        return None, None, *(a if a is None or factor == 1 else a * factor for a in cotangents)


def _as_leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(trees.differentiable(value))


def forward(
    net: Carried,
    chunk: Chunk,
    state: State,
    bounds: Sequence[int] | None = None,
    *,
    graph_from: int = 0,
    gates: Mapping[int, Callable[[State], State]] | None = None,
    inputs: Tensor | None = None,
) -> Iterator[tuple[Tensor, State]]:
    """The outputs of each segment of a chunk, and the state after it.

    Args:
        net: made by `tt.carry`; it splits its calls at resets, and nothing else does.
        chunk: the steps.
        state: the state entering the first of them.
        bounds: where segments begin and end, in steps of the chunk; default: one segment.
        graph_from: segments that begin before this step run without a graph.
        gates: by the step that the state enters.
        inputs: in place of those of the chunk.
    """
    inputs = chunk.inputs if inputs is None else inputs
    autocast = torch.is_autocast_enabled(inputs.device.type)
    for start, stop in pairwise(bounds or (0, chunk.steps)):
        if gates and start in gates:
            state = gates[start](state)
        part = chunk[start:stop]
        if autocast and start in (0, graph_from):
            # the cache may hold weights of another moment, or casts made without a graph
            torch.clear_autocast_cache()
        rows = inputs if part is chunk else inputs[start:stop]
        resets = part.resets if part.any_reset else None
        if start >= graph_from:
            y, state = net(rows, state, resets)
        else:
            with torch.no_grad():
                y, state = net(rows, state, resets)
        yield y, state


def run_chunk(net: Carried, chunk: Chunk, state: State) -> tuple[Tensor, State]:
    """The outputs of a chunk in one segment, and the state after it."""
    inputs = chunk.inputs
    if torch.is_autocast_enabled(inputs.device.type):
        torch.clear_autocast_cache()
    return net(inputs, state, chunk.resets if chunk.any_reset else None)


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive steps with their graph.

    Attributes:
        index: its number in the pass, from 0.
        chunk: its steps.
        inputs: their inputs, a leaf of the graph if their gradient is needed.
        outputs: `(T, B, C)`.
        before: the state entering its first step.
        after: the state after its last step.
    """

    index: int
    chunk: Chunk
    inputs: Tensor
    outputs: Tensor
    before: State
    after: State


def run_segment(net: Carried, chunk: Chunk, state: State) -> Segment:
    """Run a chunk with a graph that begins at the entering state.

    Args:
        net: made by `tt.carry`.
        chunk: the steps.
        state: the state entering the first of them; `None` for the initial state, with its graph.
    """
    with torch.enable_grad():
        if state is None:
            before = net.initial_state(chunk.lanes, like=chunk.inputs)
        else:
            before = trees.map_leaves(_as_leaf, state)
        y, after = run_chunk(net, chunk, before)
    return Segment(0, chunk, chunk.inputs, y, before, after)


class CheckpointedPass:
    """A pass over segments: `forward` once, then `backward` as often as needed.

    Args:
        net: made by `tt.carry`.
        bounds: where segments begin and end, as `schedule.pieces` returns them.
        read: returns the steps between two bounds again.
        start: the state entering the first step; `None` for the initial state, with its graph.
        offload: where the states between segments are stored.
        verify: which of the recomputed states are compared with those of the forward pass.
        gates: by the step that the state enters.
        input_grads: whether gradients of the inputs are needed.
    """

    def __init__(
        self,
        net: Carried,
        bounds: Sequence[int],
        read: Callable[[int, int], Chunk],
        start: State,
        *,
        offload: Offload = None,
        verify: Verify = "first",
        gates: Mapping[int, CreditGate] | None = None,
        input_grads: bool = False,
    ) -> None:
        self.net, self.bounds, self._read, self._start = net, bounds, read, start
        self._verify, self._gates, self._input_grads = verify, gates or {}, input_grads
        self._gate_steps = sorted(self._gates)
        self._states = BoundaryStates(len(bounds), offload)
        self._sums: dict[int, Tensor] = {}  # of the outputs of the segments to be compared
        self._last: Segment | None = None
        self._snapshots: RngSnapshots | None = None

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def forward(
        self, chunks: Iterable[Chunk], *, graph: bool = True
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Run every segment, the last one with its graph unless `graph` is false.

        Yields the chunk and the outputs of each.
        """
        state = self._start
        for index, chunk in enumerate(chunks):
            if index == 0:
                self._snapshots = RngSnapshots(self.net, chunk.inputs.device)
                self._snapshots.take()  # before the initial state, which may be drawn
                state = trees.detach(self._initial(chunk) if state is None else state)
                self._states.put(0, state)
            else:
                self._store(index, state)
            if graph and index == len(self) - 1:
                self._last = self._run(index, chunk)
                y, state = self._last.outputs, self._last.after
            else:
                with torch.no_grad():
                    y, state = self._forward_segment(index, chunk, chunk.inputs, state)
                if self._verify == "all" or (self._verify == "first" and index >= len(self) - 2):
                    self._sums[index] = _total(y)
            yield chunk, y
        self._store(len(self), state)

    def gates(self, index: int) -> dict[int, CreditGate]:
        """The gates within a segment, or at its beginning."""
        bounds = self.bounds[index : index + 2]
        first, last = (bisect_left(self._gate_steps, bound) for bound in bounds)
        return {step: self._gates[step] for step in self._gate_steps[first:last]}

    def _initial(self, chunk: Chunk) -> State:
        return self.net.initial_state(chunk.lanes, like=chunk.inputs)

    def _store(self, index: int, state: State) -> None:
        self._states.put(index, state)
        self._rng.take()

    @property
    def _rng(self) -> RngSnapshots:
        if self._snapshots is None:
            raise RuntimeError("the forward pass has not been run yet")
        return self._snapshots

    @property
    def state(self) -> State:
        """The state after the last step, detached."""
        return self._states.get(len(self))

    def backward(self) -> Iterator[Segment]:
        """The segments with their graphs, from the last to the first.

        Each graph must be released before the next one is asked for.
        """
        last, self._last = self._last, None
        recomputed = len(self) if last is None else len(self) - 1
        if last is not None:
            yield last
            del last
        with preserve_rng_and_buffers(self.net, self._rng.device):
            for index in reversed(range(recomputed)):
                self._rng.restore(index)
                segment = self._run(index, self._read(self.bounds[index], self.bounds[index + 1]))
                if self._verify == "all" or (self._verify == "first" and index == recomputed - 1):
                    self._compare(index, segment.chunk, segment.outputs, segment.after)
                yield segment
                del segment

    def _run(self, index: int, chunk: Chunk) -> Segment:
        inputs = chunk.inputs.detach().requires_grad_() if self._input_grads else chunk.inputs
        with torch.enable_grad():
            if index == 0 and self._start is None:
                before = self._initial(chunk)
            else:
                before = trees.map_leaves(
                    lambda leaf: leaf.requires_grad_(trees.differentiable(leaf)),
                    self._states.get(index),
                )
            y, after = self._forward_segment(index, chunk, inputs, before)
        return Segment(index, chunk, inputs, y, before, after)

    def _forward_segment(
        self, index: int, chunk: Chunk, inputs: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """Run from gate to gate.

        Without a graph too, since a net may draw random numbers once for each call.
        """
        begin, end = self.bounds[index : index + 2]
        gates = {step - begin: gate for step, gate in self.gates(index).items()}
        bounds = sorted({0, *gates, end - begin})
        outputs: list[Tensor] = []
        after = state
        steps = forward(self.net, chunk, state, bounds, gates=gates, inputs=inputs)
        for y, after in steps:  # noqa: B007  # the last state is returned
            outputs.append(y)
        return join_outputs(outputs), trees.arranged(after, state)

    def _compare(self, index: int, chunk: Chunk, outputs: Tensor, after: State) -> None:
        """Refuse a forward pass that does not repeat: gradient and loss would not belong together.

        Kernels that keep a graph may round differently, and a chaotic net amplifies that. So
        a difference is checked once more without a graph, as in the first run.
        """
        if self._difference(index, outputs, after) is None:
            return
        with fork_rng(self._rng.device), torch.no_grad():
            self._rng.restore(index)
            state = self._states.get(index)
            outputs, after = self._forward_segment(index, chunk, chunk.inputs, state)
        difference = self._difference(index, outputs, after)
        if difference is not None:
            raise ModelError(_not_repeated(*difference, *self.bounds[index : index + 2]))

    def _difference(self, index: int, outputs: Tensor, after: State) -> tuple[str, float] | None:
        """A difference to the forward pass, and its size."""
        outputs = outputs.detach()
        # the last segment ran with its graph and was not summed
        first_sum = self._sums.get(index, _total(outputs))
        names, errors = ["the sum of the outputs"], [(_total(outputs) - first_sum).abs()]
        allowed = tolerance(outputs) * wide(outputs.abs()).sum().clamp(min=1.0)
        wrong = [first_sum.isfinite() & ~(errors[0] <= allowed)]
        stored = dict(trees.leaves(self._states.get(index + 1)))
        for name, leaf in trees.leaves(after):
            if not leaf.numel():
                continue
            size, error = wide(stored[name].abs()), wide((leaf.detach() - stored[name]).abs()).max()
            names.append(f"leaf '{name}' of the state")
            errors.append(error)
            # the gradient check reports values that are not finite
            exceeds = ~(error <= tolerance(leaf) * size.max().clamp(min=1.0))
            wrong.append(size.isfinite().all() & exceeds)
        flags = torch.stack(wrong)
        if not bool(flags.any()):  # a device is waited for once
            return None
        first = flags.tolist().index(True)
        return names[first], errors[first].item()


def join_outputs(outputs: Sequence[Tensor]) -> Tensor:
    """The outputs of several segments, in order."""
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))


def _total(y: Tensor) -> Tensor:
    return wide(y.detach()).sum()


def _not_repeated(name: str, difference: float, start: int, stop: int) -> str:
    return (
        f"the forward pass does not repeat: run again, steps {start} to {stop - 1} of the stretch"
        f" differ by {difference:.2g} in {name}. Something it depends on has changed in between:"
        " random numbers from Python or NumPy (draw them from torch), a counter or cache in an"
        " attribute (keep it in the state or in a buffer), data that read differently, or cuDNN's"
        " own dropout between layers (use nn.Dropout). Where the difference is intended,"
        " verify='off'."
    )


def check_verify(verify: str) -> None:
    """Refuse an unknown setting."""
    if verify not in ("first", "all", "off"):
        raise ConfigError(f"verify={verify!r}: expected 'first', 'all' or 'off'")


def tolerance(leaf: Tensor) -> float:
    """The relative difference that rounding may cause between two runs of one kernel.

    The memory of the two runs may be aligned differently.
    """
    kinds = [leaf.dtype] if trees.differentiable(leaf) else [torch.float64]
    if torch.is_autocast_enabled(leaf.device.type):
        kinds.append(torch.get_autocast_dtype(leaf.device.type))
    return max(torch.finfo(kind).eps for kind in kinds) ** 0.5


def wide(values: Tensor) -> Tensor:
    """The values in double precision, where the device has it."""
    kind = real_type(values)
    return values.to(kind.to_complex() if values.is_complex() else kind)


@contextmanager
def no_autocast(like: Tensor) -> Generator[None]:
    """Leave autocast: a backward pass runs outside it, as torch recommends."""
    if torch.is_autocast_enabled(like.device.type):
        with torch.autocast(like.device.type, enabled=False):
            yield
    else:
        yield
