"""The state lives in self.h and is detached there, by assignment, when the next chunk begins."""

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 8, batch_first=True)
        self.head = nn.Linear(8, 2)
        self.h = None

    def reset(self):
        self.h = None

    def forward(self, x):
        if self.h is not None:
            self.h = self.h.detach()
        out, self.h = self.rnn(x, self.h)
        return self.head(out)


def main():
    torch.manual_seed(106)
    signal = torch.randn(4, 96, 3).cumsum(1) / 10
    labels = (signal.sum(-1) > 0).long()
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.reset()
        for x, y in zip(signal.split(12, 1), labels.split(12, 1)):
            optimizer.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(model(x).reshape(-1, 2), y.reshape(-1))
            loss.backward()
            optimizer.step()
        print(loss.item())


if __name__ == "__main__":
    main()
