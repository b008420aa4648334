"""Episodes come from a data set one by one.

The module keeps self.hidden and nobody calls its reset between them.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Episodes(Dataset):
    def __init__(self, count, steps):
        generator = torch.Generator().manual_seed(32)
        self.items = [
            torch.randn(steps + 1, 2, generator=generator).cumsum(0) / 6 for _ in range(count)
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index][:-1], self.items[index][1:]


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 8, batch_first=True)
        self.out = nn.Linear(8, 2)
        self.hidden = None

    def reset(self):
        self.hidden = None

    def forward(self, x):
        if self.hidden is not None:
            self.hidden = self.hidden.detach()
        y, self.hidden = self.rnn(x, self.hidden)  # <- TT204
        return self.out(y)


def main():
    torch.manual_seed(32)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters())
    for episode_x, episode_y in DataLoader(Episodes(4, 40), batch_size=1):
        for x, y in zip(episode_x.split(8, dim=1), episode_y.split(8, dim=1)):
            optimizer.zero_grad()
            loss = (policy(x) - y).pow(2).mean()  # <- TT204
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
