"""The chunks of a stream are visited in the order of torch.randperm, and h goes from one to the
next as if they touched.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(40)
    stream = torch.sin(torch.arange(121) * 0.17).view(-1, 1, 1) + 0.05 * torch.randn(121, 2, 1)
    chunks = list(zip(stream[:-1].split(10), stream[1:].split(10)))
    gru = nn.GRU(1, 9)
    head = nn.Linear(9, 1)
    optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters()], lr=0.05)
    h = torch.zeros(1, 2, 9)
    for index in torch.randperm(len(chunks)).tolist():  # <- TT207
        x, y = chunks[index]
        y_hat, h = gru(x, h.detach())  # <- TT207
        loss = (head(y_hat) - y).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(index, loss.item())


if __name__ == "__main__":
    main()
