"""A chunk: consecutive steps of all lanes, the input of one forward call.

Shapes: `T` steps, `B` lanes, `D` input features, `C` target columns.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor

from throughtime._device import send
from throughtime._metadata import PER_STEP, ChunkMetadata, attach, attached
from throughtime.errors import DataError, ModelError, listed

_IGNORED = -100  # torch's own ignore_index


class Placement(NamedTuple):
    """Where a net and its loss need the numbers of a chunk, and of which type.

    Attributes:
        device: of the weights.
        dtype: of floating inputs, targets and series; `None`: as they are.
        targets: "classes": indices `(T, B)` int64, also where they are stored as 0.0 and 1.0 or in
            one column `(T, B, 1)`; "numbers": floating, also where they are integers; `None`: as
            they are.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    targets: Literal["classes", "numbers"] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Chunk:
    """Consecutive steps of all lanes, with their targets, other series and metadata.

    `tt.Stream` makes chunks; `Chunk.from_tensors` makes one by hand, with checks and defaults. A
    slice, `chunk[10:20]`, is a chunk of these steps; a name, `chunk["weight"]`, gives a series.

    Attributes:
        inputs: `(T, B, D)`, or `(T, B)` for token indices.
        targets: `(T, B)` or `(T, B, C)`; `None` if the recordings have no targets.
        series: `(T, B, ...)` by name: what the recordings have beside inputs and targets; 0 or
            false after the end of the lane's data.
        resets: `(T, B)` bool, true where a lane starts a recording and resets to the initial state.
        mask: `(T, B)` bool, true where the step counts in the loss.
        starts: `(T, B)` bool, true at the first step of a recording. The first step of a later part
            of a recording, or after an `offset`, is a reset but no start.
        ends: `(T, B)` bool, true at the last step of a recording.
        recording: `(T, B)` int64, index of the recording; -1 after the end of the lane's data.
        position: `(T, B)` int64, step within the recording; -1 after the end of the lane's data.
        metadata: resets, mask, recording, position and ends of the block that contains the chunk,
            on the host. Those above are on the device of the inputs, copied when they are first
            read.
        start: the first step of the chunk in that block.
        stop: the end of the chunk in that block, exclusive.
        steps: T.
        lanes: B.
        valid_steps: the number of true entries of `mask`.
        any_reset: whether any lane resets in this chunk.
    """

    # the tensors that contain inputs and targets: a kernel reads them by address
    _inputs: Tensor
    _targets: Tensor | None
    metadata: ChunkMetadata
    start: int
    stop: int
    _first: int = 0  # the step of these tensors at which the chunk begins
    _series: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    steps: int = field(init=False)
    lanes: int = field(init=False)
    valid_steps: int = field(init=False)
    any_reset: bool = field(init=False)

    def __post_init__(self) -> None:
        start, stop, metadata = self.start, self.stop, self.metadata
        resets, before = metadata.reset_steps, metadata.valid_before
        index = bisect_left(resets, start)
        self.__dict__.update(  # counted once: every update asks for them several times
            steps=stop - start,
            lanes=self._inputs.shape[1],
            valid_steps=before[stop] - before[start],
            any_reset=index < len(resets) and resets[index] < stop,
        )

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
        ends: Tensor | None = None,
        series: Mapping[str, Tensor] | None = None,
    ) -> "Chunk":
        """Build a chunk from tensors, with checks of shapes and dtypes.

        Args:
            inputs: `(T, B, D)` or `(T, B)`.
            targets: `(T, B)` or `(T, B, C)`, optional.
            resets: `(T, B)` bool; default: no resets.
            mask: `(T, B)` bool; default: all true. Steps whose target is the class -100 are masked.
            recording: `(T, B)` int64; default 0.
            position: `(T, B)` int64; default 0 to T-1.
            ends: `(T, B)` bool; default: no step is known to be an end.
            series: `(T, B, ...)` by name.

        Raises:
            DataError: a shape or dtype is wrong; every such tensor is listed.

        Example:
            >>> import torch, throughtime as tt
            >>> from throughtime.chunk import Chunk
            >>> Chunk.from_tensors(torch.zeros(5, 2, 3), torch.zeros(5, 2)).valid_steps
            10
        """
        if inputs.dim() < 2:
            raise DataError(
                f"inputs have shape {tuple(inputs.shape)}, expected (T, B, D) or (T, B)"
            )
        shape, series = inputs.shape[:2], dict(series or {})
        no_step = torch.zeros(shape, dtype=torch.bool, device="cpu")
        defaults = (no_step, ~no_step, no_step.long(), (~no_step).cumsum(0) - 1, no_step.clone())
        per_step = {
            name: default if tensor is None else tensor
            for name, tensor, default in zip(
                PER_STEP, (resets, mask, recording, position, ends), defaults, strict=True
            )
        }
        named = {**series, "targets": targets, **per_step}
        faults = [
            f"{name}: shape {tuple(t.shape)}, expected the first two sizes ({shape[0]}, {shape[1]})"
            f" of the inputs {tuple(inputs.shape)}"
            for name, t in named.items()
            if t is not None and t.shape[:2] != shape
        ]
        faults += [
            f"{name}: dtype {per_step[name].dtype}, expected torch.bool"
            for name in ("resets", "mask", "ends")
            if per_step[name].dtype != torch.bool
        ]
        if faults:
            raise DataError("; ".join(faults))
        if targets is not None and targets.shape == shape and not targets.is_floating_point():
            mask = per_step["mask"]  # without them, as those of a stream
            per_step["mask"] = mask & (targets != _IGNORED).to(mask.device)
        metadata = ChunkMetadata.of(*per_step.values())
        return cls(inputs, targets, metadata, 0, shape[0], 0, series)

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
        steps, start = self.metadata.reset_steps, self.start
        return [step - start for step in steps if start <= step < self.stop]

    @cached_property
    def inputs(self) -> Tensor:
        return self._cut_rows(self._inputs)

    @cached_property
    def targets(self) -> Tensor | None:
        return None if self._targets is None else self._cut_rows(self._targets)

    @cached_property
    def series(self) -> dict[str, Tensor]:
        """What recordings have beside inputs and targets."""
        return {name: self._cut_rows(rows) for name, rows in self._series.items()}

    def _cut_rows(self, rows: Tensor) -> Tensor:
        """The steps of the chunk, of a tensor that contains them."""
        first = self._first
        return rows if len(rows) == self.steps else rows[first : first + self.steps]

    @cached_property
    def resets(self) -> Tensor:
        """Where lanes start a recording."""
        resets = self.metadata.flags(self._inputs.device)[0, self.span]
        if not resets.is_cpu:
            attach(resets, self.reset_steps)
        return resets

    @cached_property
    def mask(self) -> Tensor:
        """Which steps count."""
        return self.metadata.flags(self._inputs.device)[1, self.span]

    def _sent(self, name: str) -> Tensor:
        """A tensor of the metadata, where the inputs are."""
        return send(getattr(self.metadata, name)[self.span], self._inputs.device)

    @cached_property
    def recording(self) -> Tensor:
        """The index of each lane's recording."""
        return self._sent("recording")

    @cached_property
    def position(self) -> Tensor:
        """The step within it."""
        return self._sent("position")

    @cached_property
    def starts(self) -> Tensor:
        """The first steps of recordings."""
        return self.position == 0

    @cached_property
    def ends(self) -> Tensor:
        """Their last steps."""
        return self._sent("ends")

    @cached_property
    def valid(self) -> Tensor:
        """`(N,)` int64, `step * B + lane` of the valid steps; on the device of the inputs."""
        mask = self.mask.flatten()
        if mask.is_cpu:
            return mask.nonzero().flatten()
        # nonzero would wait for the device; the number is known
        return (~mask).byte().argsort(stable=True)[: self.valid_steps]

    @property
    def host_targets(self) -> Tensor | None:
        """The targets on the host; those that were sent to a device are not read back."""
        sent = attached(self._targets)
        if sent is not None:
            return self._cut_rows(sent)
        return None if self.targets is None else self.targets.cpu()

    @overload
    def __getitem__(self, span: slice) -> "Chunk": ...

    @overload
    def __getitem__(self, span: str) -> Tensor: ...

    def __getitem__(self, span: slice | str) -> "Chunk | Tensor":
        """The steps of a slice, without a stride, or the series of a name; shares memory.

        Raises:
            TypeError: an index that is neither a name nor a slice of adjacent steps.
            DataError: no series has this name.
        """
        if isinstance(span, str):
            if span not in self._series:
                raise DataError(
                    f"the chunk has no series '{span}', only {listed(self._series, quoted=True)}."
                    " Give every recording an array of this name, with one row per step"
                )
            return self.series[span]
        # iteration asks for an int
        if not isinstance(span, slice) or span.step not in (None, 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"a chunk has no index {span!r}, only slices of adjacent steps: chunk[10:20], and"
                " names of series. Where several chunks are expected, give a list: [chunk]"
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
            self._series,
        )

    def lane(self, index: int) -> "Chunk":
        """The chunk of one lane, `(T, 1, ...)`; shares memory with this one.

        Args:
            index: of the lane; -1 is the last one.

        Raises:
            IndexError: the chunk has no such lane.
        """
        first = range(self.lanes)[index]

        def column(rows: Tensor) -> Tensor:
            return rows.narrow(1, first, 1)

        targets = None if self.targets is None else column(self.targets)
        metadata = ChunkMetadata.of(*map(column, self._on_host()))
        series = {name: column(rows) for name, rows in self.series.items()}
        return Chunk(column(self.inputs), targets, metadata, 0, self.steps, 0, series)

    def runs(self) -> Iterator[tuple[tuple[slice, slice], "Chunk"]]:
        """The unbroken runs of a recording's steps, lane by lane: `(at, run)`.

        A run is a chunk `(T', 1, ...)`, and `outputs[at]` are its outputs.

        A run ends where its lane resets, where its recording ends, or with the chunk. Steps after
        the end of a lane's data are in no run; masked steps are. `starts` and `ends` of a run tell
        whether its first and last step are those of the recording. Nothing waits for a device;
        `run.metadata.ends[run.span]` is on the host.

        Cost: about 35 microseconds for each lane, and 7 for each further run of it.

        Example:
            >>> import numpy as np, throughtime as tt
            >>> recordings = [np.zeros((n, 2)) for n in (5, 3, 4)]
            >>> chunk = next(iter(tt.Stream(recordings, lanes=2, chunk=7, seed=None)))
            >>> [(run.steps, bool(run.starts[0]), bool(run.ends[-1])) for _, run in chunk.runs()]
            [(5, True, True), (3, True, True), (4, True, True)]
        """
        resets, _, recording, _, ends = self._on_host()
        breaks = resets.clone()
        breaks[1:] |= ends[:-1] | (recording.diff(dim=0) != 0)
        for index in range(self.lanes):
            lane = self.lane(index)
            edges = {0, *breaks[:, index].nonzero().flatten().tolist(), self.steps}
            for start, stop in pairwise(sorted(edges)):
                if recording[start, index] >= 0:
                    yield (slice(start, stop), slice(index, index + 1)), lane[start:stop]

    def _on_host(self) -> list[Tensor]:
        """Resets, mask, recording, position and ends on the host."""
        return [getattr(self.metadata, name)[self.span] for name in PER_STEP]

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
            >>> from throughtime.chunk import Chunk
            >>> mask = torch.arange(10).view(5, 2) > 3
            >>> chunk = Chunk.from_tensors(torch.zeros(5, 2, 3), torch.zeros(5, 2), mask=mask)
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
            rows, targets = (values.index_select(0, self.valid) for values in (rows, targets))
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
        device, dtype, labels = *placement[:2], self.targets

        def cast(values: Tensor) -> Tensor:
            return values if dtype is None or not values.is_floating_point() else values.to(dtype)

        if labels is not None:
            labels = self._as_classes(labels) if placement.targets == "classes" else labels
            if placement.targets == "numbers" and not labels.is_floating_point():
                labels = labels.to(dtype or torch.get_default_dtype())
            before = cast(labels)
            labels = send(before, device)
            if before.is_cpu and not labels.is_cpu:
                attach(labels, before)
        rows = send(cast(self.inputs), device)
        series = {name: send(cast(values), device) for name, values in self.series.items()}
        same = all(values is self.series[name] for name, values in series.items())
        if same and rows is self.inputs and labels is self.targets:
            return self
        return Chunk(rows, labels, self.metadata, self.start, self.stop, 0, series)

    def _as_classes(self, targets: Tensor) -> Tensor:
        """Class indices `(T, B)`, int64; a target of several columns is no class: unchanged."""
        if targets.shape[2:] not in ((), (1,)):
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


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Concatenate adjacent chunks, in order; copies, unless there is only one."""
    if len(chunks) == 1:
        return chunks[0]
    inputs = torch.cat([chunk.inputs for chunk in chunks])
    several = [chunk.targets for chunk in chunks if chunk.targets is not None]
    targets = torch.cat(several) if len(several) == len(chunks) else None
    if targets is not None and all(attached(chunk._targets) is not None for chunk in chunks):
        attach(targets, torch.cat([rows for c in chunks if (rows := c.host_targets) is not None]))
    names = dict.fromkeys(name for chunk in chunks for name in chunk._series)  # all have all
    series = {name: torch.cat([chunk[name] for chunk in chunks]) for name in names}
    metadata, start, device = chunks[0].metadata, chunks[0].start, inputs.device
    if any(a.metadata is not b.metadata or a.stop != b.start for a, b in pairwise(chunks)):
        parts = zip(*(chunk._on_host() for chunk in chunks), strict=True)
        metadata, start = ChunkMetadata.of(*map(torch.cat, parts)), 0
        if any(device in chunk.metadata._flags for chunk in chunks):  # which are not sent again
            flags = [chunk.metadata.flags(device)[:, chunk.span] for chunk in chunks]
            metadata._flags[device] = torch.cat(flags, 1)
    return Chunk(inputs, targets, metadata, start, start + len(inputs), 0, series)


class Source(Protocol):
    """The steps of one epoch, from which a gradient policy takes chunks of any length."""

    @property
    def once(self) -> bool:
        """Whether each step can be read only once, as those of an iterator."""
        ...

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
