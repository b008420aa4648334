"""Validation is the year after the training years: the model first runs through those from zeros
without gradients, and goes on from there.
"""

import torch
from torch import nn


class Runoff(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 10), nn.Linear(10, 1)

    def forward(self, rain, state):
        y, state = self.lstm(rain, state)
        return self.head(y), state


@torch.inference_mode()
def validate(model, past, rain, flow):
    model.eval()
    _, state = model(past, None)
    prediction, _ = model(rain, state)
    model.train()
    return nn.functional.mse_loss(prediction, flow).item()


def main():
    torch.manual_seed(2103)
    rain = torch.randn(200, 1, 2).cumsum(0) / 10
    flow = rain.cumsum(0).mean(-1, keepdim=True) / 15
    model = Runoff()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        state = None
        for i in range(0, 150, 25):
            prediction, state = model(rain[i : i + 25], state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(prediction, flow[i : i + 25])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, validate(model, rain[:150], rain[150:], flow[150:]))


if __name__ == "__main__":
    main()
