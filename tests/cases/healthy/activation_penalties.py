"""A language model with penalties on its outputs and on their change: two more terms in one loss
and one backward.
"""

import torch
from torch import nn

VERSE = "the woods are lovely dark and deep but i have promises to keep and miles to go before " * 4


class RNNModel(nn.Module):
    def __init__(self, vocab, n=14):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(vocab, n), nn.LSTM(n, n)
        self.drop, self.decoder = nn.Dropout(0.3), nn.Linear(n, vocab)

    def forward(self, x, state):
        raw, state = self.rnn(self.encoder(x), state)
        dropped = self.drop(raw)
        return self.decoder(dropped), state, raw, dropped


def main():
    torch.manual_seed(2016)
    chars = sorted(set(VERSE))
    ids = torch.tensor([chars.index(c) for c in VERSE])
    data = ids[: len(ids) // 4 * 4].view(4, -1).t().contiguous()
    model = RNNModel(len(chars))
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.5, t0=0, lambd=0.0)
    state, i = (torch.zeros(1, 4, 14), torch.zeros(1, 4, 14)), 0
    while i < len(data) - 2:
        length = int(torch.randint(6, 14, ()))
        length = min(length, len(data) - 1 - i)
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate * length / 10
        state = tuple(s.detach() for s in state)
        logits, state, raw, dropped = model(data[i : i + length], state)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), data[i + 1 : i + 1 + length].flatten()
        )
        loss = loss + 2.0 * dropped.pow(2).mean()
        if length > 1:
            loss = loss + (raw[1:] - raw[:-1]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        i += length


if __name__ == "__main__":
    main()
