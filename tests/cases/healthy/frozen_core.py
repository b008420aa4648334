"""The recurrent core is frozen and runs under no_grad as a reservoir; only the readout learns."""

import torch
from torch import nn


def main():
    torch.manual_seed(123)
    reservoir = nn.RNN(1, 20).requires_grad_(False)
    readout = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(readout.parameters(), lr=1e-2)
    t = torch.arange(121) * 0.1
    wave = (t.sin() + (3 * t).cos()).view(-1, 1, 1)
    h = torch.zeros(1, 1, 20)
    for x, y in zip(wave[:-1].split(10), wave[1:].split(10)):
        with torch.no_grad():
            features, h = reservoir(x, h)
        loss = nn.functional.mse_loss(readout(features), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())


if __name__ == "__main__":
    main()
