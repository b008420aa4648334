"""A trainer resets its state when it is built and never again, so one patient's state runs on into
the next.
"""

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, h):
        logits = []
        for x_t in x.unbind(0):
            h = self.cell(x_t, h)  # <- TT204
            logits.append(self.head(h))
        return torch.stack(logits), h


class Trainer:
    def __init__(self, model, chunk):
        self.model, self.chunk = model, chunk
        self.optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        self.h = torch.zeros(1, 8)

    def chunk_step(self, x, y):
        logits, h = self.model(x, self.h)  # <- TT204
        self.h = h.detach()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self, patients):
        for name, (signal, label) in patients.items():
            losses = [
                self.chunk_step(x, y)
                for x, y in zip(signal.split(self.chunk), label.split(self.chunk))
            ]
            print(name, sum(losses) / len(losses))


def main():
    torch.manual_seed(31)
    patients = {}
    for name, steps in (("anna", 48), ("bert", 36), ("carl", 60)):
        signal = torch.randn(steps, 1, 3).cumsum(0) / 5
        patients[name] = (signal, (signal.sum(-1) > 0).long())
    Trainer(Recurrent(), chunk=12).fit(patients)


if __name__ == "__main__":
    main()
