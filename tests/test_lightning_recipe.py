"""The recipe for modules of Lightning 1.9 trains as a loop by hand does."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch", reason="needs throughtime[lightning]")

from test_docs import blocks  # noqa: E402

PAGE = "docs/how-to/migrating/lightning-1.9.md"
SPLIT, CLIP = 5, 0.05
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
Batch = tuple[Tensor, Tensor]


def batches() -> list[Batch]:
    draws = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(3, 23, 2, generator=draws, dtype=torch.float64),
            torch.randn(3, 23, 4, generator=draws, dtype=torch.float64),
        )
        for _ in range(4)
    ]


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
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", **QUIET)
    trainer.fit(module, DataLoader(cast("Any", batches()), batch_size=None))
    return module.lstm, trainer.global_step


def difference(net: nn.Module, other: nn.Module) -> float:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def test_the_recipe_trains_as_the_loop_by_hand() -> None:
    lstm, steps = by_recipe()
    assert steps == 4 * 5
    assert difference(lstm, by_hand()) < 1e-12
