"""The loss of a chunk.

Outputs and targets of the valid steps are flattened as users do by hand.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` valid steps.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from throughtime.carry.carried import device_of, dtype_of
from throughtime.chunk import Chunk, Placement
from throughtime.errors import ModelError
from throughtime.gradient._pairing import check_rows

IGNORED = -100  # torch's own ignore_index; a stream masks such steps

LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Scaler(Protocol):
    """Scales a loss before its backward pass, as `torch.amp.GradScaler` does."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the current scale."""
        ...


_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_NUMBERS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
)
_CLASS_FUNCTIONS = (functional.cross_entropy, functional.nll_loss, functional.multi_margin_loss)
_NUMBER_FUNCTIONS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.poisson_nll_loss,
)


def target_kind(loss_fn: object) -> Literal["classes", "numbers"] | None:
    """The targets that a loss of torch takes, as a module or a function; `None` for others.

    Example:
        >>> target_kind(nn.CrossEntropyLoss()), target_kind(nn.functional.mse_loss)
        ('classes', 'numbers')
    """
    while isinstance(loss_fn, partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, _CLASSES) or any(loss_fn is f for f in _CLASS_FUNCTIONS):
        return "classes"
    if isinstance(loss_fn, _NUMBERS) or any(loss_fn is f for f in _NUMBER_FUNCTIONS):
        return "numbers"
    return None


class Objective:
    """A user's loss function over the valid steps of a chunk.

    Args:
        loss_fn: the user's function or module.
        scaler: a `torch.amp.GradScaler`, or None.

    Raises:
        ModelError: a loss module that sums.
    """

    def __init__(self, loss_fn: LossFn, scaler: Scaler | None = None) -> None:
        self.loss_fn, self.scaler = loss_fn, scaler
        self._checked = False  # whether a call on several rows has been checked
        # weights of classes on a device, an alias, torch's count of their changes, and a copy
        self._class_weight: tuple[Tensor, Tensor, int, Tensor] | None = None
        if isinstance(loss_fn, nn.Module) and getattr(loss_fn, "reduction", "mean") == "sum":
            raise ModelError(
                "loss_fn has reduction='sum', expected 'mean': chunks, lanes and updates are"
                " weighted by their valid steps, which takes the mean over the rows of each"
            )

    def placement(self, net: nn.Module, device: torch.device | None = None) -> Placement:
        """Where the net and the loss need chunks: on this device, or that of the weights."""
        return Placement(device or device_of(net), dtype_of(net), target_kind(self.loss_fn))

    def __call__(self, outputs: Tensor, chunk: Chunk) -> tuple[Tensor, float]:
        """The mean loss over the valid steps of a chunk, and its weight in that of several.

        Args:
            outputs: `(T, B, C)`, of the steps of the chunk.
            chunk: with targets.

        Returns:
            A scalar with a graph, a zero without one if no step counts; and the weight.
        """
        weight = self.weight(chunk)
        return (self.loss(outputs, chunk) if weight else outputs.new_zeros(())), weight

    def loss(self, outputs: Tensor, chunk: Chunk) -> Tensor:
        """The mean loss over the valid steps, a scalar with a graph.

        Raises:
            ModelError: the targets need another number of outputs, the function returns no scalar,
                or its first call on two or more rows pairs
                rows: it broadcasts `(N,)` against `(N, 1)`.
        """
        rows, targets = chunk.valid_pairs(outputs)
        try:
            if self._checked or len(rows) < 2:
                loss = self.loss_fn(rows, targets)
            else:
                loss = check_rows(self.loss_fn, rows, targets, "loss_fn")
                self._checked = True
        except (RuntimeError, ValueError, IndexError) as error:
            classes, width = targets.dim() == 1, rows.shape[-1]
            needed = int(targets.max()) + 1 if classes else targets.shape[1]
            fits = needed <= width if classes else needed == width
            if target_kind(self.loss_fn) and not fits:
                raise ModelError(
                    f"the net has {width} outputs in each step, and the targets of the stream need"
                    f" {needed}, one for each class or column: build its last layer for them"
                ) from error
            error.add_note(
                f"throughtime: loss_fn got outputs {tuple(rows.shape)} of {rows.dtype} on"
                f" {rows.device} and targets {tuple(targets.shape)} of {targets.dtype} on"
                f" {targets.device}, one row for each valid step. A loss over classes takes indexes"
                " (N,), one over numbers the shape of the outputs"
            )
            raise
        known = torch.is_tensor(loss)  # a user's loss_fn may return anything
        if not known or loss.dim():
            got = f"tensor of shape {tuple(loss.shape)}" if known else type(loss).__name__
            raise ModelError(
                f"loss_fn returned a {got}, expected one number in a tensor: the mean over its"
                f" {len(rows)} rows. Is it made with reduction='none'?"
            )
        return loss

    def weight(self, chunk: Chunk) -> float:
        """The weight of this chunk's mean loss in that of several: its valid steps.

        For torch's losses over classes, ignored classes do not count, and the others count with
        their class weights.
        """
        fn, valid = self.loss_fn, chunk.valid_steps
        if not valid or not isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
            return float(valid)
        weight, own = fn._buffers["weight"], chunk._targets
        changed = own is not None and not own.is_inference() and own._version
        if weight is None and fn.ignore_index == IGNORED and not changed:
            return float(valid)  # a chunk masks such steps
        targets = chunk.host_targets
        if targets is None or targets.is_floating_point():
            return float(valid)
        if valid < chunk.steps * chunk.lanes:
            targets = targets[chunk.metadata.mask[chunk.span]]
        counted = targets[targets != fn.ignore_index]
        return float(counted.numel() if weight is None else self._host(weight)[counted].sum())

    def _host(self, weight: Tensor) -> Tensor:
        """The class weights on the host: read from a device once.

        The alias keeps the memory of weights whose `.data` is replaced, so no others get it.
        """
        if weight.is_cpu:
            return weight
        known = self._class_weight
        version = 0 if weight.is_inference() else weight._version
        if (
            known is None
            or known[0] is not weight
            or known[1].data_ptr() != weight.data_ptr()
            or known[2] != version
        ):
            known = self._class_weight = weight, weight.detach(), version, weight.cpu()
        return known[3]

    def recordings_at_fault(self, outputs: Tensor | None, chunk: Chunk) -> list[int]:
        """The recordings whose own loss is not finite; if there are none, all of the chunk."""
        at_fault: list[int] = []
        if outputs is not None:
            rows, targets = chunk.valid_pairs(outputs.detach())
            owners = chunk.recording[chunk.mask]
            with torch.no_grad():
                at_fault = [
                    index
                    for index in owners.unique().tolist()
                    if not self.loss_fn(rows[owners == index], targets[owners == index]).isfinite()
                ]
        return at_fault or chunk.recording[chunk.recording >= 0].unique().tolist()


def require_gradient(reached: bool) -> None:
    """Refuse a loss that depends on no parameter."""
    if not reached:
        raise ModelError(
            "the loss depends on no parameter that requires a gradient: is every parameter frozen,"
            " or does the net or loss_fn detach its outputs?"
        )


def trainable_weights(net: nn.Module, loss_fn: object = None) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name: of the net, and of a loss that has its own.

    The name has no leading `module.`; that of a loss's parameter begins with `loss_fn.`.
    """
    weights: dict[str, Tensor] = {
        name.removeprefix("module."): weight
        for name, weight in net.named_parameters()
        if weight.requires_grad
    }
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        shared = {*map(id, weights.values())}
        weights |= {
            f"loss_fn.{name}": weight
            for name, weight in loss_fn.named_parameters()
            if weight.requires_grad and id(weight) not in shared
        }
    return weights


def sizes(tensors: list[Tensor]) -> Tensor:
    """A number for each tensor that is finite if all of it is, but for an overflow; no wait."""
    if tensors[0].is_cpu or any(type(t) is not Tensor or t.is_sparse for t in tensors):
        return torch.stack([tensor.detach().sum() for tensor in tensors])
    # as torch's clip_grad_norm_ does: one kernel there, on a CPU slower than sums
    norms = torch._foreach_norm(tensors, math.inf)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack([norm.to(tensors[0].device, torch.float32) for norm in norms])
