"""Lightning: training_step and validation_step share self.hidden, so validation starts where
training stopped.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Shared(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
        self.hidden = None

    def on_train_epoch_start(self):
        self.hidden = None

    def step(self, batch):
        x, y = batch
        z, h = self.rnn(x, self.hidden)  # <- TT205
        self.hidden = h.detach()
        return nn.functional.mse_loss(self.out(z), y)

    def training_step(self, batch, batch_idx):
        return self.step(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch))  # <- TT205

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def loader_of(wave):
    return DataLoader(
        TensorDataset(wave[:-1].view(-1, 10, 1), wave[1:].view(-1, 10, 1)), batch_size=1
    )


def main():
    L.seed_everything(58, verbose=False)
    time = torch.arange(101) * 0.1
    trainer = L.Trainer(
        max_epochs=1,
        num_sanity_val_steps=0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Shared(),
        loader_of(time.sin().unsqueeze(-1)),
        loader_of((3 * time[:61]).cos().unsqueeze(-1)),
    )


if __name__ == "__main__":
    main()
