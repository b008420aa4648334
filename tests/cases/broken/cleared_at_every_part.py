"""The gradients of four chunks shall make one step, but they are cleared before each of the four:
only the last one counts.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(1023)
    lstm, head = nn.LSTM(3, 8), nn.Linear(8, 1)
    params = list(lstm.parameters()) + list(head.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    accumulate = 4
    x = torch.randn(160, 2, 3).cumsum(0) / 10
    y = x.pow(2).sum(-1, keepdim=True).sqrt()
    state = None
    for i, (xb, yb) in enumerate(zip(x.split(10), y.split(10))):
        optimizer.zero_grad()  # <- TT302
        out, state = lstm(xb, state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(head(out), yb) / accumulate
        loss.backward()
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()  # <- TT302
            print(i, loss.item() * accumulate)


if __name__ == "__main__":
    main()
