"""The recipe for modules of Lightning 1.9 trains as a loop by hand does."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch", reason="needs throughtime[lightning]")

from strategies import apart  # noqa: E402
from test_docs import blocks  # noqa: E402

PAGE = "docs/how-to/migrating/lightning-1.9.md"
SPLIT, CLIP = 5, 0.05
Batch = tuple[Tensor, Tensor]


def batches() -> list[Batch]:
    torch.manual_seed(0)
    return [(torch.randn(3, 23, 2).double(), torch.randn(3, 23, 4).double()) for _ in range(4)]


def net() -> nn.LSTM:
    torch.manual_seed(1)
    return nn.LSTM(2, 4, batch_first=True).double()


def by_hand() -> nn.LSTM:
    lstm = net()
    optimizer = torch.optim.Adam(lstm.parameters(), lr=0.01)
    for x, y in batches():
        state = None
        for start in range(0, x.shape[1], SPLIT):
            outputs, (h, c) = lstm(x[:, start : start + SPLIT], state)
            nn.functional.mse_loss(outputs, y[:, start : start + SPLIT]).backward()
            nn.utils.clip_grad_norm_(lstm.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            state = h.detach(), c.detach()
    return lstm


def by_recipe() -> tuple[nn.LSTM, int]:
    recipe, *_ = blocks(PAGE, "python")
    names: dict[str, Any] = {}
    exec(recipe, names)

    class Tagger(names["SplitModule"]):
        truncated_bptt_steps, clip = SPLIT, CLIP

        def __init__(self) -> None:
            super().__init__()
            self.lstm = net()

        def split_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> dict[str, Any]:
            del batch_idx
            outputs, hiddens = self.lstm(batch[0], hiddens)
            return {"loss": nn.functional.mse_loss(outputs, batch[1]), "hiddens": hiddens}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Tagger()
    options = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(options, False))
    trainer.fit(module, DataLoader(cast("Any", batches()), batch_size=None))
    return module.lstm, trainer.global_step


def test_the_recipe_trains_as_the_loop_by_hand() -> None:
    lstm, steps = by_recipe()
    assert steps == 4 * 5
    assert apart(dict(lstm.named_parameters()), dict(by_hand().named_parameters())) < 1e-12
