"""A character model whose `repackage` clones the hidden state.

A clone keeps the graph that detach would cut.
"""

# raises: second time

import torch
from torch import nn

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow red hen. " * 4


class CharModel(nn.Module):
    def __init__(self, n_chars, n_embed=8, n_hidden=16):
        super().__init__()
        self.encoder = nn.Embedding(n_chars, n_embed)
        self.rnn = nn.LSTM(n_embed, n_hidden)
        self.decoder = nn.Linear(n_hidden, n_chars)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)  # <- TT101
        return self.decoder(output), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, 16), weight.new_zeros(1, bsz, 16)


def repackage(hidden):
    if isinstance(hidden, torch.Tensor):
        return hidden.clone()
    return tuple(repackage(v) for v in hidden)


def main():
    torch.manual_seed(8)
    chars = sorted(set(TEXT))
    ids = torch.tensor([chars.index(c) for c in TEXT])
    bsz, bptt = 4, 10
    source = ids[: len(ids) // bsz * bsz].view(bsz, -1).t().contiguous()
    model = CharModel(len(chars))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hidden = model.init_hidden(bsz)
    for i in range(0, source.size(0) - 1 - bptt, bptt):
        hidden = repackage(hidden)
        optimizer.zero_grad()
        logits, hidden = model(source[i : i + bptt], hidden)  # <- TT101
        loss = criterion(logits.view(-1, len(chars)), source[i + 1 : i + 1 + bptt].reshape(-1))
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
