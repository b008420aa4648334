"""A costly encoder is run once per recording. Its output, detached with a gradient of its own,
collects the gradients of all chunks, which then go through the encoder in one backward.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2005)
    encoder = nn.Sequential(nn.Conv1d(1, 6, 5, padding=2), nn.Tanh())
    decoder, head = nn.GRU(6, 8), nn.Linear(8, 1)
    modules = nn.ModuleList([encoder, decoder, head])
    optimizer = torch.optim.Adam(modules.parameters(), lr=1e-3)
    recordings = [torch.randn(2, 1, 121).cumsum(-1) / 10 for _ in range(3)]
    for recording in recordings:
        optimizer.zero_grad()
        codes = encoder(recording[..., :-1]).permute(2, 0, 1)
        leaf = codes.detach().requires_grad_()
        target = recording[..., 1:].permute(2, 0, 1)
        h = None
        for x, y in zip(leaf.split(30), target.split(30)):
            out, h = decoder(x, h)
            h = h.detach()
            (nn.functional.mse_loss(head(out), y) / 4).backward()
        codes.backward(leaf.grad)
        optimizer.step()


if __name__ == "__main__":
    main()
