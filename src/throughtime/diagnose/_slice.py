"""A slice of a stream for measurements, and passes back through it that change the credit.

The credit of a step is the gradient of later losses with respect to the state that enters it. A
slice is run once, in segments that run again on the way back (`gradient/segment.py`), so all passes
back belong to the same random numbers. Reading a slice does not advance the stream.

Shapes: `T` steps, `B` lanes (rows of the batch).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried, require_carried
from throughtime.chunk import Chunk, Placement
from throughtime.errors import DataError, MissingExtraError
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


@dataclass(frozen=True, eq=False)
class StreamSlice:
    """Consecutive steps of a stream, and the state entering them.

    Attributes:
        stream: the stream.
        begin: the first step of the slice, counted from the start of the epoch.
        steps: the number of steps.
        state: the state before the first step; the initial one may be learned.
        placement: of the net and the loss.
    """

    stream: Stream
    begin: int
    steps: int
    state: State
    placement: Placement

    @classmethod
    def of(
        cls,
        net: Carried,
        stream: Stream,
        steps: int | None,
        state: State,
        objective: Objective,
    ) -> "StreamSlice":
        """From the stream's position if `state` is passed, else from the start of the epoch."""
        require_carried(net)
        # users do pass lists of chunks
        if not isinstance(stream, Stream):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"got a {type(stream).__name__}, expected a tt.Stream: a measurement needs"
                " random access to the steps"
            )
        if steps is not None:
            check_whole("steps", steps, 1)
        begin = 0 if state is None else stream.position
        left = stream.steps - begin
        if left < 1:
            raise DataError(
                "the stream is at the end of its epoch and a state was passed: no steps are left to"
                " measure"
            )
        placement = objective.placement(net)
        if state is None:
            first = stream.read(0, 1).convert(placement)
            state = net.initial_state(first.lanes, like=first.inputs)
        return cls(stream, begin, min(steps or left, left), state, placement)

    def read(self, start: int, stop: int) -> Chunk:
        """The steps from `start` to before `stop` of the slice."""
        return self.stream.read(self.begin + start, self.begin + stop).convert(self.placement)


class CreditGate(torch.autograd.Function):
    """`CreditGate.apply(values, gate, *sources)`: values, each with the gradient of its source.

    `gate` maps these gradients, or is None. Sources beyond the values get none: they let the engine
    come here for their sake.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Sequence[Tensor], gate: Any, *sources: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gate, ctx.others = gate, len(sources) - len(values)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *credit: Tensor | None) -> tuple[Tensor | None, ...]:
        mapped = credit if ctx.gate is None else ctx.gate(credit)
        return None, None, *mapped, *[None] * ctx.others


class CreditPass:
    """A forward pass over steps, for any number of passes back.

    Args:
        net: made by `tt.carry`.
        objective: the loss.
        read: reads the steps from one to before another.
        steps: how many.
        state: entering the first one.
        weights: that get a gradient.
        cuts: steps at which `gate` gets the credit; calls of the net are split there.
        begins: other steps at which losses are told apart.
        chunk: steps per segment; None: as many as have a graph of 512 MB.

    Attributes:
        begins: the first step of each span whose loss is told apart.
        losses: of each span, the sum over its valid steps, with a graph.
        counts: of each span, the weight of its mean loss among others.
        after: the leaves of the state after the last step.
        gate: `gate(step, credit)` returns the credit that crosses a cut.
    """

    def __init__(
        self,
        net: Carried,
        objective: Objective,
        read: Callable[[int, int], Chunk],
        steps: int,
        state: State,
        weights: Iterable[Tensor],
        cuts: Iterable[int],
        begins: Iterable[int] = (),
        chunk: int | None = None,
    ) -> None:
        few = read(0, min(steps, TRIAL_STEPS))
        if chunk is None:
            trial = partial(net, few.inputs, trees.detach(state))
            chunk = max(1, min(steps, int(MOST_BYTES / graph_bytes(net, few, trial))))
        check_whole("chunk", chunk, 1)
        self._net, self._objective, self._read = net, objective, read
        # whose gradient the engine is asked for: it comes to every gate, of a frozen net as well
        self._sources = [torch.zeros(1, device=few.inputs.device, requires_grad=True), *weights]
        self._cuts = sorted({*range(0, steps, chunk), *cuts})
        self.begins = sorted({*self._cuts, *begins, steps})
        self.counts = [0.0] * (len(self.begins) - 1)
        self.gate: Callable[[int, Credit], Credit] = lambda _, credit: credit
        replay, losses = Replay(net, self._sources, few.inputs.device), list[Tensor]()
        self.after, self._rebuild = flatten(state)
        for begin in range(0, steps, chunk):
            stop, count = min(begin + chunk, steps), len(self.after)
            run = partial(self._run, begin, stop, self._rebuild)
            if stop == steps:  # it would be the first to run again
                loss, *self.after = run(*self.after)
            else:
                inputs = *self.after, *replay.inputs
                loss, *self.after = Segment.apply(run, (begin, stop), replay, None, count, *inputs)
            losses.append(loss)
        self.losses = torch.cat(losses)

    def _run(
        self, first: int, last: int, rebuild: Rebuild, *entering: Tensor
    ) -> tuple[Tensor, ...]:
        """The losses of a segment, and the state after it, leaf by leaf."""
        leaves: Sequence[Tensor] = entering
        losses, inner = list[Tensor](), [cut for cut in self._cuts if first <= cut < last]
        for begin, stop in pairwise([*inner, last]):
            carried = [leaf for leaf in leaves if trees.differentiable(leaf)]
            gate, values = partial(self._pass, begin), [leaf.detach() for leaf in carried]
            gated = iter(CreditGate.apply(values, gate, *carried, self._sources[0]))
            inside = [next(gated) if trees.differentiable(leaf) else leaf for leaf in leaves]
            rows = self._read(begin, stop)
            resets = rows.resets if rows.any_reset else None
            y, state = self._net(rows.inputs, rebuild(inside), resets)
            leaves, rebuild = flatten(state)
            spans = self.span(begin, stop)
            for i, (a, b) in enumerate(
                pairwise(self.begins[spans.start : spans.stop + 1]), spans.start
            ):
                part = slice(a - begin, b - begin)
                loss, self.counts[i] = self._objective(y[part], rows[part])
                losses.append(loss * self.counts[i])
        self._rebuild = rebuild
        return torch.stack(losses), *leaves

    def _pass(self, begin: int, credit: Credit) -> Credit:
        return self.gate(begin, credit)

    def span(self, start: int, stop: int) -> slice:
        """The spans between two cuts."""
        return slice(bisect_left(self.begins, start), bisect_left(self.begins, stop))

    def gradients(
        self, roots: Sequence[Tensor], credit: Sequence[Tensor] | None = None
    ) -> list[Tensor | None]:
        """The gradient of each weight, by a pass back from tensors."""
        with torch.autocast(self.losses.device.type, enabled=False):
            grads = torch.autograd.grad(
                roots, self._sources, credit, retain_graph=True, allow_unused=True
            )
        return list(grads[1:])


def get_axes(axes: Any) -> Any:
    """`axes`, or new matplotlib axes if None."""
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtraError(
            "plot() needs matplotlib: pip install 'throughtime[plot]'"
        ) from error
    return plt.subplots()[1]


def json_safe(value: Any) -> Any:
    """The value with `None` for floats that are not finite, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
