"""An old idiom: every step of time starts from `h.data`, which cuts the graph at every step."""

import torch
import torch.nn.functional as F


def cell(params, x, h):
    wi, wh, b = params
    return torch.tanh(F.linear(x, wi, b) + F.linear(h, wh))


def main():
    torch.manual_seed(29)
    wi = (0.4 * torch.randn(9, 2)).requires_grad_()
    wh = (0.4 * torch.randn(9, 9)).requires_grad_()
    b = torch.zeros(9, requires_grad=True)
    wo = (0.4 * torch.randn(2, 9)).requires_grad_()
    optimizer = torch.optim.Adam([wi, wh, b, wo], lr=5e-3)
    path = torch.randn(81, 4, 2).cumsum(0) / 9
    h = torch.zeros(4, 9)
    for begin in range(0, 80, 8):
        loss = 0
        for t in range(begin, begin + 8):
            h_in = h.data  # <- TT203
            h = cell((wi, wh, b), path[t], h_in)
            loss = loss + F.mse_loss(F.linear(h, wo), path[t + 1])
        optimizer.zero_grad()
        (loss / 8).backward()
        optimizer.step()
        print(begin, loss.item() / 8)


if __name__ == "__main__":
    main()
