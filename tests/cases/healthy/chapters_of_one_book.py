"""The chapters lie in a list, but each goes on where the one before ends: one book, one state, made
once and carried over the chapter ends.
"""

import torch
from torch import nn


def main():
    torch.manual_seed(2101)
    book = torch.randint(4, (301,)).cumsum(0) % 17
    chapters = [book[a : b + 1] for a, b in ((0, 90), (90, 170), (170, 300))]
    embed, gru, out = nn.Embedding(17, 8), nn.GRU(8, 8), nn.Linear(8, 17)
    modules = nn.ModuleList([embed, gru, out])
    optimizer = torch.optim.Adam(modules.parameters(), lr=3e-3)
    h = torch.zeros(1, 8)
    for number, chapter in enumerate(chapters):
        for i in range(0, len(chapter) - 1, 10):
            y, h = gru(embed(chapter[i : i + 10]), h.detach())
            loss = nn.functional.cross_entropy(out(y), chapter[i + 1 : i + 11])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(number, loss.item())


if __name__ == "__main__":
    main()
