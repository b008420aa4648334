"""What a training of many updates per step must know of the Trainer around it."""

import warnings

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.modules.batchnorm import _BatchNorm

from throughtime.errors import ConfigError, RunError


def check(trainer: Trainer) -> None:
    """Says what this Trainer would not do here, before hours have passed.

    Raises:
        RunError: a strategy that takes the weights apart.
        ConfigError: more optimizers than one, or one that wants a closure; a checkpoint by time,
            which is never written; an average of weights that would train on.
    """
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        name = type(trainer.strategy).__name__
        raise RunError(
            f"the strategy is {name}, expected a single device or 'ddp': others take the weights"
            " apart"
        )
    kinds = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    if len(kinds) != 1 or kinds == ["LBFGS"]:
        raise ConfigError(
            f"configure_optimizers gave {', '.join(kinds) or 'none'}, expected one that steps on a"
            " gradient: for other rates take groups of parameters, torch.optim.Adam([{'params':"
            " ..., 'lr': ...}, ...])"
        )
    # typed as a property
    if any(isinstance(c, StochasticWeightAveraging) for c in getattr(trainer, "callbacks")) and any(
        isinstance(module, _BatchNorm) for module in trainer.lightning_module.modules()
    ):
        raise ConfigError(
            "StochasticWeightAveraging plays an epoch more for BatchNorm, which would train on:"
            " take torch.optim.swa_utils"
        )
    if any(getattr(saver, "_train_time_interval", None) for saver in trainer.checkpoint_callbacks):
        raise ConfigError(
            "ModelCheckpoint(train_time_interval=...) never saves under manual optimization"
            " (Lightning 2.6): take every_n_train_steps"
        )
    warnings.filterwarnings(
        "ignore", "Using ModelCheckpoint with manual optimization"
    )  # after the update is where it belongs


def wants_to_save(trainer: Trainer) -> bool:
    """Whether a checkpoint is due after this update; the Trainer asks after training steps only."""
    every = (getattr(saver, "_every_n_train_steps", 0) for saver in trainer.checkpoint_callbacks)
    return any(n > 0 and trainer.global_step % n == 0 for n in every)


def reached_the_end(trainer: Trainer) -> bool:
    """Whether `max_steps` updates are made."""
    return 0 <= trainer.max_steps <= trainer.global_step
