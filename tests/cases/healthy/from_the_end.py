"""A model of the past given the future: it reads the stream from its end to its beginning, chunk by
chunk, each flipped, with its state carried.
"""

import torch
from torch import nn


class Hindcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 8), nn.Linear(8, 2)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.out(y), state


def main():
    torch.manual_seed(2002)
    stream = torch.randn(121, 3, 2).cumsum(0) / 10
    model = Hindcast()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        state = None
        for end in range(121, 1, -15):
            later = stream[end - 15 : end].flip(0)
            earlier = stream[end - 16 : end - 1].flip(0)
            guess, state = model(later, state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(guess, earlier)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
