"""`out, _ = lstm(x)` on consecutive pieces of one long series: the state that would go on is
dropped.
"""

import torch
import torch.nn.functional as F


def main():
    torch.manual_seed(22)
    series = torch.randn(150, 1, 3).cumsum(0) / 6
    future = series.roll(-2, 0)
    lstm = torch.nn.LSTM(3, 7)
    dense = torch.nn.Linear(7, 3)
    weights = [*lstm.parameters(), *dense.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.05)
    for epoch in range(2):
        losses = []
        for x, y in zip(series.split(15), future.split(15)):
            out, _ = lstm(x)  # <- TT201
            loss = F.mse_loss(dense(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(epoch, sum(losses) / len(losses))


if __name__ == "__main__":
    main()
