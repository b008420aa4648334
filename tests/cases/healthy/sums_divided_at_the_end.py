"""Sums of losses over chunks of any length; the gradients are divided once by the number of tokens
before the step.
"""

import torch
from torch import nn

STORY = "an old man lived in the mountains with a dog and the dog lived there with an old man"


def main():
    torch.manual_seed(2108)
    chars = sorted(set(STORY))
    ids = torch.tensor([chars.index(c) for c in STORY])
    table, lstm, out = nn.Embedding(len(chars), 8), nn.LSTM(8, 8), nn.Linear(8, len(chars))
    model = nn.ModuleList([table, lstm, out])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(4):
        state, count, total = None, 0, 0.0
        optimizer.zero_grad()
        for x, y in zip(ids[:-1].split(20), ids[1:].split(20)):
            hidden, state = lstm(table(x), state)
            state = (state[0].detach(), state[1].detach())
            loss = nn.functional.cross_entropy(out(hidden), y, reduction="sum")
            loss.backward()
            count += len(y)
            total += loss.item()
        for p in model.parameters():
            p.grad /= count
        optimizer.step()
        print(epoch, total / count)


if __name__ == "__main__":
    main()
