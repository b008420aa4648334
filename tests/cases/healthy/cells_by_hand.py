"""A loop over GRU cells whose states are kept in a list, detached in place of the old list before
every chunk.
"""

import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(a, b) for a, b in zip(sizes, sizes[1:]))
        self.out = nn.Linear(sizes[-1], sizes[0])

    def forward(self, x, states):
        ys = []
        for frame in x:
            new_states = []
            for cell, h in zip(self.cells, states):
                frame = cell(frame, h)
                new_states.append(frame)
            states = new_states
            ys.append(self.out(frame))
        return torch.stack(ys), states


def main():
    torch.manual_seed(105)
    net = Stack([2, 6, 5])
    opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    walk = torch.randn(91, 3, 2).cumsum(0) / 9
    states = [torch.zeros(3, cell.hidden_size) for cell in net.cells]
    for i in range(0, 90, 9):
        states = [h.detach() for h in states]
        y, states = net(walk[i : i + 9], states)
        loss = (y - walk[i + 1 : i + 10]).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


if __name__ == "__main__":
    main()
