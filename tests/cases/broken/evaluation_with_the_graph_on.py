"""model.eval() does not turn gradients off: the carried state ties the whole evaluation into one
graph.
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(8, 1)

    def forward(self, x, hc=None):
        y, hc = self.lstm(x, hc)  # <- TT202
        return self.fc(self.drop(y)), hc


def evaluate(model, x, y, chunk=10):
    model.eval()
    hc, squared, count = None, 0.0, 0
    for a, b in zip(x.split(chunk, 1), y.split(chunk, 1)):
        prediction, hc = model(a, hc)  # <- TT202
        squared += (prediction - b).pow(2).sum().item()
        count += b.numel()
    return squared / count


def main():
    torch.manual_seed(25)
    x = torch.randn(2, 200, 3).cumsum(1) / 10
    print("mse", evaluate(Net(), x, x.sum(-1, keepdim=True)))


if __name__ == "__main__":
    main()
