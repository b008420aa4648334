"""The pixels of every image are read in one order drawn at the start, images side by side."""

import torch
from torch import nn


def main():
    torch.manual_seed(68)
    images = torch.rand(60, 5, 5)
    labels = (images.mean((1, 2)) > 0.5).long()
    order = torch.randperm(25)
    pixels = images.flatten(1)[:, order].t().unsqueeze(2)
    lstm, head = nn.LSTM(1, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(2):
        for begin in range(0, 60, 10):
            _, (h, _) = lstm(pixels[:, begin : begin + 10])
            loss = nn.functional.cross_entropy(head(h[0]), labels[begin : begin + 10])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
