"""The loss of a chunk: outputs and targets of its valid steps, flattened as users do by hand.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` valid steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from throughtime.chunk import Chunk
from throughtime.errors import ModelError

IGNORED = -100  # torch's own ignore_index; a stream masks such steps

LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Scaler(Protocol):
    """What `torch.amp.GradScaler` does to a loss before its backward pass."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the current scale."""
        ...


class Together(Protocol):
    """Several ranks that train one net, and must cut their streams alike."""

    def mean(self, values: Sequence[float]) -> list[float]:
        """Of each value over the ranks."""
        ...

    def joined(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        """The mean of each over the ranks, by their weights; zeros where nobody weighs anything."""
        ...

    def same(self, value: int) -> int:
        """That of the first rank."""
        ...


@dataclass(frozen=True)
class Objective:
    """A user's loss function over the valid steps of a chunk.

    `together` where other ranks have valid steps of their own.
    """

    loss_fn: LossFn
    scaler: Scaler | None = None
    together: Together | None = None

    def __post_init__(self) -> None:
        if (
            isinstance(self.loss_fn, nn.Module)
            and getattr(self.loss_fn, "reduction", "mean") == "sum"
        ):
            raise ModelError(
                "loss_fn has reduction='sum', expected 'mean': chunks, lanes and updates are"
                " weighted by their valid steps, which takes the mean over the rows of each"
            )

    def loss(self, outputs: Tensor, chunk: Chunk) -> Tensor:
        """The mean loss over the valid steps, a scalar with a graph."""
        rows, targets = chunk.valid_pairs(outputs)
        loss = self.loss_fn(rows, targets)
        # a user's loss_fn may return anything
        if not isinstance(loss, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(
                f"loss_fn returned a {type(loss).__name__}, expected a tensor with one number: the"
                f" mean over its {len(rows)} rows"
            )
        if loss.dim() != 0:
            raise ModelError(
                f"loss_fn returned a tensor of shape {tuple(loss.shape)}, expected one number: the"
                f" mean over its {len(rows)} rows. Is it made with reduction='none'?"
            )
        return loss

    def mass(self, chunk: Chunk) -> float:
        """What the mean loss of this chunk weighs in that of several: its valid steps.

        For torch's losses of classes, without those to be ignored, and each with the weight of its
        class.
        """
        fn = self.loss_fn
        if (
            not isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss))
            or chunk.targets is None
            or chunk.targets.is_floating_point()
        ):
            return chunk.valid
        targets = chunk.targets[chunk.mask]
        counted = targets[targets != fn.ignore_index]
        return float(len(counted) if fn.weight is None else fn.weight[counted].sum())

    def counts(self, chunk: Chunk) -> bool:
        """Whether any step of the chunk has a part in the loss."""
        fn = self.loss_fn
        if (
            chunk.valid
            and isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss))
            and (fn.weight is not None or fn.ignore_index != IGNORED)
        ):
            return self.mass(chunk) > 0
        return chunk.valid > 0

    def weight(self, chunk: Chunk) -> float | None:
        """What the gradient of this chunk's mean loss weighs among those of other ranks.

        `None` where there are none.
        """
        return None if self.together is None else self.mass(chunk)

    def mean(self, value: float) -> float:
        """Over the ranks."""
        return value if self.together is None else self.together.mean([value])[0]

    def alike(self, value: int) -> int:
        """A number drawn at random, the same on every rank."""
        return value if self.together is None else self.together.same(value)

    @staticmethod
    def check_depends(gradients: Sequence[Tensor | None]) -> None:
        """Refuses a loss that no parameter has a part in."""
        if all(gradient is None for gradient in gradients):
            raise ModelError(
                "the loss depends on no parameter that requires a gradient: is every parameter"
                " frozen, or does the net or loss_fn detach its outputs?"
            )

    def check_weights(self, outputs: Tensor, chunk: Chunk) -> None:
        """Refuses a function that hides weights of its own, which nobody could find to give them a gradient."""
        if (
            not isinstance(self.loss_fn, nn.Module)
            and torch.is_grad_enabled()
            and self.loss(outputs.detach(), chunk).requires_grad
        ):
            raise ModelError(
                "loss_fn is a function with weights of its own inside: they would get no gradient"
                " here. Give the module itself, loss_fn=module, whose forward takes outputs and"
                " targets."
            )

    def scale(self, like: Tensor) -> float:
        """What the scaler multiplies losses by at present."""
        return (
            1.0
            if self.scaler is None
            else self.scaler.scale(torch.ones((), device=like.device)).item()
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """What the backward pass starts from."""
        return loss if self.scaler is None else self.scaler.scale(loss)
