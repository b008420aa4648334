"""Learning to learn: an LSTM proposes the updates of another model. Its state and that model's
weights keep their graph for five updates, then both are detached.
"""

import torch
from torch import nn


class Proposer(nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, n), nn.Linear(n, 1)

    def forward(self, gradient, state):
        state = self.cell(gradient.unsqueeze(-1), state)
        return 0.1 * self.out(state[0]).squeeze(-1), state


def main():
    torch.manual_seed(2120)
    proposer = Proposer()
    meta = torch.optim.Adam(proposer.parameters(), lr=3e-3)
    for _ in range(2):
        A, b = torch.randn(6, 6), torch.randn(6)
        theta = torch.zeros(6, requires_grad=True)
        state = (torch.zeros(6, 8), torch.zeros(6, 8))
        total = 0.0
        for step in range(1, 21):
            loss = (A @ theta - b).square().mean()
            (gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)
            total = total + loss
            update, state = proposer(gradient.detach(), state)
            theta = theta + update
            if step % 5 == 0:
                total = total + (A @ theta - b).square().mean()
                meta.zero_grad()
                total.backward()
                meta.step()
                theta = theta.detach().requires_grad_()
                state = tuple(s.detach() for s in state)
                total = 0.0


if __name__ == "__main__":
    main()
