"""Lightning, automatic optimization: self.hidden goes into the next training_step with the graph of
this one.
"""

# raises: second time

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 8, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.hidden = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        out, self.hidden = self.lstm(x, self.hidden)  # <- TT101
        return nn.functional.mse_loss(self.head(out), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(52, verbose=False)
    series = torch.randn(101, 1).cumsum(0) / 10
    x, y = series[:-1].view(10, 10, 1), series[1:].view(10, 10, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=1, shuffle=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Forecast(), loader)


if __name__ == "__main__":
    main()
