"""A ReLU network whose biases drove every unit below zero: its state is zero, and no gradient
passes any step.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(51)
    rnn = nn.RNN(2, 8, nonlinearity="relu")
    head = nn.Linear(8, 1)
    nn.init.constant_(rnn.bias_hh_l0, -20.0)
    optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.01)
    x = torch.randn(90, 3, 2).cumsum(0) / 9
    h = torch.zeros(1, 3, 8)
    for x_chunk in x.split(9):
        out, h = rnn(x_chunk, h.detach())
        loss = nn.functional.mse_loss(head(out), x_chunk.sum(-1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # <- TT303
        optimizer.step()
        print(loss.item())


if __name__ == "__main__":
    main()
