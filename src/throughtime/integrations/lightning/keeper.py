"""What a module on a stream does at Lightning's hooks, as a callback, so that the hooks of the module stay its user's."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer


class Streaming(LightningModule):
    """A module that brings its keeper along: attaching a Trainer lets the keeper do what hooks would, overridden without super or not."""

    @property
    def trainer(self) -> Trainer:
        """The Trainer."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        LightningModule.trainer.__set__(self, trainer)
        # typed as a property without a setter
        callbacks: list[Callback] = [] if trainer is None else getattr(trainer, "callbacks")
        if trainer is not None and not any(isinstance(callback, Keeper) for callback in callbacks):
            callbacks.insert(0, Keeper())

    def keep_settings(self) -> None:
        """Before a fit."""

    def keep_clipped(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Before a step of the optimizer, when its gradient has its true scale."""

    def keep_scheduled(self) -> None:
        """After an epoch of training."""

    def keep_logged(self, kind: str) -> None:
        """After an epoch of validation or test."""

    def keep_saved(self, checkpoint: dict[str, Any]) -> None:
        """While a checkpoint is made."""

    def keep_loaded(self, checkpoint: dict[str, Any]) -> None:
        """After a checkpoint was read by the Trainer."""


class Keeper(Callback):
    """Asks modules that keep something; others it leaves alone."""

    # Lightning gives it
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, Streaming):
            pl_module.keep_settings()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:  # Lightning gives it
        if isinstance(pl_module, Streaming):
            pl_module.keep_clipped(optimizer)

    # Lightning gives it
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, Streaming):
            pl_module.keep_scheduled()

    # Lightning gives it
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, Streaming):
            pl_module.keep_logged("val")

    # Lightning gives it
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, Streaming):
            pl_module.keep_logged("test")

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:  # Lightning gives it
        if isinstance(pl_module, Streaming):
            pl_module.keep_saved(checkpoint)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:  # Lightning gives it
        if isinstance(pl_module, Streaming):
            pl_module.keep_loaded(checkpoint)
