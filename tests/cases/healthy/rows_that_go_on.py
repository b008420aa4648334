"""Series of four sensors, cut into pieces and stored piece by piece, as stateful layers want
them: row i of a batch goes on in row i of the next one.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(1307)
    series = torch.sin(torch.arange(241) * 0.2 + 6 * torch.rand(4, 1)).unsqueeze(-1)
    pieces = series[:, :-1].reshape(4, 12, 20, 1).transpose(0, 1).reshape(48, 20, 1)
    answers = series[:, 1:].square().reshape(4, 12, 20, 1).transpose(0, 1).reshape(48, 20, 1)
    net, head = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-3)
    h = torch.zeros(1, 4, 8)
    for i in range(0, 48, 4):
        y, h = net(pieces[i : i + 4], h)
        h = h.detach()
        loss = nn.functional.mse_loss(head(y), answers[i : i + 4])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
