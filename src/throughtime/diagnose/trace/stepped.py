"""A cell under watch: it runs as it is, and what it returns tells its gradient.

The gates are not among what it returns. When the backward pass is over, the gates of all its steps
are computed at once from what went into the cell, and with dh and dc they give the gradient of each
gate.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from throughtime.diagnose.trace import gru, lstm, rnn
from throughtime.diagnose.trace.passes import Run
from throughtime.diagnose.trace.span import Steps, Weights
from throughtime.diagnose.trace.track import Shown, Track, batched

LOOKS = {"lstm": lstm.look, "gru": gru.look, "rnn_tanh": rnn.look, "rnn_relu": rnn.look}


@dataclass(eq=False)
class Copied:
    """The weights of a cell as they were in its calls: an optimizer may change them before the pass is over."""

    _given: list[Tensor] = field(default_factory=list[Tensor])
    _versions: list[int] = field(default_factory=list[int])
    _copy: Weights | None = None

    def of(self, given: list[Tensor]) -> Weights:
        """A copy, made anew only where a weight was replaced or written to."""
        # torch's documented counter has no other name
        versions = [weight._version for weight in given]
        same = len(given) == len(self._given) and all(
            a is b for a, b in zip(given, self._given, strict=True)
        )
        if self._copy is None or not same or versions != self._versions:
            self._given, self._versions = given, versions
            self._copy = Weights.of([weight.detach().clone() for weight in given], len(given) > 2)
        return self._copy


class Inside(NamedTuple):
    """What went into a cell of torch.nn."""

    kind: str
    x: Tensor
    states: tuple[Tensor, ...]
    weights: Weights


@dataclass(eq=False)
class Step:
    """One call of a cell, and the gradients of what it returned, as they come.

    Attributes:
        track: whose.
        start: which step of it.
        values: what was returned, by name.
        came: the tensors that went in.
        inside: for a cell of torch.nn.
    """

    track: Track
    start: int
    values: Mapping[str, Tensor]
    came: list[Tensor]
    inside: Inside | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def watch(self, returned: Mapping[str, Tensor]) -> None:
        """Asks each tensor for its gradient: the total one, of every use made of it."""
        for leaf, tensor in returned.items():
            if tensor.requires_grad:
                tensor.register_hook(partial(self._see, leaf))

    def _see(self, leaf: str, gradient: Tensor | None) -> None:
        if gradient is None or batched(gradient):  # a hook is told None where nothing comes
            return
        run = self.track.history.run()
        if not run.waiting:
            # as DistributedDataParallel does
            Variable._execution_engine.queue_callback(partial(finish, run))
        run.waiting.setdefault(id(self), (self, {}))[1][leaf] = gradient

    def like(self) -> tuple[object, ...]:
        """What steps that are looked at together have in common."""
        shapes = tuple((leaf, value.shape, value.dtype) for leaf, value in self.values.items())
        return (
            *shapes,
            None if self.inside is None else (id(self.inside.weights), self.inside.x.shape),
        )


class _Waiting(NamedTuple):
    """A step, and the gradients that this run gave it."""

    step: Step
    gradients: Mapping[str, Tensor]


def finish(run: Run) -> None:
    """At the end of a run: looks at all steps that were seen in it."""
    waiting = sorted(
        (_Waiting(*one) for one in run.waiting.values()),
        key=lambda one: (one.step.track.name, one.step.start),
    )
    run.waiting = {}
    keyed = [
        ((w.step.track.name, w.step.start - place, w.step.like()), w)
        for place, w in enumerate(waiting)
    ]
    for _, group in groupby(keyed, key=lambda one: one[0]):  # consecutive steps of one track
        _look([w for _, w in group])


def _look(group: list[_Waiting]) -> None:
    """Notes consecutive steps of one cell."""
    first, last = group[0].step, group[-1].step
    seen = {leaf: torch.stack([_filled(w, leaf) for w in group]) for leaf in first.values}
    entering: dict[str, Tensor] = {}
    kept: tuple[Tensor, int] | None = None
    if first.inside is not None:
        with torch.no_grad(), torch.autocast(first.inside.x.device.type, enabled=False):
            steps = _steps(
                [(w.step.inside, w.step.values["h"]) for w in group if w.step.inside is not None]
            )
            dh, dc = (
                seen[leaf].to(steps.x.dtype) for leaf in (("h", "c") if "c" in seen else ("h", "h"))
            )
            told = LOOKS[first.inside.kind](steps, dh, dc)
        seen, entering = told.seen, dict(zip("hc", told.entering, strict=False))
        kept = (
            None
            if told.kept is None
            else (told.kept.sum((0, 1)), told.kept.shape[0] * told.kept.shape[1])
        )
    first.track.note(
        first.start, Shown(seen, entering, kept, first.came, list(last.values.values()))
    )


def _filled(waiting: _Waiting, leaf: str) -> Tensor:
    """A tensor that no gradient reached has none."""
    gradient = waiting.gradients.get(leaf)
    return torch.zeros_like(waiting.step.values[leaf]) if gradient is None else gradient.detach()


def _steps(calls: Iterable[tuple[Inside, Tensor]]) -> Steps:
    """Calls side by side; wider than the kernel under autocast and for half types."""
    rows = list(calls)
    first = rows[0][0]
    kind = torch.promote_types(first.weights.ih.dtype, torch.float32)
    # ih and hh are there
    weights = Weights(*(None if w is None else w.to(kind) for w in first.weights))  # pyright: ignore[reportArgumentType]
    x, h, c = (
        torch.stack(column).to(kind)
        for column in zip(*((i.x, i.states[0], i.states[-1]) for i, _ in rows), strict=True)
    )
    return Steps(
        x, h, torch.stack([y for _, y in rows]).to(kind), c, weights, first.kind == "rnn_relu"
    )
