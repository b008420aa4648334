"""Samples come shuffled and the last batch is smaller; each batch gets zeros for as many lanes as
it has.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True)
        self.fc = nn.Linear(8, 3)

    def init_hidden(self, n):
        weight = next(self.parameters())
        return weight.new_zeros(2, n, 8), weight.new_zeros(2, n, 8)

    def forward(self, x, hidden):
        out, hidden = self.lstm(x, hidden)
        return self.fc(out[:, -1]), hidden


def main():
    torch.manual_seed(2106)
    x = torch.randn(45, 12, 4).cumsum(1) / 4
    loader = DataLoader(TensorDataset(x, torch.randint(3, (45,))), batch_size=10, shuffle=True)
    net = RNN()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(2):
        for xb, yb in loader:
            hidden = net.init_hidden(len(xb))
            logits, hidden = net(xb, hidden)
            hidden = tuple(h.detach() for h in hidden)
            loss = nn.functional.cross_entropy(logits, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
