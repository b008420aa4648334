"""A slice of a stream for measurements, and passes back through it that change the credit.

The credit of a step is the gradient of later losses with respect to the state that enters it. A
slice is run once, in segments that run again on the way back (`gradient/segment.py`), so all passes
back belong to the same random numbers. Reading a slice does not advance the stream.

Shapes: `T` steps, `B` lanes (rows of the batch).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried, device_of, dtype_of, pack, require_carried
from throughtime.chunk import Chunk, Placement
from throughtime.errors import DataError
from throughtime.gradient import Objective
from throughtime.gradient.segment import (
    MOST_BYTES,
    TRIAL_STEPS,
    Rebuild,
    Replay,
    Segment,
    flatten,
    graph_bytes,
)
from throughtime.gradient.window import Credit, check_whole
from throughtime.state import State
from throughtime.stream import Stream


class StreamSlice:
    """The first steps of an epoch, and the state entering them.

    Args:
        net: made by `tt.carry`.
        stream: the stream.
        steps: how many, at most; None: all.
        objective: the loss, whose targets are placed as well.

    Attributes:
        steps: the number of steps.
        state: the initial one; it may be learned.
        placement: of the net and the loss.
    """

    def __init__(
        self, net: Carried, stream: Stream, steps: int | None, objective: Objective | None = None
    ) -> None:
        require_carried(net)
        # users do pass lists of chunks
        if not isinstance(stream, Stream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"got a {type(stream).__name__}, expected a tt.Stream: a measurement needs"
                " random access to the steps"
            )
        self.steps = stream.steps if steps is None else min(steps, stream.steps)
        check_whole("steps", self.steps, 1)
        plain = Placement(device_of(net), dtype_of(net))
        self._stream, self.placement = stream, objective.placement(net) if objective else plain
        first = self.read(0, 1)
        self.state = net.initial_state(first.lanes, like=first.inputs)
        if objective is not None:
            objective.bind(net.adapter.unpack)

    def read(self, start: int, stop: int) -> Chunk:
        """The steps from `start` to before `stop`."""
        return self._stream.read(start, stop).convert(self.placement)


def run_spans(
    net: Carried,
    read: Callable[[int, int], Chunk],
    edges: Sequence[int],
    state: State,
    hook: Callable[[int, State], State] = lambda _, state: state,
) -> Iterator[tuple[Chunk, Tensor, State]]:
    """The rows, the outputs and the last state of the steps between each two edges.

    `hook(step, state)` replaces the state that enters at an edge.
    """
    for begin, stop in pairwise(edges):
        rows = read(begin, stop)
        resets = rows.resets if rows.any_reset else None
        y, state = net(rows.inputs, hook(begin, state), resets)
        yield rows, pack(y), state


class CreditGate(torch.autograd.Function):
    """`CreditGate.apply(values, gate, *sources)`: values, each giving its source the gradient.

    `gate` maps these gradients, or is None. Sources beyond the values get none: they let the engine
    come here for their sake.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Sequence[Tensor], gate: Any, *sources: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gate, ctx.others = gate, len(sources) - len(values)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *credit: Tensor | None) -> tuple[Tensor | None, ...]:
        mapped = credit if ctx.gate is None else ctx.gate(credit)
        return None, None, *mapped, *[None] * ctx.others


class CreditPass:
    """A forward pass over steps, for any number of passes back.

    Args:
        net: made by `tt.carry`.
        loss: of outputs and the steps that they belong to: a mean, and its weight among others.
        read: reads the steps from one to before another.
        steps: how many.
        state: entering the first one.
        weights: that get a gradient.
        cuts: steps at which `gate` gets the credit; calls of the net are split there.
        begins: steps at which losses are told apart.
        chunk: steps per segment; None: as many as have a graph of 512 MB.
        each: steps whose loss is not split; `begins` are multiples of it, and so is a segment.

    Attributes:
        losses: of each span whose loss is told apart, the sum over its valid steps, with a graph.
        counts: by the first step of each span, the weight of its mean loss among others.
        gate: `gate(step, credit)` returns the credit that crosses a cut, for each leaf of the
            state.
    """

    def __init__(
        self,
        net: Carried,
        loss: Callable[[Tensor, Chunk], tuple[Tensor, float]],
        read: Callable[[int, int], Chunk],
        steps: int,
        state: State,
        weights: Iterable[Tensor],
        cuts: Iterable[int],
        begins: Iterable[int] = (),
        chunk: int | None = None,
        each: int = 1,
    ) -> None:
        few = read(0, min(steps, TRIAL_STEPS))
        if chunk is None:
            trial = partial(net, few.inputs, trees.detach(state))
            chunk = max(1, min(steps, int(MOST_BYTES / graph_bytes(net, few, trial))))
        check_whole("chunk", chunk, 1)
        chunk = max(each, chunk // each * each)
        self._net, self._loss, self._read = net, loss, read
        # whose gradient the engine is asked for: it comes to every gate, of a frozen net as well
        self._sources = [torch.zeros(1, device=few.inputs.device, requires_grad=True), *weights]
        edges = [*range(0, steps, chunk), steps]
        self._cuts, self._begins = {*edges, *cuts}, sorted({*edges, *begins})
        self.counts: dict[int, float] = {}
        self.gate: Callable[[int, Credit], Credit] = lambda _, credit: credit
        replay, losses = Replay(net, self._sources, few.inputs.device), list[Tensor]()
        after, self._rebuild = flatten(state)
        for begin, stop in pairwise(edges):
            run = partial(self._run, begin, stop, self._rebuild)
            if stop == steps:  # it would be the first to run again
                part, *after = run(*after)
            else:
                inputs = *after, *replay.inputs
                part, *after = Segment.apply(run, (begin, stop), replay, None, len(after), *inputs)
            losses.append(part)
        self.losses = torch.cat(losses)

    def _run(
        self, first: int, last: int, rebuild: Rebuild, *entering: Tensor
    ) -> tuple[Tensor, ...]:
        """The losses of a segment, and the state after it, leaf by leaf."""
        rows, outputs, losses = self._read(first, last), list[Tensor](), list[Tensor]()
        edges = sorted(cut for cut in self._cuts if first <= cut <= last)
        state, own = rebuild(entering), lambda a, b: rows[a - first : b - first]
        for _, y, after in run_spans(self._net, own, edges, state, self._gated):
            outputs.append(y)
            state = after
        y = torch.cat(outputs)
        for begin, stop in pairwise(self._begins[self.span(first, last + 1)]):
            part = slice(begin - first, stop - first)
            loss, self.counts[begin] = self._loss(y[part], rows[part])
            losses.append(loss * self.counts[begin])
        leaves, self._rebuild = flatten(state)
        return torch.stack(losses), *leaves

    def _gated(self, begin: int, state: State) -> State:
        """The state entering a step, with the gate between it and the steps before."""
        leaves, rebuild = flatten(state)
        own = (*leaves, self._sources[0])
        return rebuild(CreditGate.apply(leaves, lambda credit: self.gate(begin, credit), *own))

    def span(self, start: int, stop: int) -> slice:
        """The indices of the spans between two steps."""
        return slice(bisect_left(self._begins, start), bisect_left(self._begins, stop))

    def gradients(self, root: Tensor) -> Sequence[Tensor | None]:
        """The gradient of each weight, by a pass back from a scalar."""
        with torch.autocast(root.device.type, enabled=False):
            grads = torch.autograd.grad(root, self._sources, retain_graph=True, allow_unused=True)
        return grads[1:]
