"""A language model on adjacent batches: the state comes back from every call and is never given to
the next one.
"""

import torch
from torch import nn

CORPUS = "a rose is a rose is a rose and so on it goes until nobody knows how the poem flows " * 5


def batchify(ids, lanes):
    steps = len(ids) // lanes
    return ids[: steps * lanes].view(lanes, steps).t().contiguous()


class LanguageModel(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, 8)
        self.core = nn.RNN(8, 16, nonlinearity="tanh")
        self.logits = nn.Linear(16, vocab)

    def forward(self, ids, hidden=None):
        hidden_states, hidden = self.core(self.table(ids), hidden)  # <- TT201
        return self.logits(hidden_states), hidden


def main():
    torch.manual_seed(24)
    alphabet = {c: i for i, c in enumerate(sorted(set(CORPUS)))}
    stream = batchify(torch.tensor([alphabet[c] for c in CORPUS]), lanes=4)
    model, bptt = LanguageModel(len(alphabet)), 11
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i in range(0, stream.size(0) - 1 - bptt, bptt):
        model.zero_grad()
        logits, hidden = model(stream[i : i + bptt])  # <- TT201
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), stream[i + 1 : i + 1 + bptt].flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    print(loss.item())


if __name__ == "__main__":
    main()
