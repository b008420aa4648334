"""In the loop over t the model is given the whole chunk again instead of x[t], each time with the
state of the time before.
"""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 10)
        self.out = nn.Linear(10, 2)

    def forward(self, x, hidden):
        y, hidden = self.gru(x, hidden)  # <- TT210
        return self.out(y), hidden


def main():
    torch.manual_seed(1021)
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    walk = torch.randn(61, 3, 2).cumsum(0) / 8
    hidden = torch.zeros(1, 3, 10)
    for start in range(0, 60, 10):
        x, y = walk[start : start + 10], walk[start + 1 : start + 11]
        hidden = hidden.detach()
        loss = 0.0
        for t in range(len(x)):
            prediction, hidden = model(x, hidden)  # <- TT210
            loss = loss + nn.functional.mse_loss(prediction[t], y[t])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(start, loss.item() / 10)


if __name__ == "__main__":
    main()
