"""A frozen LSTM between a learnt embedding and head: retain_graph=True raises nothing here, and the
graph only grows.
"""

import torch
from torch import nn


class Probe(nn.Module):
    def __init__(self, core, vocab):
        super().__init__()
        self.embed = nn.Embedding(vocab, core.input_size)
        self.core = core.requires_grad_(False)
        self.head = nn.Linear(core.hidden_size, vocab)

    def forward(self, tokens, state=None):
        out, state = self.core(self.embed(tokens), state)
        return self.head(out), state


def main():
    torch.manual_seed(14)
    probe = Probe(nn.LSTM(6, 10), vocab=9)
    trainable = [p for p in probe.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    tokens = torch.randint(9, (151, 3))
    state = None
    for step in range(15):
        source, target = tokens[10 * step : 10 * step + 10], tokens[10 * step + 1 : 10 * step + 11]
        logits, state = probe(source, state)
        loss = nn.functional.cross_entropy(logits.reshape(-1, 9), target.reshape(-1))
        optimizer.zero_grad()
        loss.backward(retain_graph=True)  # <- TT102
        optimizer.step()


if __name__ == "__main__":
    main()
