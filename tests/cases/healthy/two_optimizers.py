"""Sparse gradients for the embedding and dense ones for the rest: two optimizers, both cleared and
stepped at every chunk.
"""

import torch
from torch import nn


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6, sparse=True)
        self.cell = nn.LSTMCell(6, 10)
        self.fc = nn.Linear(10, 9)

    def forward(self, ids, state):
        logits = []
        for e in self.embed(ids).unbind(0):
            state = self.cell(e, state)
            logits.append(self.fc(state[0]))
        return torch.stack(logits), state


def main():
    torch.manual_seed(122)
    ids = torch.randint(3, (101, 2)).cumsum(0) % 9
    model = CharModel()
    optimizers = [
        torch.optim.SparseAdam(model.embed.parameters(), lr=1e-3),
        torch.optim.Adam([*model.cell.parameters(), *model.fc.parameters()], lr=1e-3),
    ]
    state = {"h": torch.zeros(2, 10), "c": torch.zeros(2, 10)}
    for i in range(0, 100, 10):
        logits, (h, c) = model(ids[i : i + 10], (state["h"], state["c"]))
        state = {"h": h.detach(), "c": c.detach()}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[i + 1 : i + 11].flatten())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


if __name__ == "__main__":
    main()
