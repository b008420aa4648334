"""Language and recommendation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, stepped, swap, tokens

V = 11


def _flat_step(m: nn.Module, x: Tensor, state):
    y, state = m(x, state)
    return y.view(*x.shape[:2], -1), state


class LockedDropout(nn.Module):
    """One dropout mask for all the steps of a call."""

    def forward(self, x: Tensor, p: float) -> Tensor:
        if not self.training or p == 0:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - p) / (1 - p)
        return x * mask


class DroppedWeights(nn.Module):
    """An LSTM whose recurrent weights are dropped once a call."""

    def __init__(self, module: nn.LSTM, p: float) -> None:
        super().__init__()
        self.module, self.p = module, p
        raw = module.weight_hh_l0
        del module._parameters["weight_hh_l0"]
        self.raw = nn.Parameter(raw.data)

    def forward(self, x: Tensor, hidden):
        keep = F.dropout(torch.ones_like(self.raw), self.p, self.training)
        self.module.weight_hh_l0 = self.raw * keep
        return self.module(x, hidden)


class RegularisedModel(nn.Module):
    """AWD-LSTM style: weight dropout, locked dropout, a list of states, flat decoded outputs."""

    def __init__(self, words: int = V, width: int = 5, units: int = 7) -> None:
        super().__init__()
        self.sizes = [(width, units), (units, width)]
        self.locked = LockedDropout()
        self.lookup = nn.Embedding(words, width)
        self.rnns = nn.ModuleList(DroppedWeights(nn.LSTM(a, b), 0.4) for a, b in self.sizes)
        self.head = nn.Linear(width, words)
        self.head.weight = self.lookup.weight

    def forward(self, sentence: Tensor, hidden):
        signal, after = self.lookup(sentence), []
        for rnn, before in zip(self.rnns, hidden, strict=True):
            signal, state = rnn(self.locked(signal, 0.2), before)
            after.append(state)
        rows = self.locked(signal, 0.3).flatten(0, 1)
        return self.head(rows), after

    def init_hidden(self, bsz: int):
        like = self.head.weight.detach()
        return [(like.new_zeros(1, bsz, n), like.new_zeros(1, bsz, n)) for _, n in self.sizes]


class TextbookModel(nn.Module):
    """Interactive-textbook style: (B, T) tokens, one-hot of the transpose, flat, begin_state."""

    def __init__(self, words: int = V, units: int = 6) -> None:
        super().__init__()
        self.words = words
        self.layer = nn.RNN(words, units)
        self.head = nn.Linear(units, words)

    def forward(self, minibatch: Tensor, state: Tensor):
        one_hot = F.one_hot(minibatch.T, self.words).to(self.head.weight)
        steps, state = self.layer(one_hot, state)
        return self.head(steps.reshape(-1, self.layer.hidden_size)), state

    def begin_state(self, device, batch_size: int = 1) -> Tensor:
        return torch.zeros(1, batch_size, self.layer.hidden_size, device=device)


def _textbook_step(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return y.view(*x.shape, -1), state


def _init_hidden(m, x: Tensor):
    return m.init_hidden(x.size(1))


class TranslationEncoder(nn.Module):
    """seq2seq tutorial encoder style: one word of one sentence per call, output and hidden."""

    def __init__(self, words: int = V, units: int = 6) -> None:
        super().__init__()
        self.lookup = nn.Embedding(words, units)
        self.gru = nn.GRU(units, units)

    def forward(self, word: Tensor, hidden: Tensor):
        return self.gru(self.lookup(word).view(1, 1, -1), hidden)

    def initHidden(self) -> Tensor:
        return torch.zeros(1, 1, self.gru.hidden_size)


CASES = [
    # Keeps a non-leaf weight: copy.deepcopy of the module fails after a call.
    Case(
        "word_awd",
        RegularisedModel,
        tokens(V),
        "carry",
        oracle=chunked(_flat_step, _init_hidden),
    ),
    # Input batch first, flat output time first; begin_state(device, batch_size).
    Case(
        "textbook_begin_state",
        TextbookModel,
        tokens(V),
        "carry",
        oracle=chunked(_textbook_step, lambda m, x: m.begin_state(x.device, batch_size=x.size(1))),
    ),
    # Output and state have the same shape and value.
    Case(
        "translation_encoder_one_word",
        TranslationEncoder,
        tokens(V),
        "lane",
        oracle=stepped(
            lambda m, x, h: (lambda y, s: (y[0], s))(*m(x, h)), lambda m, x: m.initHidden()
        ),
        lanes=1,
    ),
]
