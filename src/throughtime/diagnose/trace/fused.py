"""A layer of tt.nn under watch: the compiled kernel adds up the squares of the gradients that it
makes anyway.

Its backward pass leaves one piece of memory, (T, B, S) squares and little more; roots are taken
when somebody asks. Whole tensors it does not give: then it plays the forward pass alone, and the
recurrence of `played.py` the backward one, between resets.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = H or the size of a projection,
`S` letters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from throughtime.diagnose.trace.played import Call
from throughtime.diagnose.trace.span import Weights
from throughtime.diagnose.trace.track import Shown, Track
from throughtime.kernels import cells, recurrent
from throughtime.kernels.cells import Cell
from throughtime.kernels.reference import States
from throughtime.nn.layers import Run

Turns = Iterator[
    tuple[Track, bool]
]  # the tracks in the order of play, and whether they begin at the end
Played = tuple[Tensor, States]


def captured(
    turns: Turns,
    cell: Cell,
    x: Tensor,
    states: States,
    weights: cells.Weights,
    resets: Tensor | None = None,
) -> Played:
    """The kernel, told to say what its backward pass sees."""
    track, back = next(turns)
    seen = _Seen(cell, track, back)
    made = recurrent.run(cell, x, states, weights, resets, seen)
    if made[0].requires_grad:
        seen.start = track.begin(len(x))
    return made


class _Seen:
    """Takes in what the kernel says of one call."""

    def __init__(self, cell: Cell, track: Track, back: bool) -> None:
        self.cell = cell
        self.track, self.back, self.start = track, back, 0

    def __call__(self, captured: Tensor, h: Tensor, y: Tensor) -> None:
        track = self.track
        run = track.history.run()
        ends = (
            ([h.detach()], [y.detach()[-1].clone()]) if run.piece else None
        )  # only pieces of a sweep are joined by them
        run.note(track.name, self.start, Told(self.cell, captured, y.shape, self.back), ends)


class Told:
    """What the kernel said of consecutive steps, `(T, B, ...)`, taken apart when it is asked for."""

    def __init__(self, cell: Cell, captured: Tensor, shape: Sequence[int], back: bool) -> None:
        self._cell = cell
        self._captured, self._shape, self._back = captured, shape, back

    @property
    def steps(self) -> int:
        """T."""
        return self._shape[0]

    @cached_property
    def _parts(self) -> recurrent.Captured:
        return recurrent.Captured.of(self._cell, self._captured, self._shape[0], self._shape[1])

    @cached_property
    def _roots(self) -> Tensor:
        roots = self._parts.squares.sqrt()
        return roots.flip(0) if self._back else roots

    @property
    def norms(self) -> Mapping[str, Tensor]:
        """By leaf, `(T, B)`."""
        return dict(zip(self._cell.values, self._roots.unbind(2), strict=True))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    @property
    def entering(self) -> Mapping[str, Tensor]:
        """By leaf, `(B,)`; of a direction that starts at the end the state is that after the steps."""
        return (
            {}
            if self._back
            else dict(zip("hc", self._parts.entering.sqrt().unbind(1), strict=False))
        )

    @property
    def kept(self) -> tuple[Tensor, int] | None:
        """The sum of the gate that keeps the past, `(H,)`, and how many were added up."""
        kept = self._parts.kept
        return (kept, self._shape[0] * self._shape[1]) if len(kept) else None


def stretched(
    turns: Turns,
    run: Run,
    cell: Cell,
    x: Tensor,
    states: States,
    weights: cells.Weights,
    resets: Tensor | None = None,
) -> Played:
    """The same as `run`, a call for each stretch between resets, whose backward pass shows whole tensors."""
    track, back = next(turns)
    given = [w for w in weights if w is not None]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *states, *given)):
        return run(cell, x, states, weights, resets)
    start, kernel = track.begin(len(x)), partial(_kernel, run, cell, weights.b_ih is not None)
    outputs: list[Tensor] = []
    for first, stop in pairwise([*_starts(resets), len(x)]):
        fresh = None if resets is None else resets[first]
        states = (
            states
            if fresh is None
            else tuple(leaf.masked_fill(fresh.unsqueeze(1), 0) for leaf in states)
        )
        begin = start + (len(x) - stop if back else first)
        call = Call(
            cell.name, kernel, [_Stretch(track, back, fresh)], [begin], weights.b_ih is not None
        )
        y, *after = call(x[first:stop], tuple(leaf.unsqueeze(0) for leaf in states), given)
        states = tuple(leaf.squeeze(0) for leaf in after)
        outputs.append(y)
    return (
        outputs[0] if len(outputs) == 1 else torch.cat(outputs),
        states,
    )


def _starts(resets: Tensor | None) -> list[int]:
    return [0] if resets is None else sorted({0, *resets.any(1).nonzero().flatten().tolist()})


def _kernel(
    run: Run, cell: Cell, biases: bool, x: Tensor, states: tuple[Tensor, ...], given: list[Tensor]
) -> tuple[Tensor, ...]:
    """One layer in one direction, as torch's kernels are called."""
    with torch.no_grad():
        weights = cells.Weights(*Weights.of(given, biases))
        y, after = run(cell, x, tuple(leaf[0] for leaf in states), weights, None)
    return (y, *(leaf.unsqueeze(0) for leaf in after))


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Steps after a reset: nothing flows on from a lane that is fresh, and in a call that plays from the end they come last first."""

    track: Track
    back: bool
    fresh: Tensor | None

    def note(self, start: int, shown: Shown) -> None:
        """In the order of time."""
        gradients, entering = shown.gradients, shown.entering
        if self.back:
            gradients, entering = (
                {leaf: gradient.flip(0) for leaf, gradient in gradients.items()},
                {},
            )
        if self.fresh is not None:
            entering = {
                leaf: gradient.masked_fill(self.fresh.unsqueeze(1), 0)
                for leaf, gradient in entering.items()
            }
        self.track.note(start, shown._replace(gradients=gradients, entering=entering))
