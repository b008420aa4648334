"""From the plays of a timetable to the arrays of a chunk: read, check, convert, splice.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from throughtime.chunk import Chunk, ChunkMetadata
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array
from throughtime.stream.labels import IGNORE_INDEX
from throughtime.stream.lanes import LaneSlice
from throughtime.stream.recording import Recording, Steps

Read: TypeAlias = tuple[LaneSlice, Steps]
Counts: TypeAlias = tuple[int, ...] | None
Form: TypeAlias = tuple[Any, ...]

DTYPES = (torch.float32, torch.float64, torch.float16)


class MissingCounts(NamedTuple):
    """Steps missing before each step of a chunk, over all lanes; `None` where there are none."""

    masked: Counts  # inputs not finite
    missing_targets: Counts


def _before_each(rows: Array) -> tuple[int, ...]:
    return (0, *accumulate(rows.sum(axis=1).tolist()))


@dataclass
class Collator:
    """Makes chunks of a fixed layout: every recording must have the columns and the type of the first one read."""

    recordings: Sequence[Recording]
    lanes: int
    dtype: torch.dtype | None
    warm_up: int
    mask_missing: bool

    def __post_init__(self) -> None:
        self._first: tuple[str, Steps] | None = None
        self._fitting = set[Form]()

    def chunk(self, plays: Sequence[LaneSlice], steps: int) -> tuple[Chunk, "MissingCounts"]:
        """The chunk in which `plays` happen, and what is missing in it."""
        reads = [(play, self._read(play)) for play in plays]
        resets, mask, recording, position = self._marks(plays, steps)
        inputs, masked = self._inputs(reads, steps, mask)
        targets, without = self._targets(reads, steps, mask)
        marks = ChunkMetadata.of(
            torch.from_numpy(resets),
            torch.from_numpy(mask),
            torch.from_numpy(recording),
            torch.from_numpy(position),
        )
        chunk = Chunk(
            torch.from_numpy(inputs),
            None if targets is None else torch.from_numpy(targets),
            marks,
            0,
            steps,
        )
        return chunk, MissingCounts(masked, without)

    def _marks(self, plays: Sequence[LaneSlice], steps: int) -> tuple[Array, Array, Array, Array]:
        """Resets, mask, recording and position of every step: a single look for each play, since there may be one for every few steps."""
        owner = np.full(
            (self.lanes, steps), len(plays)
        )  # the last row of what is looked up: nobody plays
        resets = np.zeros((steps, self.lanes), dtype=np.bool_)
        for i, play in enumerate(plays):
            owner[play.lane, play.at : play.at + play.steps] = i
            resets[play.at, play.lane] = play.since == 0
        owner = np.ascontiguousarray(owner.T)
        at = np.arange(steps)[:, None]
        known = np.array(
            [(p.recording, p.position - p.at, p.since - p.at) for p in plays] + [(-1, 0, 0)]
        )
        played = owner < len(plays)
        position = np.where(played, known[:, 1][owner] + at, -1)
        mask = played & (known[:, 2][owner] + at >= self.warm_up) if self.warm_up else played
        return resets, mask, known[:, 0][owner], position

    def prime(self) -> Steps:
        """The layout that all recordings must have.

        Read from the first of them if nothing was read yet.
        """
        if self._first is None:
            self._read(LaneSlice(0, 0, 1, 0, 0, 0))
        if self._first is None:
            raise RuntimeError("a recording that was read and left no layout")
        return self._first[1]

    def _read(self, play: LaneSlice) -> Steps:
        recording = self.recordings[play.recording]
        steps = recording.read(play.position, play.position + play.steps)
        if len(steps.inputs) != play.steps:
            raise DataError(
                f"recording '{recording.name}' gave {len(steps.inputs)} of the {play.steps} steps"
                f" asked for at step {play.position}; it said that it has {len(recording)}. Did the"
                " file change?"
            )
        form = _form(steps)
        if form not in self._fitting:
            self._check(recording.name, steps)
            self._fitting.add(form)
        return steps

    def _check(self, name: str, steps: Steps) -> None:
        """Refuses what is no numbers, or other columns than those of the first recording."""
        for role, array in (
            ("inputs", steps.inputs),
            ("targets", steps.targets),
            ("static features", steps.static),
        ):
            if array is not None and array.dtype.kind not in "biuf":
                raise DataError(
                    f"recording '{name}': the {role} are {array.dtype}, expected numbers; map text"
                    " to integers first"
                )
        if self._first is None:
            self._first = (name, steps)
        first_name, first = self._first
        pairs = (("inputs", steps.inputs, first.inputs), ("targets", steps.targets, first.targets))
        layouts = [
            (role, *(_layout(array, exact=self.dtype is None) for array in arrays))
            for role, *arrays in pairs
        ]
        layouts.append(("static features", _width(steps.static), _width(first.static)))
        faults = [
            f"recording '{name}' has {role} of {got}, recording '{first_name}' of {expected}"
            for role, got, expected in layouts
            if got != expected
        ]
        if faults:
            hint = (
                ", or give the stream a dtype."
                if self.dtype is None and not any("integer" in fault for fault in faults)
                else "."
            )
            more = (
                "All recordings of a stream need the same columns, and the same kind of numbers"
                + hint
            )
            raise DataError("; ".join(faults) + ". " + more)

    def _inputs(self, reads: Sequence[Read], steps: int, mask: Array) -> tuple[Array, Counts]:
        sample = (reads[0][1] if reads else self.prime()).inputs
        dtype = self._dtype(sample.dtype)
        tokens = sample.ndim == 1 and dtype.kind == "i"
        parts = [
            (play, s.inputs if tokens or s.inputs.ndim > 1 else s.inputs.reshape(-1, 1))
            for play, s in reads
        ]
        statics = [(play, s.static) for play, s in reads if s.static is not None]
        columns = sample.shape[1:] if tokens or sample.ndim > 1 else (1,)
        static = self.prime().static
        if static is not None and len(columns) != 1:
            raise DataError(
                "static features go beside inputs (T, D); these are tokens or have more dimensions"
            )
        if static is not None and dtype.kind != "f" and static.dtype.kind == "f":
            raise DataError(
                f"the static features are {static.dtype} and the inputs {dtype}, which cannot hold"
                " them; give the stream a floating dtype"
            )
        width = columns if static is None else (columns[0] + len(static),)
        inputs = _splice(parts, (steps, self.lanes, *width), dtype, statics)
        if dtype.kind != "f" or np.isfinite(inputs).all():
            return inputs, None
        wrong = ~np.isfinite(inputs)
        bad = wrong.reshape(*inputs.shape[:2], -1)
        if not self.mask_missing:
            self._refuse_missing(bad, reads)
        rows = np.asarray(bad.any(axis=2))
        inputs[wrong] = 0
        mask[rows] = False
        return inputs, _before_each(rows)

    def _refuse_missing(self, bad: Array, reads: Sequence[Read]) -> None:
        play = next(p for p, _ in reads if bad[p.at : p.at + p.steps, p.lane].any())
        where = bad[play.at : play.at + play.steps, play.lane]
        step, column = np.argwhere(where)[0]
        raise DataError(
            f"recording '{self.recordings[play.recording].name}' has {int(where.sum())} inputs that"
            f" are NaN or infinite between steps {play.position} and {play.position + play.steps},"
            f" the first at step {play.position + step}, column {column}. Clean the file, or mask"
            " them: missing='mask' (command line: --missing mask)"
        )

    def _targets(
        self, reads: Sequence[Read], steps: int, mask: Array
    ) -> tuple[Array | None, Counts]:
        sample = (reads[0][1] if reads else self.prime()).targets
        if sample is None:
            mask[:] = False
            return None, None
        dtype = np.dtype(np.int64) if sample.dtype.kind in "biu" else self._dtype(sample.dtype)
        shape = (steps, self.lanes, *sample.shape[1:])
        targets = _splice(
            [(play, s.targets) for play, s in reads if s.targets is not None], shape, dtype
        )
        missing = np.isnan(targets) if dtype.kind == "f" else targets == IGNORE_INDEX
        if not missing.any():
            return targets, None
        rows = np.asarray(missing.reshape(*mask.shape, -1).any(axis=2))
        mask[rows] = False
        return targets, _before_each(rows)

    def _dtype(self, found: np.dtype[Any]) -> np.dtype[Any]:
        """Floating data take the stream's dtype; integers stay integers unless it is floating."""
        if self.dtype is not None:
            return np.dtype(str(self.dtype).removeprefix("torch."))
        return found if found.kind == "f" else np.dtype(np.int64)


def _form(steps: Steps) -> Form:
    """Types and columns: where these are known to fit, nothing has to be put in words."""
    inputs, targets, static = steps
    of_targets = None if targets is None else (targets.dtype, targets.shape[1:])
    return (
        inputs.dtype,
        inputs.shape[1:],
        of_targets,
        None if static is None else (static.dtype, static.shape),
    )


def _layout(array: Array | None, *, exact: bool) -> str:
    """The columns in words.

    `exact` tells floating types apart, where they decide the type of a chunk.
    """
    if array is None:
        return "no columns"
    kind = {
        "f": str(array.dtype) if exact else "floating",
        "b": "integer",
        "u": "integer",
        "i": "integer",
    }[array.dtype.kind]
    width = "x".join(map(str, array.shape[1:])) or "1"
    return f"{width} {'columns' if array.ndim > 1 else 'column (a vector)'} of {kind} numbers"


def _width(static: Array | None) -> str:
    return "none" if static is None else f"{len(static)} numbers"


def _splice(
    parts: Sequence[tuple[LaneSlice, Array]],
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    statics: Sequence[tuple[LaneSlice, Array]] = (),
) -> Array:
    """`(T, B, ...)` from the parts of each lane, in memory that torch allocates; static features
    `(S,)` are the last columns.

    Kernels round differently for differently aligned memory; torch aligns to 64 bytes, NumPy and a
    user's array need not.
    """
    covered = all(  # plays of a lane follow each other
        sum(play.steps for play, _ in given) == shape[0] * shape[1]
        for given in ((parts, statics) if statics else (parts,))
    )
    spliced: Array = (torch.empty if covered else torch.zeros)(
        shape, dtype=getattr(torch, dtype.name)
    ).numpy()
    own = spliced[..., : -len(statics[0][1])] if statics else spliced
    for play, values in parts:
        own[play.at : play.at + play.steps, play.lane] = values
    for play, values in statics:
        spliced[play.at : play.at + play.steps, play.lane, -len(values) :] = values
    return spliced
