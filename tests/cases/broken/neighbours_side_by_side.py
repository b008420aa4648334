"""shuffle=False, but neighbouring windows lie side by side in a batch: row 0 of the next batch
starts four windows later.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def windows_of(series, width):
    return series[:-1].unfold(0, width, width).transpose(1, 2), series[1:].unfold(
        0, width, width
    ).transpose(1, 2)


def main():
    torch.manual_seed(42)
    series = torch.randn(321, 1).cumsum(0) / 15
    loader = DataLoader(  # <- TT207
        TensorDataset(*windows_of(series, 10)), batch_size=4, shuffle=False, drop_last=True
    )
    rnn = nn.RNN(1, 8, batch_first=True)
    readout = nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *readout.parameters()], lr=1e-3)
    hidden = torch.zeros(1, 4, 8)
    for x, y in loader:  # <- TT207
        output, hidden = rnn(x, hidden)
        hidden = hidden.detach()
        loss = nn.functional.mse_loss(readout(output), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())


if __name__ == "__main__":
    main()
