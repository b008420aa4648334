"""Every chunk of the recording is started from h0; the state at its end is called hn and never
used.
"""

import torch
from torch import nn


class Estimator(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.rnn = nn.RNN(inputs, units, num_layers=2, batch_first=True)
        self.fc = nn.Linear(units, 1)

    def forward(self, x, h0):
        out, hn = self.rnn(x, h0)  # <- TT201
        return self.fc(out), hn


def main():
    torch.manual_seed(1013)
    force = torch.randn(3, 160, 1).cumsum(1) / 12
    speed = force.cumsum(1) / 20
    model = Estimator(1, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    for epoch in range(2):
        h0 = torch.zeros(2, 3, 8)
        for k in range(0, 160, 20):
            estimate, hn = model(force[:, k : k + 20], h0)  # <- TT201
            loss = nn.functional.mse_loss(estimate, speed[:, k : k + 20])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
