"""Each step starts from a detached leaf, and the gradients are handed on by hand.

Every second step a loss goes back over the last six steps, with one update at the end.
"""

import torch
from torch import nn


class TBPTT:
    def __init__(self, cell, head, k1, k2):
        self.cell, self.head, self.k1, self.k2 = cell, head, k1, k2

    def backward_through(self, states, loss):
        loss.backward(retain_graph=True)
        for i in range(min(self.k2, len(states)) - 1):
            leaf = states[-1 - i][0]
            flow, leaf.grad = leaf.grad, None
            states[-2 - i][1].backward(flow, retain_graph=True)
        for leaf, _ in states:
            leaf.grad = None

    def train(self, inputs, targets, h):
        states = []
        for t in range(len(inputs)):
            leaf = h.detach()
            leaf.requires_grad_(True)
            h = self.cell(inputs[t], leaf)
            states = [*states[-self.k2 + 1 :], (leaf, h)]
            if (t + 1) % self.k1 == 0:
                loss = nn.functional.mse_loss(self.head(h), targets[t])
                self.backward_through(states, loss)
        return h


def main():
    torch.manual_seed(2004)
    cell, head = nn.RNNCell(2, 7), nn.Linear(7, 2)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.01)
    walks = [torch.randn(41, 3, 2).cumsum(0) / 8 for _ in range(3)]
    tbptt = TBPTT(cell, head, k1=2, k2=6)
    for walk in walks:
        optimizer.zero_grad()
        tbptt.train(walk[:-1], walk[1:], torch.zeros(3, 7))
        optimizer.step()


if __name__ == "__main__":
    main()
