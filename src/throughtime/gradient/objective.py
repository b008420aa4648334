"""The loss of a chunk, and the check that its gradient is finite.

Outputs and targets of the valid steps are flattened as users do by hand.

Shapes: `T` steps, `B` lanes, `C` outputs, `N` valid steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from throughtime.carry._ports import Link, links
from throughtime.carry.carried import Carried, device_of, dtype_of
from throughtime.chunk import Chunk, Placement
from throughtime.errors import ModelError, RunError, listed
from throughtime.gradient._finite import LateChecks, first_nonfinite, is_finite
from throughtime.gradient._pairing import check_rows

IGNORED = -100  # torch's own ignore_index; a stream masks such steps

LossFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Scaler(Protocol):
    """Scales a loss before its backward pass, as `torch.amp.GradScaler` does."""

    def scale(self, outputs: Tensor) -> Tensor:
        """The loss times the current scale."""
        ...


class Reducer(Protocol):
    """Reductions over the ranks that train one net."""

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of each value over the ranks."""
        ...

    def weighted_mean(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        """The mean of each tensor over the ranks by their weights; zeros if all weights are 0."""
        ...

    def broadcast(self, value: int) -> int:
        """The value of the first rank."""
        ...


_OUTCOMES = {
    "kept": "`.grad` and the weights are unchanged",
    "written": "The weights are unchanged; call zero_grad() before you go on",
    "zeroed": (
        "It is the update before this one. Its `.grad` was set to zero on the device, so the"
        " optimizer's step left the weights finite: only momentum and weight decay moved them. To"
        " stop before that step, write tt.updates(..., finite='now')"
    ),
}
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


@dataclass(eq=False)
class _Memory:
    """What is known of a loss function after its first calls; copies of an objective share it.

    Attributes:
        checked: whether a call on several rows has been checked.
        class_weight: its weights of classes on a device, an alias, torch's count of their changes,
            and a copy on the host.
    """

    checked: bool = False
    class_weight: tuple[Tensor, Tensor, int, Tensor] | None = None


@dataclass(frozen=True)
class Objective:
    """A user's loss function over the valid steps of a chunk.

    Attributes:
        loss_fn: the user's function or module.
        scaler: a `torch.amp.GradScaler`, or None.
        reducer: over the ranks, if other ranks have valid steps of their own.
        late: takes the flags of devices that are read before the next update; None: every update
            waits for its own.
    """

    loss_fn: LossFn
    scaler: Scaler | None = None
    reducer: Reducer | None = None
    late: LateChecks | None = field(default=None, compare=False)
    _memory: _Memory = field(default_factory=_Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        if (
            isinstance(self.loss_fn, nn.Module)
            and getattr(self.loss_fn, "reduction", "mean") == "sum"
        ):
            raise ModelError(
                "loss_fn has reduction='sum', expected 'mean': chunks, lanes and updates are"
                " weighted by their valid steps, which takes the mean over the rows of each"
            )

    def placement(self, net: nn.Module, device: torch.device | None = None) -> Placement:
        """Where the net and the loss need chunks: on this device, or that of the weights."""
        return Placement(device or device_of(net), dtype_of(net), target_kind(self.loss_fn))

    def loss(self, outputs: Tensor, chunk: Chunk) -> Tensor:
        """The mean loss over the valid steps, a scalar with a graph.

        Raises:
            ModelError: the function returns no scalar, or its first call on two or more rows pairs
                rows: it broadcasts `(N,)` against `(N, 1)`.
        """
        rows, targets = chunk.valid_pairs(outputs)
        try:
            if self._memory.checked or len(rows) < 2:
                loss = self.loss_fn(rows, targets)
            else:
                loss = check_rows(self.loss_fn, rows, targets, "loss_fn")
                self._memory.checked = True
        except (RuntimeError, ValueError, IndexError) as error:
            if fault := self._device_fault(outputs.device):
                raise ModelError(fault) from error
            shapes = (f"{tuple(t.shape)} of {t.dtype}" for t in (rows, targets))
            error.add_note(
                "throughtime: loss_fn got outputs {} and targets {}, one row for each valid step."
                " A loss over classes takes indexes (N,), one over numbers the shape of the"
                " outputs".format(*shapes)
            )
            raise
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

    def _device_fault(self, device: torch.device) -> str | None:
        """Name the first tensor of the loss module that is not where the outputs are."""
        if isinstance(self.loss_fn, nn.Module):
            for name, own in chain(self.loss_fn.named_parameters(), self.loss_fn.named_buffers()):
                if own.device != device:
                    return (
                        f"'{name}' of loss_fn is on {own.device}, the outputs of the net on"
                        f" {device}: write loss_fn = loss_fn.to({str(device)!r})"
                    )
        return None

    def loss_weight(self, chunk: Chunk) -> float:
        """The weight of this chunk's mean loss in that of several: its valid steps.

        For torch's losses over classes, ignored classes do not count, and the others count with
        their class weights.
        """
        fn = self.loss_fn
        if not isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
            return chunk.valid_steps
        targets, weight = chunk.host_targets, fn.weight
        if targets is None or targets.is_floating_point():
            return chunk.valid_steps
        if chunk.valid_steps < chunk.steps * chunk.lanes:
            targets = targets[chunk.metadata.mask[chunk.span]]
        counted = targets != fn.ignore_index
        if weight is None:
            return counted.sum().item()
        return self._host_weight(weight)[targets[counted]].sum().item()

    def _host_weight(self, weight: Tensor) -> Tensor:
        """The class weights on the host: read from a device once.

        The alias keeps the memory of weights whose `.data` is replaced, so no others get it.
        """
        if weight.is_cpu:
            return weight
        known = self._memory.class_weight
        version = 0 if weight.is_inference() else weight._version
        if (
            known is None
            or known[0] is not weight
            or known[1].data_ptr() != weight.data_ptr()
            or known[2] != version
        ):
            known = self._memory.class_weight = weight, weight.detach(), version, weight.cpu()
        return known[3]

    def counts(self, chunk: Chunk) -> bool:
        """Whether any step of the chunk counts in the loss."""
        fn = self.loss_fn
        if (
            chunk.valid_steps
            and isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss))
            and (fn._buffers["weight"] is not None or fn.ignore_index != IGNORED)
        ):
            return self.loss_weight(chunk) > 0
        return chunk.valid_steps > 0

    def rank_weight(self, chunk: Chunk) -> float | None:
        """The weight of this chunk's gradient among those of other ranks, if there are any."""
        return None if self.reducer is None else self.loss_weight(chunk)

    def mean(self, value: float) -> float:
        """The mean of a value over the ranks."""
        return value if self.reducer is None else self.reducer.mean([value])[0]

    def same_on_ranks(self, value: int) -> int:
        """The value of the first rank: random draws must be equal on all of them."""
        return value if self.reducer is None else self.reducer.broadcast(value)

    @staticmethod
    def check_depends(gradients: Sequence[Tensor | None]) -> None:
        """Refuse a loss that depends on no parameter."""
        if all(gradient is None for gradient in gradients):
            raise ModelError(
                "the loss depends on no parameter that requires a gradient: is every parameter"
                " frozen, or does the net or loss_fn detach its outputs?"
            )

    def check_weights(self, outputs: Tensor, chunk: Chunk) -> None:
        """Refuse a function with weights of its own: they could not be given a gradient."""
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
        """The current scale of the scaler; 1 without one."""
        if self.scaler is None:
            return 1.0
        return self.scaler.scale(torch.ones((), device=like.device)).item()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the scaler's scale: the start of the backward pass."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def nonfinite_message(
        self,
        name: str | None,
        result: tuple[Tensor, Tensor],
        chunk: Chunk,
        start: int,
        *,
        outcome: Literal["kept", "written", "zeroed"] = "kept",
    ) -> str:
        """The message for a gradient, or a loss, that is not finite.

        Args:
            name: of the weight; `None` if all gradients are finite.
            result: the loss of the chunk, and its outputs.
            chunk: the steps.
            start: the first of them in the epoch.
            outcome: of `.grad`: unchanged, written already, or set to zero on the device.
        """
        loss = result[0].item()
        recordings = self._nonfinite_recordings(result[1], chunk)
        subject = "the loss" if name is None else f"the gradient of '{name}'"
        return (
            f"{subject} is not finite (NaN or infinite) in the chunk of steps {start} to"
            f" {start + chunk.steps - 1} of the epoch (recording {listed(recordings)}), whose part"
            f" of the loss is {loss:.6g}. {_OUTCOMES[outcome]}. Check the inputs and targets of"
            " these steps. If they are sound, the net or its gradient explodes: lower the learning"
            " rate, or cut or clip the credit (a shorter horizon, clip_grad_norm_, or tt.Exact with"
            " clip_adjoint)."
        )

    def check_late(
        self,
        gradients: Mapping[str, Tensor],
        result: tuple[Tensor, Tensor],
        chunk: Chunk,
        start: int,
    ) -> bool:
        """Leave the check of gradients on a device to the next update; false to check now.

        Args:
            gradients: by the names of their weights; zero from now on if they are not finite.
            result: the loss of the chunk, and its outputs.
            chunk: the steps.
            start: the first of them in the epoch.
        """
        if self.late is None or result[0].is_cpu:
            return False
        loss, outputs = (tensor.detach() for tensor in result)  # the graph is released now

        def message(name: str | None) -> str:
            return self.nonfinite_message(name, (loss, outputs), chunk, start, outcome="zeroed")

        return self.late.add(gradients, loss, message)

    def _nonfinite_recordings(self, outputs: Tensor, chunk: Chunk) -> list[int]:
        """The recordings whose own loss is not finite; if there are none, all of the chunk."""
        rows, targets = chunk.valid_pairs(outputs.detach())
        owners = chunk.recording[chunk.mask]
        with torch.no_grad():
            at_fault = [
                index
                for index in owners.unique().tolist()
                if not self.loss_fn(rows[owners == index], targets[owners == index]).isfinite()
            ]
        return at_fault or sorted(set(chunk.recording[chunk.recording >= 0].tolist()))


def trainable_weights(net: nn.Module, loss_fn: object = None) -> dict[str, Tensor]:
    """The parameters that require a gradient, by name: of the net, and of a loss that has its own.

    The name has no leading `module.`; that of a loss's parameter begins with `loss_fn.`.
    """
    weights: dict[str, Tensor] = {
        name.removeprefix("module."): weight
        for name, weight in net.named_parameters()
        if weight.requires_grad
    }
    if isinstance(loss_fn, nn.Module):
        shared = {id(weight) for weight in weights.values()}
        weights |= {
            f"loss_fn.{name}": weight
            for name, weight in loss_fn.named_parameters()
            if weight.requires_grad and id(weight) not in shared
        }
    return weights


@dataclass(frozen=True)
class GradientEnds:
    """The first and the last parameter of a net that have a gradient.

    Attributes:
        weights: the two.
        outer: the parameters before the first and after the last, which have no gradient.
        links: from the net to each of them, see `links`.
    """

    weights: list[Tensor]
    outer: list[Tensor]
    links: list[Link]

    @classmethod
    def of(cls, net: nn.Module) -> "GradientEnds":
        """Those of a net."""
        named = list(net.named_parameters())
        inner = [i for i, (_, weight) in enumerate(named) if weight.grad is not None]
        first, last = (inner[0], inner[-1]) if inner else (len(named), 0)
        ends = [named[i] for i in sorted({*inner[:1], *inner[-1:]})]
        outer = [*named[:first], *(named[last + 1 :] if inner else ())]
        paths = [link for name, _ in (*ends, *outer) for link in links(net, name)]
        return cls([weight for _, weight in ends], [weight for _, weight in outer], paths)

    def hold(self) -> bool:
        """Whether they still are: no part was replaced, no other gradient appeared."""
        for parts, name, part in self.links:
            if parts.get(name) is not part:
                return False
        for weight in self.weights:
            if weight.grad is None:
                return False
        for weight in self.outer:
            if weight.grad is not None:
                return False
        return bool(self.weights)


def check_finite(
    net: Carried,
    objective: Objective,
    result: tuple[Tensor, Tensor],
    chunk: Chunk,
    start: int,
    *,
    everywhere: bool = False,
) -> None:
    """Refuse a loss, or a `.grad`, that is not finite.

    Reads the loss, and the first and the last parameter, at 2 to 4 microseconds each. A value that
    is not finite spreads to all layers before it, and the layers next to the inputs are at one of
    the two ends. All parameters are read if one of these is not finite, or with `everywhere`. On a
    device all of them are checked, and nothing is read where the objective takes flags.

    Args:
        net: made by `tt.carry`.
        objective: the loss.
        result: its value, and the outputs.
        chunk: the steps of the loss.
        start: the first of them in the epoch.
        everywhere: whether to read all parameters.

    Raises:
        RunError: loss or gradient are not finite; parameter and steps are named.
    """
    if objective.late is not None and not result[0].is_cpu:
        weights = trainable_weights(net, objective.loss_fn).items()
        grads = {name: weight.grad for name, weight in weights if weight.grad is not None}
        if objective.check_late(grads, result, chunk, start):
            return
    ends = net._gradient_ends
    if not isinstance(ends, GradientEnds) or not ends.hold():
        ends = net._gradient_ends = GradientEnds.of(net)
    if not everywhere and is_finite(result[0], [weight.grad for weight in ends.weights]):
        return
    named = ((name, w.grad) for name, w in net.named_parameters() if w.requires_grad)
    name = first_nonfinite(named)
    if name is not None or not bool(result[0].isfinite()):
        name = None if name is None else name.removeprefix("module.")
        raise RunError(objective.nonfinite_message(name, result, chunk, start, outcome="written"))
