"""The loss on the dev set is a sum of tensors, computed with gradients on: the graphs of all its
batches stay alive together.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.fc = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(self.rnn(x)[1][-1])


def main():
    torch.manual_seed(1027)
    gestures = torch.randn(64, 20, 3).cumsum(1) / 5
    labels = (gestures[:, -1, 0] > 0).long()
    train = DataLoader(TensorDataset(gestures[:32], labels[:32]), batch_size=8, shuffle=True)
    dev = DataLoader(TensorDataset(gestures[32:], labels[32:]), batch_size=8)
    model, criterion = Classifier(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        model.eval()
        dev_loss = 0
        for x, y in dev:
            dev_loss += criterion(model(x), y)  # <- TT104
        print(epoch, dev_loss.item() / len(dev))


if __name__ == "__main__":
    main()
