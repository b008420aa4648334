"""The script of tests/test_lightning_ranks.py, alone or as ranks: train, save, resume, write."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import throughtime as tt
from strategies import recordings
from throughtime.integrations.lightning import Loader, StreamModule

LANES = 4  # of all ranks
LENGTHS = (150, 90, 205, 33, 160, 7)


class Module(StreamModule):
    """Trained with Adam."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def module() -> Module:
    torch.manual_seed(1)
    net = tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1))).double()
    return Module(net, nn.MSELoss(), gradient=tt.Truncated(5, 25), clip=0.5, accumulate=2)


def loader(ranks: int, seed: int = 0) -> Loader:
    """Made before there is a process group, as a script does whose processes Lightning starts."""
    return Loader(
        tt.Stream(recordings(LENGTHS, seed=seed, outputs=1), LANES // ranks, 10), chunks=3
    )


def trainer(folder: Path, ranks: int, **options: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {
        **quiet,
        "max_epochs": 3,
        "devices": ranks,
        "strategy": "ddp" if ranks > 1 else "auto",
        **options,
    }
    return Trainer(accelerator="cpu", default_root_dir=folder, **settings)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def main(folder: Path, ranks: int) -> None:
    """Weights and losses by name."""
    net, fit = module(), trainer(folder, ranks, enable_checkpointing=False)
    fit.fit(net, loader(ranks), loader(ranks, seed=3))
    results: dict[str, Any] = {
        "weights": weights(net),
        "updates": fit.global_step,
        "logged": {k: v.item() for k, v in fit.callback_metrics.items()},
    }
    saver = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer(folder, ranks, callbacks=[saver], max_steps=21).fit(module(), loader(ranks))
    again = module()
    trainer(folder, ranks, enable_checkpointing=False).fit(
        again, loader(ranks), loader(ranks, seed=3), ckpt_path=folder / "step=21.ckpt"
    )
    results["resumed"] = weights(again)
    torch.save(results, folder / f"{torch.distributed.get_rank() if ranks > 1 else 0}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    main(Path(sys.argv[1]), int(sys.argv[2]))
