"""A recurrence written with matrices on plain vectors, without an axis for lanes.

The last H of a stretch begins the next one, graph and all.
"""

# raises: second time

import torch


def main():
    torch.manual_seed(1002)
    n, m = 7, 2
    W = (0.5 * torch.randn(n, m)).requires_grad_()
    U = (0.3 * torch.randn(n, n)).requires_grad_()
    V = (0.5 * torch.randn(m, n)).requires_grad_()
    opt = torch.optim.SGD([W, U, V], lr=0.01)
    series = torch.randn(97, m).cumsum(0) / 8
    H = torch.zeros(n)
    k = 12
    for start in range(0, 96, k):
        err = 0.0
        for t in range(start, start + k):
            H = torch.tanh(W @ series[t] + U @ H)  # <- TT101
            err = err + (V @ H - series[t + 1]).square().mean()
        opt.zero_grad()
        err.backward()
        opt.step()
        print(start, err.item())


if __name__ == "__main__":
    main()
