"""Lightning: the cell's state is detached where it is stored, inside the loop over time."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CellModule(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(1, 8)
        self.head = nn.Linear(8, 1)
        self.state = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = []
        for x_t in x.unbind(1):
            h, c = self.cell(x_t, self.state)
            self.state = (h.detach(), c.detach())  # <- TT203
            outputs.append(self.head(h))
        return nn.functional.mse_loss(torch.stack(outputs, 1), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(56, verbose=False)
    signal = torch.sin(torch.arange(121) * 0.2).unsqueeze(-1)
    data = TensorDataset(signal[:-1].view(12, 10, 1), signal[1:].view(12, 10, 1))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(CellModule(), DataLoader(data, batch_size=1))


if __name__ == "__main__":
    main()
