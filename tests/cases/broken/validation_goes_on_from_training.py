"""Validation after every epoch starts with the state that training left behind."""

import torch
from torch import nn


def run(net, data, h, optimizer=None):
    total = 0.0
    for i in range(0, len(data) - 1, 10):
        x, y = data[i : i + 10], data[i + 1 : i + 11]
        out, h = net["gru"](x, h)  # <- TT205
        loss = nn.functional.mse_loss(net["fc"](out), y)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        h = h.detach()
        total += loss.item()
    return total / ((len(data) - 1) // 10), h


def main():
    torch.manual_seed(33)
    train = torch.randn(81, 2, 2).cumsum(0) / 9
    valid = torch.randn(41, 2, 2).cumsum(0) / 9 - 2
    net = nn.ModuleDict({"gru": nn.GRU(2, 8), "fc": nn.Linear(8, 2)})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(2):
        net.train()
        loss, h = run(net, train, torch.zeros(1, 2, 8), optimizer)
        net.eval()
        with torch.no_grad():
            val_loss, _ = run(net, valid, h)  # <- TT205
        print(epoch, loss, val_loss)


if __name__ == "__main__":
    main()
