"""A batch of eight lanes is too large: two lanes at a time, each pair with its own carried state,
and one step for the four parts of a chunk.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2017)
    rnn, head = nn.LSTM(3, 8, num_layers=2), nn.Linear(8, 3)
    optimizer = torch.optim.AdamW([*rnn.parameters(), *head.parameters()], lr=1e-3)
    stream = torch.randn(101, 8, 3).cumsum(0) / 9
    parts = stream.split(2, dim=1)
    states = [None] * len(parts)
    for t in range(0, 100, 20):
        optimizer.zero_grad()
        for i, part in enumerate(parts):
            out, state = rnn(part[t : t + 20], states[i])
            states[i] = [s.detach() for s in state]
            loss = nn.functional.mse_loss(head(out), part[t + 1 : t + 21])
            (loss / len(parts)).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
