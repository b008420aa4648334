"""validate() takes the state and returns it; after it training goes on from where the validation
recording ended.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 8), nn.Linear(8, 2)

    def forward(self, x, state):
        y, state = self.lstm(x, state)  # <- TT205
        return self.head(y), state


@torch.no_grad()
def validate(model, recording, state):
    total = 0.0
    for i in range(0, 40, 20):
        y, state = model(recording[i : i + 20], state)  # <- TT205
        total += nn.functional.mse_loss(y, recording[i + 1 : i + 21]).item()
    return total / 2, state


def main():
    torch.manual_seed(1102)
    stream = torch.randn(161, 2, 2).cumsum(0) / 10
    held_out = torch.randn(41, 2, 2).cumsum(0) / 10
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    for n, i in enumerate(range(0, 160, 16)):
        y, state = model(stream[i : i + 16], state)  # <- TT205
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(y, stream[i + 1 : i + 17])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if n % 4 == 3:
            score, state = validate(model, held_out, state)  # <- TT205
            print(n, score)


if __name__ == "__main__":
    main()
