"""A pointer walks through the text and goes back to zero at its end, but the state of the end
stays: it begins the text anew.
"""

import torch
from torch import nn

DATA = "a long time ago in a small village there lived a cat who could count up to seven"


def main():
    torch.manual_seed(1018)
    chars = sorted(set(DATA))
    ids = torch.tensor([chars.index(c) for c in DATA])
    x2h, h2h, h2y = nn.Embedding(len(chars), 14), nn.Linear(14, 14), nn.Linear(14, len(chars))
    optimizer = torch.optim.Adagrad(
        [*x2h.parameters(), *h2h.parameters(), *h2y.parameters()], lr=0.05
    )
    n, p, seq_length = 0, 0, 10
    hprev = torch.zeros(14)
    while n < 25:
        if p + seq_length + 1 > len(ids):
            p = 0  # <- TT208
        inputs, targets = ids[p : p + seq_length], ids[p + 1 : p + seq_length + 1]
        h, loss = hprev, 0.0
        for i in range(seq_length):
            h = torch.tanh(x2h(inputs[i]) + h2h(h))  # <- TT208
            loss = loss + nn.functional.cross_entropy(h2y(h), targets[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hprev = h.detach()  # <- TT208
        p += seq_length
        n += 1


if __name__ == "__main__":
    main()
