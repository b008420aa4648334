"""Chunk lengths are drawn at random, and four of their mean losses make one step without regard to
the lengths.
"""

import random

import torch
from torch import nn


class CharRNN(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed, self.gru, self.fc = nn.Embedding(vocab, 8), nn.GRU(8, 16), nn.Linear(16, vocab)

    def forward(self, ids, h):
        y, h = self.gru(self.embed(ids), h)
        return self.fc(y), h


def main():
    random.seed(44)
    torch.manual_seed(44)
    stream = torch.randint(3, (260, 2)).cumsum(0) % 10
    model = CharRNN(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    accumulate, position, count, h = 4, 0, 0, torch.zeros(1, 2, 16)
    while position < 210 or count % accumulate:
        length = random.choice([4, 7, 12, 20])
        logits, h = model(stream[position : position + length], h)
        h = h.detach()
        target = stream[position + 1 : position + length + 1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        (loss / accumulate).backward()  # <- TT301
        position, count = position + length, count + 1
        if count % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(position, count, loss.item())


if __name__ == "__main__":
    main()
