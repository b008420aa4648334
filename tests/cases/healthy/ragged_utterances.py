"""Utterances of many lengths lie one after another in one tensor.

Each is a thing of its own and begins from zero.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(207)
    lstm, head = nn.LSTM(5, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
    frames = torch.randn(200, 5).cumsum(0) / 10
    for utterance in frames.split([11, 13, 9, 20, 17, 30, 40, 60]):
        y, _ = lstm(utterance.unsqueeze(1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(y[-1]), torch.tensor([1])).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
