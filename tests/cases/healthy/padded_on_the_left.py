"""Sentences are padded on the left, and the state is held at zero until the first word, where its
gradient rightly ends.
"""

import torch
from torch import nn


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


def main():
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


if __name__ == "__main__":
    main()
