"""Windows of one series come from a loader with shuffle=True while the state is carried from batch
to batch.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 8, batch_first=True)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.fc(y), state


def main():
    torch.manual_seed(39)
    series = torch.randn(161, 2).cumsum(0) / 12
    windows = torch.stack([series[i : i + 11] for i in range(0, 160, 10)])
    dataset = TensorDataset(windows[:, :-1], windows[:, 1:])
    loader = DataLoader(dataset, batch_size=1, shuffle=True)  # <- TT207
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    state = None
    for x, y in loader:  # <- TT207
        if state is not None:
            state = tuple(s.detach() for s in state)
        prediction, state = net(x, state)
        loss = nn.functional.mse_loss(prediction, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
