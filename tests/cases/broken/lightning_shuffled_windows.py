"""Lightning: windows of one series with shuffle=True, and a state carried from one training_step to
the next.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Windows(L.LightningDataModule):
    def setup(self, stage):
        series = torch.randn(161, 2).cumsum(0) / 12
        self.train = TensorDataset(series[:-1].view(16, 10, 2), series[1:].view(16, 10, 2))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=1, shuffle=True)  # <- TT207


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.proj = nn.Linear(8, 2)
        self.state = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.state is not None:
            self.state = tuple(s.detach() for s in self.state)
        z, self.state = self.lstm(x, self.state)
        return nn.functional.mse_loss(self.proj(z), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(59, verbose=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), datamodule=Windows())  # <- TT207


if __name__ == "__main__":
    main()
