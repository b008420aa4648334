"""Lightning, automatic optimization: windows in order, self.hidden detached, another state for
validation.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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


def main():
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


if __name__ == "__main__":
    main()
