"""Each batch is used for three updates, and the state that one of them leaves behind is where the
next, on the same batch, begins.
"""

import torch
from torch import nn


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 8), nn.Linear(8, 4)

    def forward(self, x, hidden):
        y, hidden = self.lstm(x, hidden)  # <- TT210
        return self.fc(y), hidden


def main():
    torch.manual_seed(1210)
    frames = torch.randn(120, 2, 3).cumsum(0) / 8
    labels = (frames.sum(-1) * 2).long() % 4
    net = Recogniser()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    hidden = None
    for x, y in zip(frames.split(20), labels.split(20)):
        for _ in range(3):  # <- TT210
            logits, hidden = net(x, hidden)  # <- TT210
            hidden = tuple(h.detach() for h in hidden)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
