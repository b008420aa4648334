"""From gradients to new weights, for both trainers of Ignite: clipping and mixed precision."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from throughtime.carry.carried import device_of
from throughtime.errors import ConfigError, RunError
from throughtime.gradient import Update
from throughtime.gradient.objective import sizes
from throughtime.updates import Updates


@dataclass(frozen=True)
class OptimizerStep:
    """An optimizer, with autocast around the forward pass and clipping before its step."""

    optimizer: torch.optim.Optimizer
    max_norm: float | None
    amp_mode: Literal["amp"] | None
    scaler: torch.amp.GradScaler | None

    def __post_init__(self) -> None:
        if self.amp_mode not in (None, "amp"):
            raise ConfigError(
                f"amp_mode={self.amp_mode!r}: expected None or 'amp', which runs the forward pass"
                " under torch.autocast"
            )
        scaler: Any = self.scaler  # Ignite takes True as well
        if scaler is not None and (
            self.amp_mode is None or not isinstance(scaler, torch.amp.GradScaler)
        ):
            raise ConfigError(
                f"scaler={self.scaler!r} with amp_mode={self.amp_mode!r}: expected a"
                " torch.amp.GradScaler and amp_mode='amp'; a scaler of your own can be saved:"
                " scaler=torch.amp.GradScaler(), to_save={..., 'scaler': scaler}"
            )
        if self.max_norm is not None and not self.max_norm > 0:
            raise ConfigError(
                f"max_norm={self.max_norm}: expected a norm above 0, or None not to clip"
            )

    def autocast(self, net: nn.Module) -> AbstractContextManager[object]:
        """The context of the forward pass and the loss."""
        return nullcontext() if self.amp_mode is None else torch.autocast(device_of(net).type)

    def next_update(self, updates: Updates, net: nn.Module) -> Update | None:
        """The next update, its gradient not clipped yet; `None` at the end of the epoch."""
        self.optimizer.zero_grad()
        with self.autocast(net):
            return next(updates, None)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss with a graph."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def check_finite(self, loss: Tensor, start: int, stop: int) -> None:
        """Refuse a loss or a gradient that is not finite, before the step; a scaler skips it.

        Raises:
            RunError: one is not; it names the steps of the batch.
        """
        grads = (w.grad for w in self._weights if w.grad is not None)
        if self.scaler is None and not sizes([loss, *grads]).isfinite().all():
            raise RunError(
                f"the loss of steps {start} to {stop - 1} of the batch is {loss.item():.6g}, or its"
                " gradient is not finite (NaN or infinite). The weights are unchanged. Check the"
                " inputs and targets of these steps. If they are sound, the gradient explodes:"
                " lower the learning rate, or clip the gradient with max_norm=1.0"
            )

    @property
    def _weights(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def clip(self) -> None:
        """Unscale the gradient and clip it to `max_norm`."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self._weights, self.max_norm)

    def step(self) -> None:
        """Step the optimizer."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
