"""Token after token, one vector of state. The gradients of the text are gathered in pieces of six
tokens with retain_graph=True, each time back to the first token.
"""

import torch
from torch import nn

POEM = "if you can keep your head when all about you are losing theirs and blaming it on you"


class Reader(nn.Module):
    def __init__(self, vocab, n=10):
        super().__init__()
        self.table = nn.Embedding(vocab, n)
        self.mix = nn.Linear(2 * n, n)
        self.guess = nn.Linear(n, vocab)

    def forward(self, word, memory):
        memory = torch.tanh(self.mix(torch.cat([self.table(word), memory])))  # <- TT102
        return self.guess(memory), memory


def main():
    torch.manual_seed(1030)
    words = POEM.split()
    vocab = {w: i for i, w in enumerate(dict.fromkeys(words))}
    ids = torch.tensor([vocab[w] for w in words])
    reader = Reader(len(vocab))
    optimizer = torch.optim.Adam(reader.parameters(), lr=0.01)
    for _ in range(3):
        memory = torch.zeros(10)
        optimizer.zero_grad()
        piece = 0.0
        for i in range(len(ids) - 1):
            logits, memory = reader(ids[i], memory)  # <- TT102
            piece = piece + nn.functional.cross_entropy(logits, ids[i + 1])
            if i % 6 == 5 or i == len(ids) - 2:
                piece.backward(retain_graph=True)  # <- TT102
                piece = 0.0
        optimizer.step()


if __name__ == "__main__":
    main()
