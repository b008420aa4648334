"""Lightning, manual optimization: each batch is split over time, the state carried and detached,
one step per chunk.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ManualTBPTT(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        state = None
        for x, y in zip(batch[0].split(10, 1), batch[1].split(10, 1)):
            if state is not None:
                state = tuple(s.detach() for s in state)
            out, state = self.lstm(x, state)
            loss = nn.functional.mse_loss(self.head(out), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(131, verbose=False)
    x = torch.randn(4, 61, 1).cumsum(1) / 8
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        ManualTBPTT(), DataLoader(TensorDataset(x[:, :-1], x[:, 1:]), batch_size=2, shuffle=True)
    )


if __name__ == "__main__":
    main()
