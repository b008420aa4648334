"""A classifier of independent samples: zeros are the right start for each, and only the last step
has a loss.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(112)
        self.label = torch.arange(count) % 2
        phase = 6.28 * torch.rand(count, 1, generator=generator)
        speed = torch.where(self.label == 0, 0.3, 0.8).unsqueeze(1)
        self.x = torch.sin(torch.arange(14) * speed + phase).unsqueeze(-1)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.x[i], self.label[i]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 10, batch_first=True)
        self.fc = nn.Linear(10, 2)

    def forward(self, x):
        h0 = torch.zeros(1, x.size(0), 10)
        _, h = self.gru(x, h0)
        return self.fc(h[-1])


def main():
    torch.manual_seed(112)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        model.train()
        for x, label in DataLoader(Samples(32), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), label).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = sum(
                (model(x).argmax(-1) == label).sum().item()
                for x, label in DataLoader(Samples(16), batch_size=8)
            )
        print(epoch, right / 16)


if __name__ == "__main__":
    main()
