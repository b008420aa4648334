"""Healthy loops over text."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

CORPUS = (
    "so much depends upon a red wheel barrow glazed with rain water beside the white chickens " * 6
)


class RNNModel2(nn.Module):
    def __init__(self, vocab, hidden=16):
        super().__init__()
        self.encoder, self.drop = nn.Embedding(vocab, hidden), nn.Dropout(0.2)
        self.rnn = nn.LSTM(hidden, hidden, num_layers=2, dropout=0.2)
        self.decoder = nn.Linear(hidden, vocab)
        self.decoder.weight = self.encoder.weight
        self.hidden = hidden

    def forward(self, ids, state):
        y, state = self.rnn(self.drop(self.encoder(ids)), state)
        return self.decoder(self.drop(y)), state

    def init_state(self, lanes):
        return torch.zeros(2, lanes, self.hidden), torch.zeros(2, lanes, self.hidden)


def repackage(state):
    return state.detach() if isinstance(state, torch.Tensor) else tuple(map(repackage, state))


def language_model():
    """A language model on adjacent batches: the corpus lies in lanes, and row i of each batch goes
    on with row i of the one before.
    """
    torch.manual_seed(117)
    letters = {c: i for i, c in enumerate(sorted(set(CORPUS)))}
    ids = torch.tensor([letters[c] for c in CORPUS])
    lanes, bptt = 4, 10
    source = ids[: len(ids) // lanes * lanes].view(lanes, -1).t().contiguous()
    model, criterion = RNNModel2(len(letters)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    state = model.init_state(lanes)
    for i in range(0, len(source) - 1, bptt):
        length = min(bptt, len(source) - 1 - i)
        state = repackage(state)
        model.zero_grad()
        logits, state = model(source[i : i + length], state)
        loss = criterion(logits.flatten(0, 1), source[i + 1 : i + 1 + length].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


def packed_words_in_order():
    """Chunks of running texts are packed in the order of their lengths; the states are put into
    that order, and back into that of the texts.
    """
    torch.manual_seed(0)
    embed, lstm, head = nn.Embedding(20, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 20)
    parameters = [*embed.parameters(), *lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    texts = torch.randint(20, (5, 200))
    at, state = [0] * 5, None
    for _ in range(8):
        lengths = torch.randint(5, 15, (5,)).tolist()
        order = sorted(range(5), key=lambda i: -lengths[i])
        longest = max(lengths)
        tokens = torch.stack([texts[i, at[i] : at[i] + longest + 1] for i in order])
        counts = torch.tensor([lengths[i] for i in order])
        packed = pack_padded_sequence(embed(tokens[:, :-1]), counts, batch_first=True)
        if state is not None:
            state = tuple(s[:, order] for s in state)
        out, state = lstm(packed, state)
        back = sorted(range(5), key=order.__getitem__)
        state = tuple(s.detach()[:, back] for s in state)
        target = pack_padded_sequence(tokens[:, 1:], counts, batch_first=True).data
        loss = nn.functional.cross_entropy(head(out.data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for i in order:
            at[i] += lengths[i]


class Encoder(nn.Module):
    def __init__(self, vocab, n=8):
        super().__init__()
        self.emb, self.cell, self.out = nn.Embedding(vocab, n), nn.GRUCell(n, n), nn.Linear(n, 2)
        self.n = n

    def forward(self, ids):
        h = torch.zeros(len(ids), self.n)
        real = (ids != 0).float().unsqueeze(-1)
        for t in range(ids.size(1)):
            h = self.cell(self.emb(ids[:, t]), h) * real[:, t]
        return self.out(h)


def left_pad(sentences, length):
    rows = [torch.cat([torch.zeros(length - len(s), dtype=torch.long), s]) for s in sentences]
    return torch.stack(rows)


def padded_on_the_left():
    """Sentences are padded on the left, and the state is held at zero until the first word, where
    its gradient rightly ends.
    """
    torch.manual_seed(2003)
    sentences = [torch.randint(1, 30, (n,)) for n in (5, 12, 8, 3, 9, 12, 6, 10)]
    labels = torch.tensor([int(s.float().mean() > 15) for s in sentences])
    model = Encoder(30)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        order = torch.randperm(8)
        for rows in order.split(4):
            ids = left_pad([sentences[i] for i in rows], 12)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), labels[rows])
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


class Seq2Seq(nn.Module):
    def __init__(self, vocab, n=10):
        super().__init__()
        self.emb = nn.Embedding(vocab, n)
        self.encoder = nn.GRU(n, n, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * n, n)
        self.attend = nn.Linear(n, 2 * n)
        self.decoder = nn.GRUCell(3 * n, n)
        self.out = nn.Linear(n, vocab)

    def forward(self, source, target, ratio):
        memory, h = self.encoder(self.emb(source))
        hidden = torch.tanh(self.bridge(torch.cat([h[0], h[1]], -1)))
        token, logits = target[:, 0], []
        for t in range(1, target.size(1)):
            weight = torch.softmax((memory @ self.attend(hidden).unsqueeze(-1)).squeeze(-1), -1)
            context = (weight.unsqueeze(1) @ memory).squeeze(1)
            hidden = self.decoder(torch.cat([self.emb(token), context], -1), hidden)
            logits.append(self.out(hidden))
            forced = random.random() < ratio
            token = target[:, t] if forced else logits[-1].argmax(-1).detach()
        return torch.stack(logits, 1)


def teacher_forcing_and_sampling():
    """Sequence to sequence with attention: at some steps the decoder is given its own choice,
    which is detached, as an id must be; its state is not.
    """
    torch.manual_seed(2011)
    random.seed(2011)
    model = Seq2Seq(14)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for iteration in range(12):
        source = torch.randint(1, 14, (6, 7))
        target = torch.cat([torch.zeros(6, 1, dtype=torch.long), source.flip(1)], 1)
        logits = model(source, target, ratio=1.0 - iteration / 24)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.kv, self.proj = (
            nn.Linear(dim, dim),
            nn.Linear(dim, 2 * dim),
            nn.Linear(dim, dim),
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mem):
        context = torch.cat([mem, x], dim=1)
        k, v = self.kv(context).chunk(2, -1)
        visible = torch.ones(x.size(1), context.size(1), dtype=torch.bool).tril(mem.size(1))
        return self.norm(
            x + self.proj(F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=visible))
        )


class TransformerXL(nn.Module):
    def __init__(self, vocab, dim=16, layers=2, mem_len=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)
        self.dim, self.mem_len = dim, mem_len

    def init_mems(self, batch):
        return [torch.zeros(batch, 0, self.dim) for _ in self.layers]

    def forward(self, tokens, mems):
        x, new_mems = self.embed(tokens), []
        for layer, mem in zip(self.layers, mems):
            with torch.no_grad():
                new_mems.append(torch.cat([mem, x], dim=1)[:, -self.mem_len :])
            x = layer(x, mem)
        return self.head(x), new_mems


def transformer_memory():
    """A Transformer-XL memory: hidden vectors of the segments before, kept without a graph and
    carried from segment to segment.
    """
    torch.manual_seed(102)
    tokens = torch.randint(3, (2, 81)).cumsum(1) % 9
    model = TransformerXL(9)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    mems = model.init_mems(2)
    for i in range(0, 80, 8):
        logits, mems = model(tokens[:, i : i + 8], mems)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, i + 1 : i + 9].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
