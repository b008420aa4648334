"""An iterable dataset yields chunks with a flag for the first of every recording; the flag sets the
state to zeros.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Recordings(IterableDataset):
    def __init__(self, lengths, chunk):
        self.recordings = [torch.randn(n + 1, 2).cumsum(0) / 8 for n in lengths]
        self.chunk = chunk

    def __iter__(self):
        for recording in self.recordings:
            for i in range(0, len(recording) - 1, self.chunk):
                piece = recording[i : i + self.chunk + 1]
                yield i == 0, piece[:-1].unsqueeze(1), piece[1:].unsqueeze(1)


def main():
    torch.manual_seed(2130)
    loader = DataLoader(Recordings([60, 36, 48], 12), batch_size=None)
    gru, head = nn.GRU(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*gru.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(1, 1, 8)
    for epoch in range(2):
        for first, x, y in loader:
            h = torch.zeros_like(h) if first else h.detach()
            out, h = gru(x, h)
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
