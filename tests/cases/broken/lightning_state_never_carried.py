"""Lightning: the batch is split over time by hand, and every piece starts from no state at all."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Windowed(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.linear = nn.Linear(8, 2)
        self.truncated_steps = 10

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)  # <- TT201
        return self.linear(y), state

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        for x_t, y_t in zip(
            x.split(self.truncated_steps, dim=1), y.split(self.truncated_steps, dim=1)
        ):
            prediction, state = self(x_t)  # <- TT201
            loss = nn.functional.mse_loss(prediction, y_t)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def main():
    L.seed_everything(55, verbose=False)
    walks = torch.randn(4, 101, 2).cumsum(1) / 10
    loader = DataLoader(TensorDataset(walks[:, :-1], walks[:, 1:]), batch_size=4)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Windowed(), loader)


if __name__ == "__main__":
    main()
