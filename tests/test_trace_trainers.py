"""The trace inside a Trainer of Lightning and an engine of Ignite: the same training, seen."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from strategies import HIDDEN, inputs, named
from throughtime.diagnose.trace import trace

pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
pytest.importorskip("ignite.engine", reason="needs the extra 'ignite'")

from ignite.engine import Engine, Events, create_supervised_trainer
from lightning.pytorch import LightningModule, Trainer


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.read = (
            nn.LSTM(3, HIDDEN, num_layers=2, batch_first=True).double(),
            nn.Linear(HIDDEN, 1).double(),
        )
        self.losses: list[float] = []

    def training_step(self, batch: Any, *_: Any) -> Tensor:
        loss = nn.functional.mse_loss(self.read(self.lstm(batch[0])[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_lightning_trains_the_same_and_is_seen() -> None:
    loader = DataLoader(
        TensorDataset(inputs(12, 20), inputs(12, 20, features=1, seed=1)), batch_size=4
    )

    def fitted(module: Plain) -> None:
        Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)

    plain, traced = Plain(), Plain()
    fitted(plain)
    with trace(traced, keep=99) as found:
        fitted(traced)
    assert found.count == len(traced.losses) == 6
    assert traced.losses == pytest.approx(plain.losses, rel=1e-12)
    assert found["lstm.layer1.f"].shape == (20, 4)
    assert all(one.norms["lstm.layer0.c"].all() for one in found.passes)


def test_ignite_trains_the_same_and_is_seen() -> None:
    def trained(largest: list[float] | None) -> list[float]:
        torch.manual_seed(0)
        net = named("hides-cell").net().module
        trainer: Engine = create_supervised_trainer(
            net, torch.optim.Adam(net.parameters()), nn.MSELoss()
        )
        losses: list[float] = []

        def note(engine: Engine) -> None:
            losses.append(torch.as_tensor(engine.state.output).item())
            if largest is not None:
                largest.append(found["cell.c"].max().item())

        trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
        found = trace(net)
        with contextlib.nullcontext() if largest is None else found:
            trainer.run(
                [(inputs(9, 2, seed=i), inputs(9, 2, seed=i + 9, features=2)) for i in range(5)],
                max_epochs=2,
            )
        return losses

    largest: list[float] = []
    assert trained(largest) == pytest.approx(trained(None), rel=1e-12)
    assert len(largest) == 10
    assert all(norm > 0 for norm in largest)
