"""A DistributedSampler gives this rank every second window of the stream, and the state is carried
across the gaps.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Windows(Dataset):
    def __init__(self, signal, width):
        self.signal, self.width = signal, width

    def __len__(self):
        return (len(self.signal) - 1) // self.width

    def __getitem__(self, i):
        piece = self.signal[i * self.width : (i + 1) * self.width + 1]
        return piece[:-1], piece[1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 8)
        self.out = nn.Linear(8, 2)
        self.h = torch.zeros(1, 8)

    def forward(self, x):
        h, ys = self.h.detach(), []
        for x_t in x.unbind(1):
            h = self.cell(x_t, h)
            ys.append(self.out(h))
        self.h = h
        return torch.stack(ys, 1)


def main():
    torch.manual_seed(41)
    windows = Windows(torch.randn(193, 2).cumsum(0) / 14, width=8)
    sampler = DistributedSampler(windows, num_replicas=2, rank=0, shuffle=False)
    loader = DataLoader(windows, batch_size=1, sampler=sampler)  # <- TT207
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in loader:  # <- TT207
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
