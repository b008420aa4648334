"""Holt's method with learnt factors: level and trend are plain numbers, run over the whole series
from the same start in every iteration.
"""

import torch


def smooth(y, alpha, beta):
    level, trend, errors = y[0], y[1] - y[0], []
    for value in y[2:]:
        forecast = level + trend
        errors.append((value - forecast) ** 2)
        new = alpha * value + (1 - alpha) * forecast
        trend = beta * (new - level) + (1 - beta) * trend
        level = new
    return torch.stack(errors).mean()


def main():
    torch.manual_seed(2119)
    sales = torch.randn(90).cumsum(0) + 0.5 * torch.arange(90)
    raw = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.1)
    for iteration in range(12):
        alpha, beta = torch.sigmoid(raw)
        loss = smooth(sales, alpha, beta)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(iteration, loss.item(), alpha.item(), beta.item())


if __name__ == "__main__":
    main()
