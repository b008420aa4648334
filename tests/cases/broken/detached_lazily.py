"""`map` is lazy: the detach that it stands for is never executed."""

# raises: second time

import torch
from torch import nn


def fit(layers, head, stream, chunk, optimizer):
    states = [torch.zeros(stream.size(1), layer.hidden_size) for layer in layers]
    for part in stream.split(chunk):
        map(torch.Tensor.detach_, states)  # <- TT101
        loss = 0.0
        for now, after in zip(part[:-1], part[1:]):
            below = now
            for i, layer in enumerate(layers):
                states[i] = layer(below, states[i])  # <- TT101
                below = states[i]
            loss = loss + nn.functional.smooth_l1_loss(head(below), after)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def main():
    torch.manual_seed(1005)
    layers = nn.ModuleList([nn.RNNCell(3, 8), nn.GRUCell(8, 6)])
    head = nn.Linear(6, 3)
    optimizer = torch.optim.Adam([*layers.parameters(), *head.parameters()], lr=2e-3)
    stream = torch.randn(120, 2, 3).cumsum(0) / 10
    for loss in fit(layers, head, stream, 15, optimizer):  # <- TT101
        print(loss)


if __name__ == "__main__":
    main()
