"""After training a text of 150 letters is sampled, one letter at a time, with gradients on: its
graph grows with every letter.
"""

import torch
from torch import nn

LINES = ["row row row your boat", "gently down the stream", "merrily merrily merrily"]
LETTERS = sorted(set("".join(LINES)))


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 8)
        self.cell = nn.GRUCell(8, 16)
        self.letter = nn.Linear(16, len(LETTERS))

    def forward(self, token, hidden):
        hidden = self.cell(self.embedding(token), hidden)  # <- TT202
        return self.letter(hidden), hidden


def write(model, first, length):
    token, hidden, text = torch.tensor([LETTERS.index(first)]), torch.zeros(1, 16), [first]
    for _ in range(length):
        logits, hidden = model(token, hidden)  # <- TT202
        token = torch.multinomial(logits.softmax(-1), 1).view(1)
        text.append(LETTERS[token.item()])
    return "".join(text)


def main():
    torch.manual_seed(1014)
    model = Writer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for line in LINES:
        ids = torch.tensor([LETTERS.index(c) for c in line])
        hidden, loss = torch.zeros(1, 16), 0.0
        for t in range(len(ids) - 1):
            logits, hidden = model(ids[t : t + 1], hidden)
            loss = loss + nn.functional.cross_entropy(logits, ids[t + 1 : t + 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(write(model, "r", 150))


if __name__ == "__main__":
    main()
