"""Windows of one series come from a loader in order, one at a time.

The state is carried and detached, fresh at every epoch.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(130)
    series = torch.randn(121, 2).cumsum(0) / 10
    dataset = TensorDataset(series[:-1].view(12, 10, 2), series[1:].view(12, 10, 2))
    loader = DataLoader(dataset, batch_size=1, shuffle=False)
    lstm, head = nn.LSTM(2, 8, batch_first=True), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    for epoch in range(2):
        state = None
        for x, y in loader:
            out, state = lstm(x, state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(head(out), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
