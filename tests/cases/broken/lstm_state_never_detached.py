"""The usual first attempt: the LSTM's state goes from chunk to chunk as it came out."""

# raises: second time

import torch
from torch import nn, optim


def make_data(n=80):
    t = torch.arange(n + 1, dtype=torch.float32)
    y = torch.sin(t / 5) + 0.5 * torch.sin(t / 3)
    return y[:-1].view(-1, 1, 1), y[1:].view(-1, 1, 1)


def train_epoch(lstm, linear, x, y, optimizer, seq_len):
    hidden = None
    total = 0.0
    for xb, yb in zip(torch.split(x, seq_len), torch.split(y, seq_len)):
        optimizer.zero_grad()
        output, hidden = lstm(xb, hidden)  # <- TT101
        loss = nn.MSELoss()(linear(output), yb)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def main():
    torch.manual_seed(5)
    x, y = make_data()
    lstm, linear = nn.LSTM(1, 12), nn.Linear(12, 1)
    optimizer = optim.SGD([*lstm.parameters(), *linear.parameters()], lr=0.01, momentum=0.9)
    for epoch in range(2):
        print(epoch, train_epoch(lstm, linear, x, y, optimizer, seq_len=8))


if __name__ == "__main__":
    main()
