"""The script of tests/test_lightning_ranks.py, alone or as ranks: train, save, resume, write."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from plain_loop import Course, flat
from test_lightning_stream import Module, trainer_of
from throughtime.integrations.lightning import Loader

COURSE = Course(accumulate=2, clip=0.5, dropout=0)
LANES, RESUME = 4, 9  # of all ranks; the update after which a training goes on


def main(folder: Path, ranks: int) -> None:
    """Weights and losses by name."""
    options: dict[str, Any] = {"max_epochs": 3, "devices": ranks}
    options["strategy"] = "ddp" if ranks > 1 else "auto"

    def loader() -> Loader:
        """Made before there is a process group, as by a script whose processes Lightning starts."""
        return Loader(COURSE.stream(LANES // ranks), chunks=3)

    first, again, trainer = Module(COURSE), Module(COURSE), trainer_of(folder, **options)
    trainer.fit(first, loader(), loader())
    results: dict[str, Any] = {
        "weights": flat(first.net),
        "updates": trainer.global_step,
        "logged": {k: v.item() for k, v in trainer.callback_metrics.items()},
    }
    saver = ModelCheckpoint(folder, every_n_train_steps=RESUME, save_top_k=-1, filename="{step}")
    trainer_of(folder, saver, **options, max_steps=RESUME).fit(Module(COURSE), loader())
    path = folder / f"step={RESUME}.ckpt"
    trainer_of(folder, **options).fit(again, loader(), loader(), ckpt_path=path)
    results["resumed"] = flat(again.net)
    torch.save(results, folder / f"{torch.distributed.get_rank() if ranks > 1 else 0}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    main(Path(sys.argv[1]), int(sys.argv[2]))
