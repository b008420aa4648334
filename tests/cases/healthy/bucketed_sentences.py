"""Independent sentences in buckets of one length, a new zero state for every batch."""

import random

import torch
from torch import nn


def buckets(sentences, batch):
    by_length = {}
    for sentence in sentences:
        by_length.setdefault(len(sentence), []).append(sentence)
    batches = [
        group[i : i + batch] for group in by_length.values() for i in range(0, len(group), batch)
    ]
    random.shuffle(batches)
    return [torch.stack(group, 1) for group in batches]


class Model(nn.Module):
    def __init__(self, vocab=12):
        super().__init__()
        self.embed, self.rnn, self.out = (
            nn.Embedding(vocab, 8),
            nn.LSTM(8, 12),
            nn.Linear(12, vocab),
        )

    def forward(self, words, state):
        y, state = self.rnn(self.embed(words), state)
        return self.out(y), state


def main():
    random.seed(118)
    torch.manual_seed(118)
    sentences = [torch.randint(12, (random.choice([6, 9, 13]),)) for _ in range(40)]
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for words in buckets(sentences, batch=4):
        state = (torch.zeros(1, words.size(1), 12), torch.zeros(1, words.size(1), 12))
        logits, state = model(words[:-1], state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
