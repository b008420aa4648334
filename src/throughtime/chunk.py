"""Chunk: consecutive steps of all lanes, what one forward call sees.

Shapes: `T` steps, `B` lanes, `D` input features, `C` target columns.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from throughtime.errors import DataError, ModelError


@dataclass(frozen=True, eq=False)
class ChunkMetadata:
    """What is known of every step of every lane, and the counts of it that need no look at a
    tensor.

    Shared by all chunks cut from the same stretch, so that cutting one costs no tensor operation
    here.
    """

    resets: Tensor
    mask: Tensor
    recording: Tensor
    position: Tensor
    reset_steps: tuple[int, ...]
    counted: Sequence[
        int
    ]  # valid steps before each step, over all lanes; one entry more than steps

    @classmethod
    def of(
        cls, resets: Tensor, mask: Tensor, recording: Tensor, position: Tensor
    ) -> "ChunkMetadata":
        """The metadata with their counts."""
        reset_steps = tuple(resets.any(dim=1).nonzero().flatten().tolist())
        full = mask.numel() > 0 and bool(
            mask.all()
        )  # the usual case, without a number for every step
        counted = (
            range(0, mask.numel() + 1, mask.shape[1])
            if full
            else (0, *accumulate(mask.sum(dim=1).tolist()))
        )
        return cls(resets, mask, recording, position, reset_steps, counted)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive steps of all lanes, with what a model must know about them.

    `tt.Stream` makes chunks; make one by hand with `Chunk.from_tensors`, which checks and fills in defaults.

    Attributes:
        inputs: `(T, B, D)`, or `(T, B)` for token indices.
        targets: `(T, B)` or `(T, B, C)`; `None` where the recordings have none.
        metadata: resets, mask, recording and position of the stretch that the chunk is cut from.
        start: where the chunk begins in that stretch, in steps.
        stop: where it ends there.
    """

    inputs: Tensor
    targets: Tensor | None
    metadata: ChunkMetadata
    start: int
    stop: int

    @classmethod
    def from_tensors(
        cls,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        mask: Tensor | None = None,
        recording: Tensor | None = None,
        position: Tensor | None = None,
    ) -> "Chunk":
        """A checked chunk from tensors at hand.

        Args:
            inputs: `(T, B, D)` or `(T, B)`.
            targets: `(T, B)` or `(T, B, C)`, optional.
            resets: `(T, B)` bool; default none.
            mask: `(T, B)` bool; default every step that has a target.
            recording: `(T, B)` int64; default 0.
            position: `(T, B)` int64; default 0 to T-1.

        Raises:
            DataError: a tensor whose first two sizes are not `(T, B)`; all are listed.

        Example:
            >>> import torch, throughtime as tt
            >>> tt.Chunk.from_tensors(torch.zeros(5, 2, 3), torch.zeros(5, 2)).valid
            10
        """
        if inputs.dim() < 2:
            raise DataError(
                f"inputs have shape {tuple(inputs.shape)}, expected (T, B, D) or (T, B)"
            )
        shape = inputs.shape[:2]
        resets = (
            torch.zeros(shape, dtype=torch.bool, device=inputs.device) if resets is None else resets
        )
        mask = (
            torch.full(shape, targets is not None, device=inputs.device) if mask is None else mask
        )
        recording = (
            torch.zeros(shape, dtype=torch.long, device=inputs.device)
            if recording is None
            else recording
        )
        position = (
            torch.arange(shape[0], device=inputs.device).unsqueeze(1).expand(shape)
            if position is None
            else position
        )
        named = {
            "targets": targets,
            "resets": resets,
            "mask": mask,
            "recording": recording,
            "position": position,
        }
        faults = [
            f"{name} have shape {tuple(t.shape)}, expected ({shape[0]}, {shape[1]}) first as the"
            f" inputs {tuple(inputs.shape)}"
            for name, t in named.items()
            if t is not None and t.shape[:2] != shape
        ]
        faults += [
            f"{name} are {t.dtype}, expected torch.bool"
            for name, t in (("resets", resets), ("mask", mask))
            if t.dtype != torch.bool
        ]
        if faults:
            raise DataError("; ".join(faults))
        return cls(
            inputs, targets, ChunkMetadata.of(resets, mask, recording, position), 0, shape[0]
        )

    def __repr__(self) -> str:
        targets = "none" if self.targets is None else tuple(self.targets.shape)
        return (
            f"Chunk(inputs {tuple(self.inputs.shape)}, targets {targets}, valid={self.valid},"
            f" resets={int(self.resets.sum())})"
        )

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return self.stop - self.start

    @property
    def lanes(self) -> int:
        """B, the number of lanes."""
        return self.inputs.shape[1]

    @property
    def resets(self) -> Tensor:
        """`(T, B)` bool, true where a lane starts a recording: the state entering that step is the initial state."""
        return self.metadata.resets[self.start : self.stop]

    @property
    def mask(self) -> Tensor:
        """`(T, B)` bool, true where the step has a target that counts."""
        return self.metadata.mask[self.start : self.stop]

    @property
    def recording(self) -> Tensor:
        """`(T, B)` int64, index of the recording; -1 where a lane has nothing left to play."""
        return self.metadata.recording[self.start : self.stop]

    @property
    def position(self) -> Tensor:
        """`(T, B)` int64, step within the recording; -1 where a lane has nothing left to play."""
        return self.metadata.position[self.start : self.stop]

    @property
    def valid(self) -> int:
        """The number of true entries of `mask`."""
        return self.metadata.counted[self.stop] - self.metadata.counted[self.start]

    @property
    def any_reset(self) -> bool:
        """Whether any lane resets in this chunk."""
        steps = self.metadata.reset_steps
        if not steps:
            return False
        first = bisect_left(steps, self.start)
        return first < len(steps) and steps[first] < self.stop

    def __getitem__(self, span: slice) -> "Chunk":
        """The steps of a slice, without a stride; shares memory."""
        start, stop, _ = span.indices(self.steps)
        if start == 0 and stop == self.steps:
            return self
        targets = None if self.targets is None else self.targets[start:stop]
        return Chunk(
            self.inputs[start:stop], targets, self.metadata, self.start + start, self.start + stop
        )

    def warmed_up(self, steps: int, since: Tensor) -> tuple["Chunk", Tensor]:
        """The chunk without the targets of the first `steps` steps after each reset, and the steps
        since then at its end.

        `since` `(B,)` is how many steps each lane has played since its last reset.
        """
        at = torch.arange(self.steps, device=since.device).unsqueeze(1)
        last = torch.where(self.resets, at, -since).cummax(dim=0).values
        mask = self.mask & (at - last >= steps)
        metadata = ChunkMetadata.of(self.resets, mask, self.recording, self.position)
        return Chunk(self.inputs, self.targets, metadata, 0, self.steps), at[-1] + 1 - last[-1]

    def valid_pairs(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """What a loss or a score compares: outputs `(N, C)` and targets `(N,)` or `(N, C)` of the N
        valid steps, time first, then lane.

        A floating target of one column matches outputs of one column whether or not the last
        dimension of size 1 is written: `MSELoss` would broadcast `(N, 1)` against `(N,)` to `(N,
        N)`.

        Args:
            outputs: `(T, B, C)`, of the steps of this chunk.

        Raises:
            DataError: the recordings have no targets.
            ModelError: the outputs have not one row per step and lane.

        Example:
            >>> import torch, throughtime as tt
            >>> chunk = tt.Chunk.from_tensors(torch.zeros(5, 2, 3), torch.zeros(5, 2), mask=torch.arange(10).view(5, 2) > 3)
            >>> rows, targets = chunk.valid_pairs(torch.zeros(5, 2, 1))
            >>> rows.shape, targets.shape
            (torch.Size([6, 1]), torch.Size([6, 1]))
        """
        if self.targets is None:
            raise DataError(
                "the recordings of this stream have no targets; a loss needs 'targets' in every"
                " recording"
            )
        if outputs.shape[:2] != (self.steps, self.lanes):
            raise ModelError(
                f"the net returned outputs of shape {tuple(outputs.shape)} for {self.steps} steps"
                f" of {self.lanes} lanes, expected (T, B, C): one output per step and lane"
            )
        if self.valid == self.steps * self.lanes:
            rows, targets = outputs.flatten(0, 1), self.targets.flatten(0, 1)
        else:
            rows, targets = outputs[self.mask], self.targets[self.mask]
        if (
            targets.is_floating_point()
            and targets.dim() != rows.dim()
            and targets.numel() == rows.numel()
        ):
            targets = targets.view_as(rows)
        return rows, targets

    def to(self, device: torch.device) -> "Chunk":
        """The chunk on another device; itself if it is there already."""
        if self.inputs.device == device:
            return self
        metadata = ChunkMetadata.of(self.resets, self.mask, self.recording, self.position)
        moved = ChunkMetadata(
            metadata.resets.to(device),
            metadata.mask.to(device),
            metadata.recording.to(device),
            metadata.position.to(device),
            metadata.reset_steps,
            metadata.counted,
        )
        return Chunk(
            self.inputs.to(device),
            None if self.targets is None else self.targets.to(device),
            moved,
            0,
            self.steps,
        )


def join(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk from adjacent ones, in order; copies, unless there is only one."""
    if len(chunks) == 1:
        return chunks[0]
    targets = [c.targets for c in chunks if c.targets is not None]
    inputs, together = (
        torch.cat([c.inputs for c in chunks]),
        (torch.cat(targets) if len(targets) == len(chunks) else None),
    )
    if all(
        a.metadata is b.metadata and a.stop == b.start for a, b in pairwise(chunks)
    ):  # cut from one stretch
        return Chunk(inputs, together, chunks[0].metadata, chunks[0].start, chunks[-1].stop)
    names = ("resets", "mask", "recording", "position")
    metadata = ChunkMetadata.of(*(torch.cat([getattr(c, name) for c in chunks]) for name in names))
    return Chunk(inputs, together, metadata, 0, sum(c.steps for c in chunks))


@runtime_checkable
class Readable(Protocol):
    """Steps that can be looked at anywhere, without moving: a `tt.Stream`, for what measures and does not train."""

    @property
    def lanes(self) -> int:
        """B."""
        ...

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        ...

    @property
    def position(self) -> int:
        """Steps taken in this epoch."""
        ...

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of this epoch."""
        ...


class Source(Protocol):
    """Where a gradient policy takes its chunks from; it cuts them as it likes."""

    @property
    def position(self) -> int:
        """Steps taken in this epoch."""
        ...

    def take(self, steps: int) -> Chunk | None:
        """The next `steps` steps (fewer at the end of the epoch), or `None` when it is over."""
        ...

    def remaining(self, steps: int) -> int:
        """How many of the next `steps` steps there are: fewer at the end of the epoch, 0 when it is over."""
        ...

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of this epoch once more, or ahead of time.

        Raises:
            DataError: the chunks come from an iterator, which gives every step once.
        """
        ...

    def steps_to_common_reset(self) -> int:
        """Steps to the next one at which every lane starts a recording, so that no credit can cross
        it; or to the end of the epoch.

        Raises:
            DataError: the chunks come from an iterator, which does not know what comes.
        """
        ...
