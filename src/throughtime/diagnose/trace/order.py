"""Where the steps of one direction of a layer lie in its data: forward or backward in time, packed
or not.

Shapes: `T` steps, `B` lanes, `N` rows of packed data.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Order(NamedTuple):
    """The order in which a direction plays the steps, and the way back.

    Attributes:
        reverse: whether it begins at the end.
        rows: `(T, B)`, for packed data the row of each step, as played; 0 past a lane's end.
            `None`: the data are `(T, B, ...)`.
        in_time: the same in the order of time.
        there: `(T, B)`, whether the lane has that step.
    """

    reverse: bool
    rows: Tensor | None = None
    in_time: Tensor | None = None
    there: Tensor | None = None

    @classmethod
    def of(cls, sizes: Tensor | None, reverse: bool, device: torch.device) -> "Order":
        """For the lanes per step of a `PackedSequence`, or `None`."""
        if sizes is None:
            return cls(reverse)
        steps, lanes = torch.arange(len(sizes)).unsqueeze(1), torch.arange(int(sizes[0]))
        there = lanes < sizes.unsqueeze(1)
        rows = torch.where(there, (sizes.cumsum(0) - sizes).unsqueeze(1) + lanes, 0)
        played = (
            torch.where(there, rows.gather(0, (there.sum(0) - 1 - steps).clamp(min=0)), 0)
            if reverse
            else rows
        )
        return cls(reverse, played.to(device), rows.to(device), there.to(device))

    def played(self, data: Tensor) -> Tensor:
        """`(T, B, ...)` in the order of play, zeros past a lane's end."""
        return (
            self._padded(data, self.rows)
            if self.rows is not None
            else data.flip(0)
            if self.reverse
            else data
        )

    def laid_back(self, played: Tensor) -> Tensor:
        """The inverse of `played`: as the data lie."""
        if self.rows is None or self.there is None:
            return played.flip(0) if self.reverse else played
        found = played.new_zeros(int(self.there.sum()), *played.shape[2:])
        return found.index_copy(0, self.rows[self.there], played[self.there])

    def timed(self, played: Tensor) -> Tensor:
        """`(T, B, ...)` in the order of time, zeros past a lane's end."""
        back = self.laid_back(played)
        return back if self.in_time is None else self._padded(back, self.in_time)

    def _padded(self, data: Tensor, rows: Tensor) -> Tensor:
        there = torch.ones_like(rows, dtype=torch.bool) if self.there is None else self.there
        return data[rows] * there.unsqueeze(2)

    def at_the_end(self, last: Tensor, steps: int) -> Tensor | None:
        """What belongs to each lane's last step, `(B, ...)`, there, `(T, B, ...)`.

        `None` where all end together.
        """
        if self.there is None:
            return None
        found = last.new_zeros(steps, *last.shape)
        found[self.there.sum(0) - 1, torch.arange(len(last), device=last.device)] = last
        return found
