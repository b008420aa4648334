"""Lightning, manual optimization: chunk after chunk is stepped, and zero_grad is never called."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ManualTBPTT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.lstm = nn.LSTM(1, 8)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = (part.transpose(0, 1) for part in batch)
        state = None
        for x_c, y_c in zip(x.split(10), y.split(10)):
            out, state = self.lstm(x_c, state)
            state = (state[0].detach(), state[1].detach())
            loss = nn.functional.mse_loss(self.head(out), y_c)
            self.manual_backward(loss)
            opt.step()  # <- TT302

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main():
    L.seed_everything(60, verbose=False)
    x = torch.randn(3, 101, 1).cumsum(1) / 10
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ManualTBPTT(), DataLoader(TensorDataset(x[:, :-1], x[:, 1:]), batch_size=3))


if __name__ == "__main__":
    main()
