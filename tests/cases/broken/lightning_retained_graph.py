"""Lightning, manual optimization: manual_backward(..., retain_graph=True) for every chunk of a
batch, one step at its end.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Tagger(L.LightningModule):
    def __init__(self, chunk=8):
        super().__init__()
        self.automatic_optimization = False
        self.chunk = chunk
        self.gru = torch.nn.GRU(2, 8, batch_first=True)
        self.classify = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        x, y = batch
        pieces = list(zip(x.split(self.chunk, 1), y.split(self.chunk, 1)))
        h = None
        optimizer.zero_grad()
        for x_piece, y_piece in pieces:
            out, h = self.gru(x_piece, h)
            loss = F.cross_entropy(self.classify(out).flatten(0, 1), y_piece.flatten())
            self.manual_backward(loss / len(pieces), retain_graph=True)  # <- TT102
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main():
    L.seed_everything(53, verbose=False)
    x = torch.randn(4, 128, 2).cumsum(1) / 10
    loader = DataLoader(TensorDataset(x, (x.sum(-1) > 0).long()), batch_size=2)
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Tagger(), loader)


if __name__ == "__main__":
    main()
