"""Validation starts from a copy of the training state; training goes on from its own."""

import copy

import torch
from torch import nn


def main():
    torch.manual_seed(1306)
    stream, held_out = torch.randn(201, 3, 2).cumsum(0) / 9, torch.randn(31, 3, 2).cumsum(0) / 9
    net, head = nn.LSTM(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-3)
    state = torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)
    for i in range(0, 200, 10):
        y, state = net(stream[i : i + 10], state)
        state = tuple(s.detach() for s in state)
        loss = nn.functional.mse_loss(head(y), stream[i + 1 : i + 11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i in {40, 150}:
            net.eval()
            own = tuple(s.clone() for s in state) if i == 40 else copy.deepcopy(state)
            with torch.no_grad():
                for k in range(0, 30, 10):
                    y, own = net(held_out[k : k + 10], own)
                    print(nn.functional.mse_loss(head(y), held_out[k + 1 : k + 11]).item())
            net.train()


if __name__ == "__main__":
    main()
