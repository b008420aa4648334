"""The metadata of chunks: on the host, and copies on a device for what computes there.

Python decides from the host's tensors where recordings start and which steps count. A device gets
resets and mask of a block in one transfer, when something there first needs them.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from throughtime._device import send

PER_STEP = ("resets", "mask", "recording", "position", "ends")


def attach(tensor: Tensor, value: Any) -> None:
    """Keep what the host knows about a tensor of a device, until the tensor is changed in place."""
    if not tensor.is_inference():  # which counts no changes
        setattr(tensor, "_on_host", (value, tensor._version))  # noqa: B010


def attached(tensor: Tensor | None) -> Any:
    """What the host knows about a tensor; None if nothing, or if the tensor was changed since."""
    value, version = getattr(tensor, "_on_host", (None, 0))
    return value if tensor is None or value is None or version == tensor._version else None


def reset_positions(resets: Tensor) -> Sequence[int]:
    """The steps at which any lane is reset, ascending; `resets` are `(T, B)` or `(T,)`.

    Those of a chunk on a device carry them along, unless they were changed in place since; others
    are read, which waits for a device.
    """
    steps = attached(resets)
    if steps is not None:
        return steps
    marked = resets.any(dim=1) if resets.dim() == 2 else resets
    return marked.nonzero().flatten().tolist()


@dataclass(frozen=True, eq=False)
class ChunkMetadata:
    """Resets, mask, recording, position and ends of every step, and counts of valid steps.

    The tensors are on the host, whatever the device of the chunk, so that the plan of an update
    waits for no device. Shared by all chunks sliced from the same block, so slicing a chunk slices
    none of these.
    """

    resets: Tensor
    mask: Tensor
    recording: Tensor
    position: Tensor
    ends: Tensor
    reset_steps: tuple[int, ...]  # steps at which any lane resets, ascending
    valid_before: Sequence[int]  # valid steps before each step, over all lanes: T + 1 entries
    _flags: dict[torch.device, Tensor] = field(
        default_factory=dict[torch.device, Tensor], init=False, repr=False
    )

    @classmethod
    def of(cls, *per_step: Tensor) -> "ChunkMetadata":
        """Move the five tensors to the host, and compute the counts from them."""
        resets, mask, *others = (tensor.cpu() for tensor in per_step)
        steps = tuple(reset_positions(resets))
        valid_before = (0, *accumulate(mask.sum(dim=1).tolist()))
        return cls(resets, mask, *others, reset_steps=steps, valid_before=valid_before)

    def flags(self, device: torch.device) -> Tensor:
        """`(2, T, B)` bool, resets and mask on a device; they are sent once."""
        if device not in self._flags:
            self._flags[device] = send(torch.stack([self.resets, self.mask]), device)
        return self._flags[device]
