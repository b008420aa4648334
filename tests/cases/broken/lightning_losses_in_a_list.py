"""Lightning: training_step keeps every loss with its graph for a mean at the end of the epoch."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitRNN(L.LightningModule):
    def __init__(self, rnn, readout):
        super().__init__()
        self.rnn, self.readout = rnn, readout
        self.h = None
        self.losses = []

    def on_train_epoch_start(self):
        self.h = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat, h = self.rnn(x, self.h)
        self.h = h.detach()
        loss = (self.readout(y_hat) - y).pow(2).mean()  # <- TT104
        self.losses.append(loss)
        return loss

    def on_train_epoch_end(self):
        print("mean", torch.stack(self.losses).mean().item())
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(54, verbose=False)
    lanes = torch.randn(2, 121, 1).cumsum(1) / 10
    pairs = [(lanes[:, i : i + 10], lanes[:, i + 1 : i + 11]) for i in range(0, 120, 10)]
    x, y = torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitRNN(nn.RNN(1, 8, batch_first=True), nn.Linear(8, 1)), loader)


if __name__ == "__main__":
    main()
