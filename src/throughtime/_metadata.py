"""The metadata of chunks: on the host, and copies on a device for what computes there.

Python decides from the host's tensors where recordings start and which steps count. A device gets
copies of them in one transfer for each block of a stream, when something there first needs them.

Shapes: `T` steps, `B` lanes, `N` valid steps.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from throughtime._device import send, send_together

PER_STEP = ("resets", "mask", "recording", "position")


def reset_positions(resets: Tensor) -> Sequence[int]:
    """The steps at which any lane is reset, ascending; `resets` are `(T, B)` or `(T,)`.

    Those of a chunk on a device carry them along, unless they were changed in place since; others
    are read, which waits for a device.
    """
    steps, version = getattr(resets, "_reset_steps", (None, 0))
    if steps is not None and version == resets._version:
        return steps
    marked = resets.any(dim=1) if resets.dim() == 2 else resets
    return marked.nonzero().flatten().tolist()


@dataclass(frozen=True, eq=False)
class ChunkMetadata:
    """Resets, mask, recording and position of every step, and counts of valid steps.

    The tensors are on the host, whatever the device of the chunk, so that the plan of an update
    waits for no device. Shared by all chunks sliced from the same block, so slicing a chunk slices
    none of these.
    """

    resets: Tensor
    mask: Tensor
    recording: Tensor
    position: Tensor
    reset_steps: tuple[int, ...]  # steps at which any lane resets, ascending
    valid_before: Sequence[int]  # valid steps before each step, over all lanes: T + 1 entries
    _copies: dict[torch.device, dict[str, Tensor]] = field(
        default_factory=dict[torch.device, dict[str, Tensor]], init=False, repr=False
    )
    # on a device: the steps of other metadata that these were joined from, whose copies they use
    _parts: list[tuple["ChunkMetadata", int, int]] = field(
        default_factory=list[tuple["ChunkMetadata", int, int]], init=False, repr=False
    )

    @classmethod
    def of(
        cls, resets: Tensor, mask: Tensor, recording: Tensor, position: Tensor
    ) -> "ChunkMetadata":
        """Compute the counts from the tensors, and move these to the host."""
        resets, mask, recording, position = (
            tensor.cpu() for tensor in (resets, mask, recording, position)
        )
        reset_steps = tuple(resets.any(dim=1).nonzero().flatten().tolist())
        # the usual case: all steps are valid, and a range is enough
        full = mask.numel() > 0 and bool(mask.all())
        valid_before = (
            range(0, mask.numel() + 1, mask.shape[1])
            if full
            else (0, *accumulate(mask.sum(dim=1).tolist()))
        )
        return cls(resets, mask, recording, position, reset_steps, valid_before)

    @cached_property
    def valid(self) -> Tensor:
        """`(N,)` int64, the valid steps in order: `step * B + lane`."""
        return self.mask.flatten().nonzero().flatten()

    def on(self, name: str, device: torch.device) -> Tensor:
        """One of the tensors on a device; `valid`, resets and mask are copied together, once."""
        if device.type == "cpu":
            return getattr(self, name)
        copies = self._copies.setdefault(device, {})
        if name not in copies:
            flags = name in ("valid", "resets", "mask")
            copies.update(
                self._flags(device) if flags else {name: send(getattr(self, name), device)}
            )
        return copies[name]

    def _flags(self, device: torch.device) -> dict[str, Tensor]:
        """`valid`, resets and mask on a device, in one transfer or from those of the parts."""
        if self._parts:
            ends = [0, *accumulate(stop - start for _, start, stop in self._parts)]
            pieces = [
                part._span_flags(device, start, stop, at)
                for (part, start, stop), at in zip(self._parts, ends, strict=False)
            ]
            return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        if self._is_plain(0, len(self.mask)):
            return self._span_flags(device, 0, len(self.mask), 0)
        names = ("valid", "resets", "mask")
        sent = send_together((self.valid, self.resets, self.mask), device)
        return dict(zip(names, sent, strict=True))

    def _span_flags(
        self, device: torch.device, start: int, stop: int, at: int
    ) -> dict[str, Tensor]:
        """Those of some steps, which are to be counted from `at` on."""
        lanes, before = self.mask.shape[1], self.valid_before
        if self._is_plain(start, stop):  # nothing to send
            resets = torch.zeros((stop - start, lanes), dtype=torch.bool, device=device)
            valid = torch.arange(at * lanes, (at + stop - start) * lanes, device=device)
            return {"valid": valid, "resets": resets, "mask": ~resets}
        valid = self.on("valid", device)[before[start] : before[stop]] + (at - start) * lanes
        resets, mask = (self.on(name, device)[start:stop] for name in ("resets", "mask"))
        return {"valid": valid, "resets": resets, "mask": mask}

    def _is_plain(self, start: int, stop: int) -> bool:
        """Whether no lane resets in these steps, and all of them count."""
        first, last = (bisect_left(self.reset_steps, step) for step in (start, stop))
        counted = self.valid_before[stop] - self.valid_before[start]
        return first == last and counted == (stop - start) * self.mask.shape[1]

    def _pieces(self, start: int, stop: int) -> list[tuple["ChunkMetadata", int, int]]:
        """What some steps were joined from: themselves if they were not."""
        if not self._parts:
            return [(self, start, stop)]
        pieces, at = list[tuple[ChunkMetadata, int, int]](), 0
        for part, first, last in self._parts:
            begin, end = max(first, first + start - at), min(last, first + stop - at)
            pieces += [(part, begin, end)] if begin < end else []
            at += last - first
        return pieces
