"""A module as users of Lightning 1.9 wrote it, batches, and a quiet Trainer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule as PlainModule
from lightning.pytorch import Trainer
from torch import Tensor, nn

from throughtime.integrations.lightning import TBPTT, LightningModule

K, T, B, BATCHES = 5, 23, 3, 5
SPLITS = 5  # of 5, 5, 5, 5 and 3 steps
Batch = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]

OLD = """
import torch
from torch import nn
from pytorch_lightning import LightningModule


class Tagger(LightningModule):
    def __init__(self, truncated_bptt_steps=5):
        super().__init__()
        self.truncated_bptt_steps = truncated_bptt_steps
        self.lstm = nn.LSTM(input_size=2, hidden_size=4, batch_first=True)
        self.linear = nn.Linear(4, 1)
        self.double()

    def training_step(self, batch, batch_idx, hiddens):
        x, y = batch
        out, hiddens = self.lstm(x, hiddens)
        loss = nn.functional.mse_loss(self.linear(out).squeeze(-1), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "hiddens": hiddens}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)
"""


def old_class() -> type[LightningModule]:
    names: dict[str, Any] = {"__name__": __name__}
    changed = OLD.replace(
        "from pytorch_lightning import", "from throughtime.integrations.lightning import"
    )
    assert sum(a != b for a, b in zip(OLD.splitlines(), changed.splitlines(), strict=True)) == 1
    exec(changed, names)
    return names["Tagger"]


Tagger: Any = old_class()


class Batches:
    """A resumable dataloader without workers."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches, self.start, self.at = batches, 0, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        for number in range(start, len(self.batches)):
            self.at = number + 1
            yield self.batches[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def batches(count: int = BATCHES, steps: int = T, lanes: int = B) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    double: dict[str, Any] = {"dtype": torch.double, "generator": generator}
    return [
        (torch.randn(lanes, steps, 2, **double), torch.randn(lanes, steps, **double))
        for _ in range(count)
    ]


def trainer(tmp_path: Path, **settings: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    chosen: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
        **quiet,
        **settings,
    }
    return Trainer(**chosen)


def fitted(module: PlainModule, data: Sequence[Any], tmp_path: Path, **settings: Any) -> Weights:
    trainer(tmp_path, **settings).fit(module, Batches(data))
    return weights(module)


def weights(module: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def close(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=1e-10, atol=1e-12) for name in a
    )


class Mixed(TBPTT, PlainModule):
    """Without the ready-generator class, and 5 said on the class."""

    truncated_bptt_steps = K

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)
        self.double()

    def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
        return Tagger.training_step(self, batch, batch_idx, hiddens)

    def configure_optimizers(self) -> Any:
        return Tagger.configure_optimizers(self)
