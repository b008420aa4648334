"""Lightning: each batch is a whole recording, split in training_step.

Self.hidden is not reset when a new one starts.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Recordings(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(57)
        self.data = [
            torch.randn(n + 1, 2, generator=generator).cumsum(0) / 9 + 2 * k
            for k, n in enumerate((40, 60, 30))
        ]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, k):
        return self.data[k][:-1], self.data[k][1:]


class LitNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.gru, self.fc = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 2)
        self.hidden = torch.zeros(1, 1, 8)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for x, y in zip(batch[0].split(10, 1), batch[1].split(10, 1)):
            out, self.hidden = self.gru(x, self.hidden.detach())  # <- TT204
            loss = nn.functional.l1_loss(self.fc(out), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(57, verbose=False)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitNet(), DataLoader(Recordings(), batch_size=1))


if __name__ == "__main__":
    main()
