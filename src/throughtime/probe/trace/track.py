"""One layer, direction or cell under watch, by name: counts its steps and notes what its calls are seen to do.

Shapes: `T` steps, `B` lanes, `H` numbers of a state or gate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from throughtime.probe.trace.passes import History, Noted


class Noting(Protocol):
    """What takes in what was seen."""

    def note(
        self,
        start: int,
        seen: Mapping[str, Tensor],
        entering: Mapping[str, Tensor],
        kept: tuple[Tensor, int] | None,
        came: list[Tensor],
        went: list[Tensor],
    ) -> None:
        """As `Track.note`."""
        ...


@dataclass(eq=False)
class Track:
    """The steps of one name.

    Attributes:
        name: `layer0`, `lstm.layer1`, `cell`.
        history: where runs are noted.
        tensors: whether gradients are kept, besides their norms.
        steps: played so far with a graph.
    """

    name: str
    history: History
    tensors: bool
    steps: int = 0

    def begin(self, steps: int) -> int:
        """The step at which a call of so many begins."""
        start = self.steps
        self.steps += steps
        return start

    def note(
        self,
        start: int,
        seen: Mapping[str, Tensor],
        entering: Mapping[str, Tensor],
        kept: tuple[Tensor, int] | None,
        came: list[Tensor],
        went: list[Tensor],
    ) -> None:
        """Takes in gradients `(T, B, ...)` by leaf, and those of the state entering, `(B, ...)`."""
        if any(batched(gradient) for gradient in seen.values()):
            return
        block = Noted(
            {leaf: _norms(gradient, 2) for leaf, gradient in seen.items()},
            {leaf: gradient.detach() for leaf, gradient in seen.items()} if self.tensors else {},
            {leaf: _norms(gradient, 1) for leaf, gradient in entering.items()},
            kept,
        )
        self.history.run().note(self.name, start, block, (came, went))


def batched(gradient: Tensor) -> bool:
    """Whether these are rows of a Jacobian (`is_grads_batched`), as `tt.Online` takes them: no gradient of a loss."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(gradient))  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]


def _norms(gradient: Tensor, rows: int) -> Tensor:
    """Over all but the first dimensions; in double precision where there is one, since squares of small numbers vanish in single."""
    flat = gradient.detach().flatten(rows) if gradient.dim() > rows else gradient.detach().unsqueeze(rows)
    kind = torch.float64 if flat.device.type != "mps" else torch.float32
    return torch.linalg.vector_norm(flat, dim=rows, dtype=torch.complex128 if flat.is_complex() else kind)
