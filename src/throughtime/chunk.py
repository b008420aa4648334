"""A chunk: consecutive steps of all lanes, the input of one forward call.

Shapes: `T` steps, `B` lanes, `D` input features, `C` target columns.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from throughtime._device import send
from throughtime._metadata import PER_STEP, ChunkMetadata
from throughtime.errors import DataError, ModelError

_IGNORED = -100  # torch's own ignore_index


class Placement(NamedTuple):
    """Where a net and its loss need the numbers of a chunk, and of which type.

    Attributes:
        device: of the weights.
        dtype: of floating inputs and targets; `None`: as they are.
        targets: "classes": indices `(T, B)` int64, also where they are stored as 0.0 and 1.0 or in
            one column `(T, B, 1)`; "numbers": floating, also where they are integers; `None`: as
            they are.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    targets: Literal["classes", "numbers"] | None = None


@dataclass(frozen=True, eq=False, init=False)
class Chunk:
    """Consecutive steps of all lanes, with their targets and metadata.

    `tt.Stream` makes chunks; `Chunk.from_tensors` makes one by hand, with checks and defaults.

    Attributes:
        inputs: `(T, B, D)`, or `(T, B)` for token indices.
        targets: `(T, B)` or `(T, B, C)`; `None` if the recordings have no targets.
        resets: `(T, B)` bool, true where a lane starts a recording and resets to the initial state.
        mask: `(T, B)` bool, true where the step counts in the loss.
        recording: `(T, B)` int64, index of the recording; -1 after the end of the lane's data.
        position: `(T, B)` int64, step within the recording; -1 after the end of the lane's data.
        metadata: these four for the block that contains the chunk, on the host. Those above are on
            the device of the inputs, copied when they are first read.
        start: the first step of the chunk in that block.
        stop: the end of the chunk in that block, exclusive.
        steps: T.
        lanes: B.
        valid_steps: the number of true entries of `mask`.
        any_reset: whether any lane resets in this chunk.
    """

    inputs: Tensor
    targets: Tensor | None
    resets: Tensor
    mask: Tensor
    recording: Tensor
    position: Tensor
    metadata: ChunkMetadata
    start: int
    stop: int
    steps: int
    lanes: int
    valid_steps: int
    any_reset: bool
    # the tensors that contain inputs and targets, and the step of theirs at which the chunk begins
    _inputs: Tensor
    _targets: Tensor | None
    _first: int
    # the targets before they were sent to a device, and torch's count of changes to those sent
    _sent: tuple[Tensor, int] | None

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor | None,
        metadata: ChunkMetadata,
        start: int,
        stop: int,
        first: int = 0,
        sent: tuple[Tensor, int] | None = None,
    ) -> None:
        valid_before, resets = metadata.valid_before, metadata.reset_steps
        any_reset = False
        if resets:
            index = bisect_left(resets, start)
            any_reset = index < len(resets) and resets[index] < stop
        # one assignment for all attributes of a frozen class: every update creates several chunks
        self.__dict__.update(
            metadata=metadata,
            start=start,
            stop=stop,
            steps=stop - start,
            lanes=inputs.shape[1],
            valid_steps=valid_before[stop] - valid_before[start],
            any_reset=any_reset,
            _inputs=inputs,
            _targets=targets,
            _first=first,
            _sent=sent,
        )

    def __getattr__(self, name: str) -> Any:
        """Slice a tensor when it is first needed: a kernel reads inputs and targets by address.

        As `functools.cached_property` does, in half its time.
        """
        if name in ("inputs", "targets"):
            rows = self._inputs if name == "inputs" else self._targets
            if rows is not None and (self._first or len(rows) != self.steps):
                rows = rows[self._first : self._first + self.steps]
        elif name in PER_STEP:
            metadata, of = self.metadata, self._inputs
            rows = getattr(metadata, name) if of.is_cpu else metadata.on(name, of.device)
            rows = rows[self.start : self.stop]
            if name == "resets" and not (of.is_cpu or rows.is_inference()):
                setattr(rows, "_reset_steps", (self.reset_steps, rows._version))  # noqa: B010
        else:
            raise AttributeError(f"'Chunk' object has no attribute '{name}'")
        self.__dict__[name] = rows
        return rows

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
        """Build a chunk from tensors, with checks of shapes and dtypes.

        Args:
            inputs: `(T, B, D)` or `(T, B)`.
            targets: `(T, B)` or `(T, B, C)`, optional.
            resets: `(T, B)` bool; default: no resets.
            mask: `(T, B)` bool; default: all true with `targets`, else all false.
            recording: `(T, B)` int64; default 0.
            position: `(T, B)` int64; default 0 to T-1.

        Raises:
            DataError: a shape or dtype is wrong; every such tensor is listed.

        Example:
            >>> import torch, throughtime as tt
            >>> tt.Chunk.from_tensors(torch.zeros(5, 2, 3), torch.zeros(5, 2)).valid_steps
            10
        """
        if inputs.dim() < 2:
            raise DataError(
                f"inputs have shape {tuple(inputs.shape)}, expected (T, B, D) or (T, B)"
            )
        shape = inputs.shape[:2]
        if resets is None:
            resets = torch.zeros(shape, dtype=torch.bool, device="cpu")
        if mask is None:
            mask = torch.full(shape, targets is not None, device="cpu")
        if recording is None:
            recording = torch.zeros(shape, dtype=torch.long, device="cpu")
        if position is None:
            position = torch.arange(shape[0], device="cpu").unsqueeze(1).expand(shape)
        named = {
            "targets": targets,
            "resets": resets,
            "mask": mask,
            "recording": recording,
            "position": position,
        }
        faults = [
            f"{name}: shape {tuple(t.shape)}, expected the first two sizes ({shape[0]}, {shape[1]})"
            f" of the inputs {tuple(inputs.shape)}"
            for name, t in named.items()
            if t is not None and t.shape[:2] != shape
        ]
        faults += [
            f"{name}: dtype {t.dtype}, expected torch.bool"
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
            f"Chunk(inputs {tuple(self.inputs.shape)}, targets {targets}, valid={self.valid_steps},"
            f" resets={int(self.metadata.resets[self.span].sum())})"
        )

    @property
    def span(self) -> slice:
        """The steps in the block of the metadata: `chunk.metadata.mask[chunk.span]`."""
        return slice(self.start, self.stop)

    @property
    def reset_steps(self) -> list[int]:
        """The steps at which any lane resets, ascending; read on the host."""
        resets, start = self.metadata.reset_steps, self.start
        first, last = bisect_left(resets, start), bisect_left(resets, self.stop)
        return [step - start for step in resets[first:last]]

    @property
    def valid(self) -> Tensor:
        """`(N,)` int64, `step * B + lane` of the valid steps; on the device of the inputs."""
        before, start = self.metadata.valid_before, self.start
        rows = self.metadata.on("valid", self._inputs.device)[before[start] : before[self.stop]]
        return rows - start * self.lanes if start else rows

    @property
    def host_targets(self) -> Tensor | None:
        """The targets on the host; those that were sent to a device are not read back."""
        if self._sent is None or (host := self._sent_targets()) is None:
            return None if self.targets is None else self.targets.cpu()
        return host

    def _sent_targets(self) -> Tensor | None:
        """The targets before they were sent to a device; None if these are others since."""
        if self._sent is None or self._targets is None or self._sent[1] != _version(self._targets):
            return None
        return self._sent[0][self._first : self._first + self.steps]

    def __getitem__(self, span: slice) -> "Chunk":
        """The steps of a slice, without a stride; shares memory.

        Raises:
            TypeError: an index that is not a slice of adjacent steps.
        """
        # iteration asks for an int
        if not isinstance(span, slice) or span.step not in (None, 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"a chunk has no index {span!r}, only slices of adjacent steps: chunk[10:20]. Where"
                " several chunks are expected, give a list: [chunk]"
            )
        start, stop, _ = span.indices(self.steps)
        stop = max(start, stop)  # [5:3] is empty, as in a list
        if start == 0 and stop == self.steps:
            return self
        return self._cut(start, stop)

    def _cut(self, start: int, stop: int) -> "Chunk":
        """The steps `start` to before `stop`, both within the chunk."""
        return Chunk(
            self._inputs,
            self._targets,
            self.metadata,
            self.start + start,
            self.start + stop,
            self._first + start,
            self._sent,
        )

    def warmed_up(self, steps: int, since: Tensor) -> tuple["Chunk", Tensor]:
        """Mask out the first `steps` steps after each reset.

        Args:
            steps: the length of the warm-up.
            since: `(B,)`, steps since each lane's last reset, before the chunk; on the host.

        Returns:
            The chunk, and the steps since the last reset at its end.
        """
        resets, mask, recording, position = (
            getattr(self.metadata, name)[self.span] for name in PER_STEP
        )
        at = torch.arange(self.steps, device="cpu").unsqueeze(1)
        last = torch.where(resets, at, -since).cummax(dim=0).values
        metadata = ChunkMetadata.of(resets, mask & (at - last >= steps), recording, position)
        return self._with(metadata), at[-1] + 1 - last[-1]

    def without_resets(self) -> "Chunk":
        """The chunk for a caller that sets the states of lanes that start by itself."""
        _, mask, recording, position = (
            getattr(self.metadata, name)[self.span] for name in PER_STEP
        )
        return self._with(ChunkMetadata.of(torch.zeros_like(mask), mask, recording, position))

    def _with(self, metadata: ChunkMetadata) -> "Chunk":
        """The same steps with metadata of their own."""
        sent = _sent(self._sent_targets(), self.targets)
        return Chunk(self.inputs, self.targets, metadata, 0, self.steps, sent=sent)

    def valid_pairs(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs `(N, C)` and targets of the N valid steps, time first.

        Targets are `(N,)` if they are classes and `(N, C)` if they are numbers. So those of one
        column have the shape of the outputs, `(N, 1)`: `(N,)` would broadcast to `(N, N)`.

        Args:
            outputs: `(T, B, C)`, of the steps of this chunk.

        Raises:
            DataError: the recordings have no targets.
            ModelError: the outputs do not have one row per step and lane.

        Example:
            >>> import torch, throughtime as tt
            >>> mask = torch.arange(10).view(5, 2) > 3
            >>> chunk = tt.Chunk.from_tensors(torch.zeros(5, 2, 3), torch.zeros(5, 2), mask=mask)
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
        rows, targets = outputs.flatten(0, 1), self.targets.flatten(0, 1)
        if self.valid_steps < self.steps * self.lanes:
            valid = self.valid
            rows, targets = rows.index_select(0, valid), targets.index_select(0, valid)
        if (
            targets.is_floating_point()
            and targets.dim() != rows.dim()
            and targets.numel() == rows.numel()
        ):
            targets = targets.view_as(rows)
        return rows, targets

    def to(self, device: torch.device) -> "Chunk":
        """The chunk on a device; itself if it is on that device."""
        return self.convert(Placement(device))

    def convert(self, placement: Placement) -> "Chunk":
        """The chunk where a net and its loss need it, in their types; itself if it has them.

        Raises:
            DataError: the loss takes classes, and a target that counts is no whole number.
        """
        inputs, targets = self.inputs, self.targets
        if inputs.is_floating_point() and placement.dtype is not None:
            inputs = inputs.to(placement.dtype)
        if targets is not None:
            targets = self._as_classes(targets) if placement.targets == "classes" else targets
            if targets.is_floating_point() and placement.dtype is not None:
                targets = targets.to(placement.dtype)
            elif placement.targets == "numbers" and not targets.is_floating_point():
                targets = targets.to(placement.dtype or torch.get_default_dtype())
        rows = send(inputs, placement.device)
        labels = None if targets is None else send(targets, placement.device)
        if rows is self.inputs and labels is self.targets:
            return self
        host = targets if targets is not labels and targets is not None and targets.is_cpu else None
        sent = _sent(host, labels)
        return Chunk(rows, labels, self.metadata, self.start, self.stop, sent=sent)

    def _as_classes(self, targets: Tensor) -> Tensor:
        """Class indices `(T, B)`, int64; a target of several columns is no class: unchanged."""
        if targets.dim() > 3 or (targets.dim() == 3 and targets.shape[2] != 1):
            return targets
        labels = targets.flatten(1) if targets.dim() == 3 else targets
        if not labels.is_floating_point():
            return labels
        broken = self.mask & (labels != labels.floor())
        if broken.any():
            step, lane = broken.nonzero()[0].tolist()
            raise DataError(
                f"the target of step {int(self.position[step, lane])} of recording"
                f" {int(self.recording[step, lane])} is {labels[step, lane].item():g}, and the loss"
                " takes class indices: expected whole numbers, 0, 1 and so on"
            )
        return labels.nan_to_num(_IGNORED).long()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _sent(host: Tensor | None, targets: Tensor | None) -> tuple[Tensor, int] | None:
    """Targets of the host that were sent as these, which may change from now on."""
    return None if host is None or targets is None else (host, _version(targets))


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Concatenate adjacent chunks, in order; copies, unless there is only one."""
    if len(chunks) == 1:
        return chunks[0]
    inputs = torch.cat([c.inputs for c in chunks])
    several = [c.targets for c in chunks if c.targets is not None]
    targets = torch.cat(several) if len(several) == len(chunks) else None
    sent = None
    if not inputs.is_cpu:
        rows = [rows for c in chunks if (rows := c._sent_targets()) is not None]
        sent = _sent(torch.cat(rows) if len(rows) == len(chunks) else None, targets)
    if all(a.metadata is b.metadata and a.stop == b.start for a, b in pairwise(chunks)):
        first, last = chunks[0], chunks[-1]
        return Chunk(inputs, targets, first.metadata, first.start, last.stop, sent=sent)
    metadata = ChunkMetadata.of(
        *(torch.cat([getattr(c.metadata, name)[c.span] for c in chunks]) for name in PER_STEP)
    )
    if not inputs.is_cpu:
        metadata._parts.extend(p for c in chunks for p in c.metadata._pieces(c.start, c.stop))
    return Chunk(inputs, targets, metadata, 0, sum(c.steps for c in chunks), sent=sent)


@runtime_checkable
class Readable(Protocol):
    """Steps that can be read in any order without advancing, as those of a `tt.Stream`."""

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        ...

    @property
    def steps(self) -> int:
        """The number of steps of an epoch."""
        ...

    @property
    def position(self) -> int:
        """Steps taken in this epoch."""
        ...

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of this epoch."""
        ...


class Source(Protocol):
    """The steps of one epoch, from which a gradient policy takes chunks of any length."""

    @property
    def position(self) -> int:
        """Steps taken in this epoch."""
        ...

    def take(self, steps: int) -> Chunk | None:
        """The next `steps` steps (fewer at the end of the epoch), or `None` after it."""
        ...

    def remaining(self, steps: int) -> int:
        """How many of the next `steps` steps exist: fewer at the end of the epoch, 0 after it."""
        ...

    def read(self, start: int, stop: int) -> Chunk:
        """The steps `start` to before `stop` of this epoch whether taken already or not.

        Raises:
            DataError: the chunks come from an iterator, which can be read only once.
        """
        ...

    def steps_to_common_reset(self) -> int:
        """The steps before the next one at which all lanes reset, or before the end of the epoch.

        No gradient flows across that step.

        Raises:
            DataError: the chunks come from an iterator, which cannot be read ahead.
        """
        ...
