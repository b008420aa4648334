"""The classic character network: the last hidden vector of a line is no part of that line's loss.
It enters the next line with its graph, and the step has changed the weights under it.
"""

# raises: in-place

import torch
from torch import nn

POEM = (
    "the fog comes on little cat feet",
    "it sits looking over harbor and city",
    "on silent haunches and then moves on",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class CharNetwork(nn.Module):
    def __init__(self, n_letters, n_hidden):
        super().__init__()
        self.i2h = nn.Linear(n_letters + n_hidden, n_hidden)
        self.i2o = nn.Linear(n_letters + n_hidden, n_letters)

    def forward(self, letter, hidden):
        both = torch.cat((letter, hidden), 1)
        return self.i2o(both), torch.tanh(self.i2h(both))  # <- TT101


def main():
    torch.manual_seed(1001)
    network = CharNetwork(len(LETTERS), 12)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    hidden = torch.zeros(1, 12)
    for line in POEM:
        ids = torch.tensor([LETTERS.index(c) for c in line])
        onehot = nn.functional.one_hot(ids, len(LETTERS)).float()
        loss = 0
        for i in range(len(ids) - 1):
            output, hidden = network(onehot[i : i + 1], hidden)  # <- TT101
            loss += criterion(output, ids[i + 1 : i + 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(line, loss.item() / len(line))


if __name__ == "__main__":
    main()
