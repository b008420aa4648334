"""Every update reads an excerpt from a random place of the text, and goes on with the state of the
excerpt before.
"""

import random

import torch
from torch import nn

TEXT = "in the beginning there was a loop and the loop had no end and the end had no loop " * 6
CHARS = sorted(set(TEXT))


def excerpt(ids, length):
    start = random.randrange(len(ids) - length - 1)  # <- TT207
    return ids[start : start + length], ids[start + 1 : start + length + 1]


def main():
    torch.manual_seed(1017)
    random.seed(1017)
    ids = torch.tensor([CHARS.index(c) for c in TEXT])
    encoder, rnn = nn.Embedding(len(CHARS), 10), nn.GRU(10, 10)
    decoder = nn.Linear(10, len(CHARS))
    optimizer = torch.optim.Adam(
        [*encoder.parameters(), *rnn.parameters(), *decoder.parameters()], lr=5e-3
    )
    hidden = torch.zeros(1, 10)
    for iteration in range(12):
        source, target = excerpt(ids, 20)  # <- TT207
        output, hidden = rnn(encoder(source), hidden)  # <- TT207
        hidden = hidden.detach()
        loss = nn.functional.cross_entropy(decoder(output), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(iteration, loss.item())


if __name__ == "__main__":
    main()
