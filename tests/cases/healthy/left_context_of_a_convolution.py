"""Each chunk is read with the samples before it that the convolution needs; the state goes on."""

import torch
from torch import nn


def main():
    torch.manual_seed(31)
    sound, chunk, kernel = torch.randn(3, 1, 184).cumsum(2) / 5, 18, 5
    filters, lstm, head = nn.Conv1d(1, 4, kernel), nn.LSTM(4, 9, batch_first=True), nn.Linear(9, 1)
    modules = nn.ModuleList([filters, lstm, head])
    optimizer = torch.optim.RMSprop(modules.parameters(), lr=1e-3)
    state = None
    for begin in range(kernel - 1, 184 - chunk, chunk):
        frames = filters(sound[:, :, begin - kernel + 1 : begin + chunk]).tanh()
        out, state = lstm(frames.transpose(1, 2), state)
        state = tuple(s.detach() for s in state)
        following = sound[:, 0, begin + 1 : begin + chunk + 1]
        loss = nn.functional.mse_loss(head(out).squeeze(2), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
