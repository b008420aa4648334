"""From a gradient to new weights: clipping and mixed precision, the same for all trainers of this adapter."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from throughtime.errors import ConfigError


@dataclass(frozen=True)
class Stepping:
    """An optimizer with what belongs around its step."""

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
        if self.scaler is not None and (
            self.amp_mode is None or not isinstance(self.scaler, torch.amp.GradScaler)
        ):  # pyright: ignore[reportUnnecessaryIsInstance]  # Ignite takes True here
            raise ConfigError(
                f"scaler={self.scaler!r} with amp_mode={self.amp_mode!r}: expected a"
                " torch.amp.GradScaler and amp_mode='amp'; a scaler of your own can be saved:"
                " scaler=torch.amp.GradScaler(), to_save={..., 'scaler': scaler}"
            )
        if self.max_norm is not None and not self.max_norm > 0:
            raise ConfigError(
                f"max_norm={self.max_norm}: expected a norm above 0, or None not to clip"
            )

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """What the forward pass and the loss run under."""
        return nullcontext() if self.amp_mode is None else torch.autocast(device.type)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a loss with a graph."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self) -> None:
        """Makes the gradient what the optimizer is to see: without the scale, no longer than `max_norm`."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(
                [weight for group in self.optimizer.param_groups for weight in group["params"]],
                self.max_norm,
            )

    def step(self) -> None:
        """New weights."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def device_of(net: nn.Module) -> torch.device:
    """Where the weights are."""
    weight = next(net.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device
