"""Healthy loops under Lightning and Ignite."""

import lightning as L
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def ignite_update():
    """Ignite with an update function: the state is detached before use and made anew at every
    epoch; evaluation has its own.
    """
    torch.manual_seed(134)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)

    def update(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        out, engine.state.hidden = gru(x, engine.state.hidden.detach())
        loss = nn.functional.mse_loss(head(out), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    @torch.no_grad()
    def inference(engine, batch):
        x, y = batch
        out, engine.state.hidden = gru(x, engine.state.hidden)
        return nn.functional.mse_loss(head(out), y).item()

    trainer, evaluator = Engine(update), Engine(inference)

    @trainer.on(Events.EPOCH_STARTED)
    @evaluator.on(Events.EPOCH_STARTED)
    def reset(engine):
        engine.state.hidden = torch.zeros(1, 3, 8)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        print(engine.state.epoch, engine.state.output, evaluator.run(valid).output)

    walk, other = torch.randn(81, 3, 2).cumsum(0) / 10, torch.randn(41, 3, 2).cumsum(0) / 10
    valid = list(zip(other[:-1].split(10), other[1:].split(10)))
    trainer.run(list(zip(walk[:-1].split(10), walk[1:].split(10))), max_epochs=2)


class Carried(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
        self.train_hidden = self.val_hidden = None

    def on_train_epoch_start(self):
        self.train_hidden = None

    def on_validation_epoch_start(self):
        self.val_hidden = None

    def loss(self, batch, h):
        x, y = batch
        z, h = self.rnn(x, h)
        return nn.functional.mse_loss(self.out(z), y), h.detach()

    def training_step(self, batch, batch_idx):
        loss, self.train_hidden = self.loss(batch, self.train_hidden)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, self.val_hidden = self.loss(batch, self.val_hidden)
        self.log("val_loss", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loader_of(wave):
    return DataLoader(
        TensorDataset(wave[:-1].view(-1, 10, 1), wave[1:].view(-1, 10, 1)), batch_size=1
    )


def lightning_carried():
    """Lightning, automatic optimization: windows in order, self.hidden detached, another state for
    validation.
    """
    L.seed_everything(132, verbose=False)
    time = torch.arange(101) * 0.1
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Carried(),
        loader_of(time.sin().unsqueeze(-1)),
        loader_of((3 * time[:61]).cos().unsqueeze(-1)),
    )
