"""A convolutional LSTM of two layers over clips: a list of pairs as the state, zero at each clip,
detached between its chunks of frames.
"""

import torch
from torch import nn


class ConvLSTMCell(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.gates = nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)
        self.hidden = hidden

    def forward(self, x, state):
        h, c = state
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def init_hidden(self, batch, size):
        return tuple(torch.zeros(batch, self.hidden, *size) for _ in range(2))


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([ConvLSTMCell(1, 4), ConvLSTMCell(4, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, frames, states):
        predictions = []
        for x in frames.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            predictions.append(self.out(x))
        return torch.stack(predictions, 1), states


def main():
    torch.manual_seed(2022)
    clips = [torch.randn(2, 13, 1, 6, 6).cumsum(1) / 4 for _ in range(3)]
    model = Predictor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for clip in clips:
        states = [cell.init_hidden(2, (6, 6)) for cell in model.cells]
        for t in range(0, 12, 4):
            states = [(h.detach(), c.detach()) for h, c in states]
            prediction, states = model(clip[:, t : t + 4], states)
            loss = nn.functional.mse_loss(prediction, clip[:, t + 1 : t + 5])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
