"""The state is stored in a registered buffer together with its graph; a buffer detaches nothing."""

# raises: second time

import torch
from torch import nn


class StatefulRNN(nn.Module):
    def __init__(self, batch_size, n_in, n_hidden):
        super().__init__()
        self.rnn = nn.RNN(n_in, n_hidden)
        self.fc = nn.Linear(n_hidden, n_in)
        self.register_buffer("state", torch.zeros(1, batch_size, n_hidden), persistent=False)

    def forward(self, x):
        y, new_state = self.rnn(x, self.state)  # <- TT101
        self.state = new_state
        return self.fc(y)


def train(model, series, chunk, lr):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr)
    losses = []
    for i in range((len(series) - 1) // chunk):
        piece = series[i * chunk : (i + 1) * chunk + 1]
        optimizer.zero_grad()
        prediction = model(piece[:-1])
        loss = nn.functional.mse_loss(prediction, piece[1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main():
    torch.manual_seed(2)
    series = torch.randn(81, 2, 4).cumsum(0) * 0.1
    print(train(StatefulRNN(2, 4, 7), series, chunk=8, lr=1e-3))


if __name__ == "__main__":
    main()
