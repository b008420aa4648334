"""Forward learning without any backward: traces of the leaky units give the gradient at each step,
which is put into .grad before optimizer.step().
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2122)
    n, m, leak = 8, 3, 0.9
    weight = nn.Parameter(torch.randn(n, m) / 3)
    readout = nn.Parameter(torch.randn(1, n) / 3)
    optimizer = torch.optim.Adam([weight, readout], lr=5e-3)
    x = torch.randn(150, m).cumsum(0) / 10
    goal = x.sum(-1).tanh()
    v, trace = torch.zeros(n), torch.zeros(m)
    with torch.no_grad():
        for begin in range(0, 150, 15):
            optimizer.zero_grad()
            weight.grad, readout.grad = torch.zeros(n, m), torch.zeros(1, n)
            for t in range(begin, begin + 15):
                v = leak * v + weight @ x[t]
                trace = leak * trace + x[t]
                rate = torch.tanh(v)
                error = (readout @ rate).squeeze() - goal[t]
                readout.grad += error * rate
                weight.grad += torch.outer(error * readout[0] * (1 - rate**2), trace)
            optimizer.step()
            print(begin, error.item())


if __name__ == "__main__":
    main()
