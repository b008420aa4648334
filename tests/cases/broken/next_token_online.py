"""One token at a time through an embedding of shape (1,); the update comes after every fifth token,
and self.hidden keeps the graph of the tokens before it.
"""

# raises: second time

import torch
from torch import nn

TEXT = "she sells sea shells by the sea shore and the shells she sells are sea shells for sure"


class NextToken(nn.Module):
    def __init__(self, vocab, dim=10):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim)
        self.out = nn.Linear(dim, vocab)
        self.hidden = torch.zeros(1, 1, dim)

    def forward(self, token):
        e = self.emb(token).view(1, 1, -1)
        y, self.hidden = self.gru(e, self.hidden)  # <- TT101
        return self.out(y.view(1, -1))


def main():
    torch.manual_seed(1003)
    words = TEXT.split()
    index = {w: i for i, w in enumerate(dict.fromkeys(words))}
    ids = [index[w] for w in words]
    model = NextToken(len(index))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for n, (now, then) in enumerate(zip(ids, ids[1:]), 1):
        logits = model(torch.tensor([now]))  # <- TT101
        loss = loss + nn.functional.cross_entropy(logits, torch.tensor([then]))
        if n % 5 == 0:
            opt.zero_grad()
            loss.backward()
            opt.step()
            loss = torch.zeros(())


if __name__ == "__main__":
    main()
