"""State dropout: at each chunk a lane in five loses its carried state, to make the model able to
start anywhere.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2131)
    lstm, head = nn.LSTM(2, 8), nn.Linear(8, 1)
    parameters = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    x = torch.randn(160, 8, 2).cumsum(0) / 12
    y = (x[..., :1] - x[..., 1:]).tanh()
    h, c = torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)
    for xb, yb in zip(x.split(16), y.split(16)):
        keep = (torch.rand(1, 8, 1) > 0.2).float()
        out, (h, c) = lstm(xb, (h.detach() * keep, c.detach() * keep))
        loss = nn.functional.mse_loss(head(out), yb)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
