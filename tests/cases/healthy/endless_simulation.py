"""What is called an epoch is only a report: the simulated series never starts again, so its state
is never reset.
"""

import torch
from torch import nn


class Simulation:
    def __init__(self, lanes):
        self.x = torch.zeros(lanes, 2)

    def run(self, steps):
        frames = []
        for _ in range(steps):
            self.x = 0.99 * self.x + 0.1 * torch.randn_like(self.x)
            frames.append(self.x)
        return torch.stack(frames)


def main():
    torch.manual_seed(2102)
    simulation = Simulation(4)
    lstm, head = nn.LSTM(2, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=1e-3)
    state, last = None, simulation.run(1)
    for epoch in range(3):
        total = 0.0
        for _ in range(5):
            frames = torch.cat([last, simulation.run(16)])
            last = frames[-1:]
            out, state = lstm(frames[:-1], state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(head(out), frames[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(epoch, total / 5)


if __name__ == "__main__":
    main()
