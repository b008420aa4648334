"""The loss is summed over the chunks and the sum so far is sent backward at every chunk."""

# raises: second time

import torch
from torch import nn


def main():
    torch.manual_seed(18)
    net = nn.ModuleDict({"rnn": nn.GRU(1, 8), "out": nn.Linear(8, 1)})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    time = torch.linspace(0, 12, 121)
    signal = torch.stack([torch.sin(time), torch.cos(time)], dim=1).unsqueeze(-1)
    h, total_loss = None, 0
    for i in range(12):
        x, y = signal[10 * i : 10 * i + 10], signal[10 * i + 1 : 10 * i + 11]
        out, h = net["rnn"](x, h)
        h = h.detach()
        total_loss = total_loss + nn.functional.mse_loss(net["out"](out), y)  # <- TT104
        optimizer.zero_grad()
        total_loss.backward()  # <- TT104
        optimizer.step()
    print("mean loss", total_loss.item() / 12)


if __name__ == "__main__":
    main()
