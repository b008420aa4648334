"""The model detaches its state once, halfway through the chunk, so the loss at the end never
reaches the first half.
"""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(2, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, state):
        h, c = state
        for t in range(x.size(1)):
            if t == x.size(1) // 2:
                h, c = h.detach(), c.detach()  # <- TT303
            h, c = self.cell(x[:, t], (h, c))
        return self.fc(h), (h, c)


def main():
    torch.manual_seed(49)
    x = torch.randn(4, 120, 2).cumsum(1) / 9
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = (torch.zeros(4, 8), torch.zeros(4, 8))
    for start in range(0, 120, 12):
        chunk = x[:, start : start + 12]
        state = tuple(s.detach() for s in state)
        prediction, state = model(chunk, state)
        loss = nn.functional.mse_loss(prediction, chunk.amax(1))
        optimizer.zero_grad()
        loss.backward()  # <- TT303
        optimizer.step()


if __name__ == "__main__":
    main()
