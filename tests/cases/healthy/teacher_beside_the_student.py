"""Distillation on a stream: teacher and student each carry a state of their own, the teacher's
without a graph.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, x, state):
        y, state = self.rnn(x, state)
        return self.head(y), state


def main():
    torch.manual_seed(2014)
    stream = torch.randn(3, 160, 2).cumsum(1) / 10
    labels = (stream.sum(-1).abs() * 2).long().clamp(max=2)
    teacher, student = Model(20).eval().requires_grad_(False), Model(6)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    states = {"teacher": None, "student": None}
    for t in range(0, 160, 16):
        x, y = stream[:, t : t + 16], labels[:, t : t + 16]
        soft, states["teacher"] = teacher(x, states["teacher"])
        logits, (h, c) = student(x, states["student"])
        states["student"] = (h.detach(), c.detach())
        hard = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        kl = F.kl_div(F.log_softmax(logits / 2, -1), F.softmax(soft / 2, -1), reduction="batchmean")
        optimizer.zero_grad()
        (hard + 0.1 * kl).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
