"""Shared by the tests of Lightning on a stream: net, stream, module, trainer, loop by hand."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from plain_loop import plain_loop
from strategies import recordings
from throughtime.carry import Carried
from throughtime.gradient import Policy, Update

pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
from lightning.pytorch import Trainer

from throughtime.integrations.lightning import Loader, StreamModule

EXPECTED = pytest.mark.filterwarnings(
    "ignore:.*smaller than the logging interval.*",  # few batches an epoch, on purpose
    "ignore:.*no .val_dataloader.*",  # trained without validation, on purpose
    "ignore:Be aware that when using .ckpt_path.",  # resumed without the callback that saved
    "ignore:Checkpoint directory .* exists and is not empty",  # several trainings in one folder
)
LENGTHS = (150, 90, 205, 33)
LR = 1e-2


def net_of(dropout: float = 0.0) -> Carried:
    torch.manual_seed(1)
    return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))).double()


def stream_of(lanes: int = 2, seed: int = 0, **options: Any) -> tt.Stream:
    return tt.Stream(recordings(LENGTHS, seed=seed, outputs=1), lanes, 10, **options)


class Module(StreamModule):
    """The net with Adam, and a scheduler if asked for."""

    def __init__(
        self,
        net: Carried | None = None,
        *,
        scheduler: Callable[[Any], dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        options = {"gradient": tt.Truncated(10, 25)} | options
        super().__init__(net_of() if net is None else net, nn.MSELoss(), **options)
        self.scheduler = scheduler
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), LR)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def on_update(self, update: Update) -> None:
        assert update.steps > 0
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def trainer_of(folder: Path, **options: Any) -> Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings: dict[str, Any] = {**quiet, "max_epochs": 2, **options}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **settings)


def weights(net: nn.Module) -> Tensor:
    """On the CPU, where Lightning leaves a net that it has fitted."""
    return torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()


@cache
def plain(
    policy: Callable[[], Policy] = lambda: tt.Truncated(10, 25),
    *,
    epochs: int = 2,
    stop: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Tensor:
    """The loop by hand."""
    net, stream = net_of(dropout), stream_of()
    optimizer = torch.optim.Adam(net.parameters(), LR)
    torch.manual_seed(5)
    plain_loop(net, stream, optimizer, policy(), epochs=epochs, stop=stop, **options)
    return weights(net)


def fitted(folder: Path, module: Module, *, chunks: int = 4, **options: Any) -> Tensor:
    torch.manual_seed(5)
    trainer_of(folder, **options).fit(module, Loader(stream_of(), chunks))
    return weights(module.net)


def loader_of_validation() -> Loader:
    return Loader(stream_of(1, seed=3), 6)
