"""Loops that run without an error and train less than they seem to."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_


class Tagger(nn.Module):
    def __init__(self, features, tags):
        super().__init__()
        self.rnn = nn.GRU(features, 6, bidirectional=True, batch_first=True)
        self.out = nn.Linear(12, tags)

    def forward(self, x, h=None):
        y, h = self.rnn(x, h)  # <- TT212
        return self.out(y), h


def both_directions_carried():
    """The state of a bidirectional tagger goes from chunk to chunk, its backward half too."""
    torch.manual_seed(41)
    x = torch.randn(3, 96, 4).cumsum(1) / 8
    tags = (x.mean(-1) > 0).long()
    model = Tagger(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    h = None
    for i in range(0, 96, 12):
        scores, h = model(x[:, i : i + 12], h)
        h = h.detach()
        loss = F.cross_entropy(scores.flatten(0, 1), tags[:, i : i + 12].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 5, 3, padding=1)
        self.rnn = nn.LSTM(5, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, wave, state):
        z = self.conv(wave)
        z = z.view(z.size(0), z.size(2), z.size(1))  # <- TT213
        y, state = self.rnn(z, state)
        return self.out(y), state


def channels_viewed_as_steps():
    """The features of a convolution are (batch, channels, steps); a view instead of a transpose
    spreads each step over several.
    """
    torch.manual_seed(42)
    wave = torch.sin(torch.arange(161).float() / 5).repeat(2, 1, 1)
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    state = None
    for i in range(0, 160, 16):
        y, state = model(wave[:, :, i : i + 16], state)
        state = tuple(part.detach() for part in state)
        loss = F.mse_loss(y[..., 0], wave[:, 0, i + 1 : i + 17])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class DeepCell(nn.Module):
    def __init__(self, size, depth):
        super().__init__()
        self.layers = [nn.LSTMCell(size, size) for _ in range(depth)]  # <- TT305
        self.out = nn.Linear(size, size)

    def forward(self, x, states):
        ys = []
        for step in x.unbind(1):
            for n, layer in enumerate(self.layers):
                states[n] = layer(step, states[n])
                step = states[n][0]
            ys.append(self.out(step))
        return torch.stack(ys, 1), states


def layers_in_a_list():
    """The cells of a deep LSTM are in a Python list, so the optimizer has none of them."""
    torch.manual_seed(43)
    x = torch.randn(2, 91, 4).cumsum(1) / 9
    model = DeepCell(4, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)  # <- TT305
    states = [(torch.zeros(2, 4), torch.zeros(2, 4)) for _ in range(3)]
    for i in range(0, 90, 15):
        states = [tuple(part.detach() for part in state) for state in states]
        y, states = model(x[:, i : i + 15], states)
        optimizer.zero_grad()
        F.mse_loss(y, x[:, i + 1 : i + 16]).backward()
        optimizer.step()


def model_replaced():
    """The model is made anew for a longer memory, after the optimizer took the old parameters."""
    torch.manual_seed(44)
    x = torch.randn(101, 2, 3).cumsum(0) / 8
    model = nn.RNN(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # <- TT305
    model = nn.RNN(3, 3, num_layers=2)
    h = torch.zeros(2, 2, 3)
    for i in range(0, 100, 10):
        y, h = model(x[i : i + 10], h.detach())
        optimizer.zero_grad()
        F.mse_loss(y, x[i + 1 : i + 11]).backward()
        optimizer.step()


def clipped_too_late():
    """The gradients are clipped when the step has used them."""
    torch.manual_seed(45)
    x = torch.randn(121, 2, 3).cumsum(0) / 8
    model = nn.GRU(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    h = torch.zeros(1, 2, 3)
    for i in range(0, 120, 12):
        optimizer.zero_grad()
        y, h = model(x[i : i + 12], h.detach())
        F.mse_loss(y, x[i + 1 : i + 13]).backward()
        optimizer.step()
        clip_grad_norm_(model.parameters(), 0.5)  # <- TT306


class WordModel(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, dropout=0.3)
        self.out = nn.Linear(8, words)

    def forward(self, x, state):
        y, state = self.rnn(self.embed(x), state)
        return self.out(y), state


def evaluate(model, text, state):
    model.eval()  # <- TT307
    total = 0.0
    with torch.no_grad():
        for i in range(0, len(text) - 1, 10):
            y, state = model(text[i : i + 10], state)
            total += F.cross_entropy(y.flatten(0, 1), text[i + 1 : i + 11].flatten()).item()
    return total


def evaluation_goes_on():
    """model.train() is called once, before the epochs; after the first validation the model trains
    without dropout.
    """
    torch.manual_seed(46)
    text = torch.randint(20, (101, 2))
    model = WordModel(20)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def zeros():
        return torch.zeros(2, 2, 8), torch.zeros(2, 2, 8)

    for _ in range(3):
        state = zeros()
        for i in range(0, 60, 10):
            y, state = model(text[i : i + 10], tuple(part.detach() for part in state))
            loss = F.cross_entropy(y.flatten(0, 1), text[i + 1 : i + 11].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(evaluate(model, text[60:], zeros()))
