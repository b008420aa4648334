"""One layer, direction or cell under watch, by name: counts its steps and notes what its calls are
seen to do.

Shapes: `T` steps, `B` lanes, `H` numbers of a state or gate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from throughtime.diagnose.trace.passes import History, Noted


class Shown(NamedTuple):
    """What consecutive steps of a track were seen to do, in the order of time.

    Attributes:
        gradients: by leaf, `(T, B, ...)`.
        entering: those of the state entering the first step, by leaf, `(B, ...)`.
        kept: the sum over steps and lanes of the gate that keeps the past, `(H,)`, and their
            number.
        came: the state entering the first step.
        went: the state after the last.
    """

    gradients: Mapping[str, Tensor]
    entering: Mapping[str, Tensor]
    kept: tuple[Tensor, int] | None
    came: list[Tensor]
    went: list[Tensor]


class Noting(Protocol):
    """What takes in what was seen."""

    def note(self, start: int, shown: Shown) -> None:
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

    def note(self, start: int, shown: Shown) -> None:
        """Takes in what steps from `start` on were seen to do in the engine's present run."""
        if any(batched(gradient) for gradient in shown.gradients.values()):
            return
        block = Noted(
            {leaf: _norms(gradient, 2) for leaf, gradient in shown.gradients.items()},
            (
                {leaf: gradient.detach() for leaf, gradient in shown.gradients.items()}
                if self.tensors
                else {}
            ),
            {leaf: _norms(gradient, 1) for leaf, gradient in shown.entering.items()},
            shown.kept,
        )
        self.history.run().note(self.name, start, block, (shown.came, shown.went))


def batched(gradient: Tensor) -> bool:
    """Whether these are rows of a Jacobian (`is_grads_batched`), as `tt.RTRL` takes them: no gradient of a loss."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(gradient))  # pyright: ignore[reportAttributeAccessIssue]


def _norms(gradient: Tensor, rows: int) -> Tensor:
    """Over all but the first dimensions.

    In double precision where there is one, since squares of small numbers vanish in single.
    """
    flat = (
        gradient.detach().flatten(rows)
        if gradient.dim() > rows
        else gradient.detach().unsqueeze(rows)
    )
    kind = torch.float64 if flat.device.type != "mps" else torch.float32
    return torch.linalg.vector_norm(
        flat, dim=rows, dtype=torch.complex128 if flat.is_complex() else kind
    )
