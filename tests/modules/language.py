"""Language models: flat outputs, init_hidden, one character per call, tied weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, chunked, one_hots, stepped, swap, tokens

V = 11


class WordModel(nn.Module):
    """pytorch/examples word_language_model style: flat log-probabilities, init_hidden(bsz)."""

    def __init__(
        self, kind: str, words: int, width: int, units: int, depth: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.words = words
        self.dropout = nn.Dropout(0.3)
        self.lookup = nn.Embedding(words, width)
        between = 0.3 if depth > 1 else 0.0
        if kind == "RNN_RELU":
            self.body = nn.RNN(width, units, depth, nonlinearity="relu", dropout=between)
        else:
            self.body = {"LSTM": nn.LSTM, "GRU": nn.GRU}[kind](width, units, depth, dropout=between)
        self.head = nn.Linear(units, words)
        if tied:
            self.head.weight = self.lookup.weight

    def forward(self, sentence: Tensor, hidden):
        features, hidden = self.body(self.dropout(self.lookup(sentence)), hidden)
        scores = self.head(self.dropout(features)).view(-1, self.words)
        return torch.log_softmax(scores, dim=-1), hidden

    def init_hidden(self, bsz: int):
        like = self.head.weight
        shape = (self.body.num_layers, bsz, self.body.hidden_size)
        if isinstance(self.body, nn.LSTM):
            return like.new_zeros(shape), like.new_zeros(shape)
        return like.new_zeros(shape)


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


class NameClassifier(nn.Module):
    """char_rnn_classification tutorial style: one letter per call, initHidden()."""

    def __init__(self, letters: int, units: int, languages: int) -> None:
        super().__init__()
        self.units = units
        self.to_hidden = nn.Linear(letters + units, units)
        self.to_output = nn.Linear(letters + units, languages)
        self.normalise = nn.LogSoftmax(dim=1)

    def forward(self, letter: Tensor, hidden: Tensor):
        both = torch.cat([letter, hidden], dim=1)
        answer = self.normalise(self.to_output(both))
        return answer, torch.tanh(self.to_hidden(both))

    def initHidden(self) -> Tensor:
        return torch.zeros(1, self.units)


class NameGenerator(nn.Module):
    """char_rnn_generation tutorial style: hidden and output combined, dropout, initHidden()."""

    def __init__(self, letters: int, units: int, answers: int) -> None:
        super().__init__()
        self.units = units
        self.to_hidden = nn.Linear(letters + units, units)
        self.to_draft = nn.Linear(letters + units, answers)
        self.to_answer = nn.Linear(units + answers, answers)
        self.finish = nn.Sequential(nn.Dropout(0.1), nn.LogSoftmax(dim=1))

    def forward(self, letter: Tensor, hidden: Tensor):
        both = torch.cat([letter, hidden], dim=1)
        new, draft = self.to_hidden(both), self.to_draft(both)
        return self.finish(self.to_answer(torch.cat([new, draft], dim=1))), new

    def initHidden(self) -> Tensor:
        return torch.zeros(1, self.units)


class OneCharacter(nn.Module):
    """Early char-rnn style: one character of one text per call, view(1, 1, -1)."""

    def __init__(self, characters: int = V, units: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.lookup = nn.Embedding(characters, units)
        self.gru = nn.GRU(units, units, depth)
        self.head = nn.Linear(units, characters)

    def forward(self, character: Tensor, hidden: Tensor):
        vector = self.lookup(character.view(1, -1)).view(1, 1, -1)
        vector, hidden = self.gru(vector, hidden)
        return self.head(vector.view(1, -1)), hidden

    def init_hidden(self) -> Tensor:
        return torch.zeros(self.gru.num_layers, 1, self.gru.hidden_size)


class OneCharacterBatch(nn.Module):
    """char-rnn style: one character of every text per call, init_hidden(batch_size)."""

    def __init__(self, characters: int = V, units: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.depth, self.units = depth, units
        self.lookup = nn.Embedding(characters, units)
        self.lstm = nn.LSTM(units, units, depth)
        self.head = nn.Linear(units, characters)

    def forward(self, characters: Tensor, hidden):
        texts = characters.size(0)
        vectors, hidden = self.lstm(self.lookup(characters).view(1, texts, -1), hidden)
        return self.head(vectors.view(texts, -1)), hidden

    def init_hidden(self, batch_size: int):
        return tuple(torch.zeros(self.depth, batch_size, self.units) for _ in "hc")


class CharNet(nn.Module):
    """Online-course char-rnn style: one-hot batch-first input, flat outputs, weight.new zeros."""

    def __init__(self, characters: int = V, units: int = 6, depth: int = 2) -> None:
        super().__init__()
        self.units, self.depth = units, depth
        self.lstm = nn.LSTM(characters, units, depth, dropout=0.4, batch_first=True)
        self.forget = nn.Dropout(0.4)
        self.fc = nn.Linear(units, characters)

    def forward(self, one_hot: Tensor, hidden):
        seen, hidden = self.lstm(one_hot, hidden)
        rows = self.forget(seen).contiguous().view(-1, self.units)
        return self.fc(rows), hidden

    def init_hidden(self, batch_size: int):
        like = self.fc.weight.data
        h = like.new(self.depth, batch_size, self.units).zero_()
        return h, h.clone()


def _char_net_step(m: nn.Module, x: Tensor, state):
    y, state = m(swap(x), state)
    return y.view(x.size(1), x.size(0), -1).transpose(0, 1), state


class TutorialModel(nn.Module):
    """Tutorial-collection style: batch-first tokens, (h, c) argument, out flattened, no init."""

    def __init__(self, words: int = V, width: int = 5, units: int = 6) -> None:
        super().__init__()
        self.lookup = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, units, batch_first=True)
        self.head = nn.Linear(units, words)

    def forward(self, sentence: Tensor, states):
        seen, (h, c) = self.lstm(self.lookup(sentence), states)
        lanes, steps, size = seen.shape
        return self.head(seen.reshape(lanes * steps, size)), (h, c)


class BatchFirstModel(nn.Module):
    """Plain batch-first GRU text model: hidden=None, logits (B, T, V)."""

    def __init__(self, vocab_size: int = V, dim: int = 5, hidden: int = 7) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.gru = nn.GRU(dim, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, vocab_size)

    def forward(self, tokens: Tensor, hidden: Tensor | None = None):
        embedded = self.embedding(tokens)
        output, hidden = self.gru(embedded, hidden)
        return self.out(output), hidden


class WithPreviousState(nn.Module):
    """Text-generation article style: init_state(n) for an LSTM that is time first."""

    def __init__(self, words: int = V, units: int = 6) -> None:
        super().__init__()
        self.lookup = nn.Embedding(words, 5)
        self.lstm = nn.LSTM(5, units, num_layers=3, dropout=0.2)
        self.head = nn.Linear(units, words)

    def forward(self, words: Tensor, prev_state):
        seen, new_state = self.lstm(self.lookup(words), prev_state)
        return self.head(seen), new_state

    def init_state(self, sequence_length: int):
        zeros = torch.zeros(3, sequence_length, self.lstm.hidden_size)
        return zeros, zeros.clone()


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


class ScratchRNN(nn.Module):
    """A recurrence written out with parameters; the state comes back beside the outputs."""

    def __init__(self, size: int, units: int) -> None:
        super().__init__()
        self.read = nn.Parameter(torch.randn(size, units) * 0.4)
        self.remember = nn.Parameter(torch.randn(units, units) * 0.4)
        self.bias = nn.Parameter(torch.zeros(units))

    def forward(self, steps: Tensor, state: Tensor | None = None):
        if state is None:
            state = steps.new_zeros(steps.size(1), len(self.bias))
        seen = []
        for step in steps:
            state = torch.tanh(step @ self.read + state @ self.remember + self.bias)
            seen.append(state)
        return seen, state


class ScratchModel(nn.Module):
    """Textbook scratch style: takes a state, hands it to its own RNN, returns the logits only."""

    def __init__(self, words: int = V, units: int = 6) -> None:
        super().__init__()
        self.words = words
        self.rnn = ScratchRNN(words, units)
        self.answer = nn.Parameter(torch.randn(units, words) * 0.4)

    def forward(self, minibatch: Tensor, state: Tensor | None = None) -> Tensor:
        one_hot = F.one_hot(minibatch.T, self.words).to(self.answer)
        seen, _ = self.rnn(one_hot, state)
        return torch.stack([h @ self.answer for h in seen], dim=1)


def _scratch_step(m: ScratchModel, x: Tensor, state):
    seen, state = m.rnn(F.one_hot(x, V).to(m.answer), state)
    return torch.stack([h @ m.answer for h in seen]), state


class Tagger(nn.Module):
    """Sequence-tagging tutorial style: one sentence, view(len, 1, -1), log-softmax scores."""

    def __init__(self, words: int = V, width: int = 5, units: int = 6, tags: int = 4) -> None:
        super().__init__()
        self.units = units
        self.lookup = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, units)
        self.to_tag = nn.Linear(units, tags)
        self.hidden = self.init_hidden()

    def init_hidden(self):
        return tuple(torch.zeros(1, 1, self.units) for _ in range(2))

    def forward(self, sentence: Tensor) -> Tensor:
        length = len(sentence)
        vectors = self.lookup(sentence).view(length, 1, -1)
        vectors, self.hidden = self.lstm(vectors, self.hidden)
        return torch.log_softmax(self.to_tag(vectors.view(length, -1)), dim=1)


def _tagger_start(m: Tagger, x: Tensor) -> None:
    m.hidden = m.init_hidden()


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
    Case(
        "word_lstm_flat",
        lambda: WordModel("LSTM", V, 5, 6, 2),
        tokens(V),
        "carry",
        oracle=chunked(_flat_step, _init_hidden),
    ),
    Case(
        "word_gru_tied",
        lambda: WordModel("GRU", V, 6, 6, 2, tied=True),
        tokens(V),
        "carry",
        oracle=chunked(_flat_step, _init_hidden),
    ),
    Case(
        "word_rnn_relu",
        lambda: WordModel("RNN_RELU", V, 5, 6, 1),
        tokens(V),
        "carry",
        oracle=chunked(_flat_step, _init_hidden),
    ),
    Case(
        "word_awd",
        RegularisedModel,
        tokens(V),
        "carry",
        oracle=chunked(_flat_step, _init_hidden),
        note="keeps a non-leaf weight: copy.deepcopy of the module fails after a call",
    ),
    Case(
        "char_name_classifier",
        lambda: NameClassifier(7, 6, 4),
        one_hots(7),
        "carry",
        oracle=stepped(lambda m, x, h: m(x, h), lambda m, x: m.initHidden().expand(x.size(1), -1)),
        note="initHidden() gives one lane; widened",
    ),
    Case(
        "char_name_generator",
        lambda: NameGenerator(7, 6, 7),
        one_hots(7),
        "carry",
        oracle=stepped(lambda m, x, h: m(x, h), lambda m, x: m.initHidden().expand(x.size(1), -1)),
        note="linear recurrence (no tanh) as in the tutorial",
    ),
    Case(
        "char_one_lane_gru",
        OneCharacter,
        tokens(V),
        "lane",
        oracle=stepped(lambda m, x, h: m(x, h), lambda m, x: m.init_hidden()),
        lanes=1,
    ),
    Case(
        "char_step_lstm",
        OneCharacterBatch,
        tokens(V),
        "carry",
        oracle=stepped(lambda m, x, h: m(x, h), _init_hidden),
    ),
    Case(
        "char_net_flat_batch_first",
        CharNet,
        one_hots(V),
        "carry",
        oracle=chunked(_char_net_step, _init_hidden),
    ),
    Case(
        "tokens_batch_first_flat",
        TutorialModel,
        tokens(V),
        "carry",
        oracle=chunked(
            _char_net_step,
            lambda m, x: (torch.zeros(1, x.size(1), 6), torch.zeros(1, x.size(1), 6)),
        ),
    ),
    Case(
        "tokens_batch_first_logits",
        BatchFirstModel,
        tokens(V),
        "carry",
        oracle=chunked(lambda m, x, h: (lambda y, s: (swap(y), s))(*m(swap(x), h))),
    ),
    Case(
        "words_init_state",
        WithPreviousState,
        tokens(V),
        "carry",
        oracle=chunked(lambda m, x, s: m(x, s), lambda m, x: m.init_state(x.size(1))),
    ),
    Case(
        "textbook_begin_state",
        TextbookModel,
        tokens(V),
        "carry",
        oracle=chunked(_textbook_step, lambda m, x: m.begin_state(x.device, batch_size=x.size(1))),
        note="input batch first, flat output time first; begin_state(device, batch_size)",
    ),
    Case(
        "textbook_scratch",
        ScratchModel,
        tokens(V),
        "carry",
        oracle=chunked(_scratch_step),
        plain=lambda m, x: swap(m(swap(x))),
        note="the state goes in by an argument and comes back only from the inner module",
    ),
    Case(
        "tagger_one_sentence",
        Tagger,
        tokens(V),
        "lane",
        oracle=chunked(lambda m, x, _: (m(x[:, 0])[:, None], None), _tagger_start),
        lanes=1,
    ),
    Case(
        "translation_encoder_one_word",
        TranslationEncoder,
        tokens(V),
        "lane",
        oracle=stepped(
            lambda m, x, h: (lambda y, s: (y[0], s))(*m(x, h)), lambda m, x: m.initHidden()
        ),
        lanes=1,
        note="output and state have the same shape and value",
    ),
]
