"""Learning rate schedulers under manual optimization, where Lightning leaves them to the module."""

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from throughtime.errors import ConfigError


def step_schedulers(module: LightningModule, interval: str, count: int, monitor: str) -> None:
    """Steps those of this interval, "step" or "epoch", whose frequency divides `count`.

    Args:
        module: whose `lr_scheduler_step` does it.
        interval: as in `configure_optimizers`.
        count: updates, batches or epochs so far.
        monitor: what a `ReduceLROnPlateau` is told, of the logged values.

    Raises:
        ConfigError: nothing is logged under that name.
    """
    for config in module.trainer.lr_scheduler_configs:
        if config.interval == interval and count % config.frequency == 0:
            plateau = isinstance(config.scheduler, ReduceLROnPlateau)
            module.lr_scheduler_step(
                config.scheduler, _logged(module, monitor) if plateau else None
            )


def _logged(module: LightningModule, name: str) -> Tensor:
    known = module.trainer.callback_metrics
    if name not in known:
        raise ConfigError(f"monitor={name!r} is not logged; logged are {', '.join(known)}")
    return known[name]
