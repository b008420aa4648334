"""Sequence to sequence with attention: at some steps the decoder is given its own choice, which is
detached, as an id must be; its state is not.
"""

import random

import torch
from torch import nn


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


def main():
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


if __name__ == "__main__":
    main()
