"""The parameters are replaced after each chunk and never changed, so retain_graph=True raises
nothing, and every backward runs through all chunks before.
"""

import torch


def step(parameters, x, h):
    wx, wh, wy = parameters
    h = torch.tanh(x @ wx + h @ wh)
    return h @ wy, h


def main():
    torch.manual_seed(1029)
    shapes = ((2, 8), (8, 8), (8, 2))
    parameters = [(torch.randn(s) / 3).requires_grad_() for s in shapes]
    walk = torch.randn(101, 3, 2).cumsum(0) / 10
    h = torch.zeros(3, 8)
    for begin in range(0, 100, 10):
        loss = torch.zeros(())
        for t in range(begin, begin + 10):
            y, h = step(parameters, walk[t], h)  # <- TT102
            loss = loss + (y - walk[t + 1]).square().mean()
        loss.backward(retain_graph=True)  # <- TT102
        parameters = [(p.detach() - 0.02 * p.grad).requires_grad_() for p in parameters]
        print(begin, loss.item())


if __name__ == "__main__":
    main()
