"""A minimal gated cell written with matrices and a hand-made update.

H is cut between chunks with detach_().
"""

import torch


def chunk_loss(params, x, y, h):
    w, u, g, v = params
    loss = 0.0
    for x_t, y_t in zip(x, y):
        gate = torch.sigmoid(torch.cat([x_t, h], 1) @ g)
        h = gate * h + (1 - gate) * torch.tanh(x_t @ w + h @ u)
        loss = loss + (h @ v - y_t).pow(2).mean()
    return loss / len(x), h


def main():
    torch.manual_seed(127)
    params = [
        (0.3 * torch.randn(shape)).requires_grad_()
        for shape in ((3, 10), (10, 10), (13, 10), (10, 1))
    ]
    x = torch.randn(72, 4, 3)
    y = x.sum(-1, keepdim=True).cumsum(0).tanh()
    h = torch.zeros(4, 10)
    for k in range(9):
        loss, h = chunk_loss(params, x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8], h)
        loss.backward()
        h.detach_()
        with torch.no_grad():
            for p in params:
                p -= 0.05 * p.grad
                p.grad.zero_()
        print(k, loss.item())


if __name__ == "__main__":
    main()
