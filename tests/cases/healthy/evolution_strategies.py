"""The gradient is estimated from rewards of perturbed copies of the policy, without backward, and
given to the optimizer by hand.
"""

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.act = nn.GRUCell(2, 6), nn.Linear(6, 1)

    @torch.no_grad()
    def play(self, steps=15):
        position, h, reward = torch.ones(1, 2), torch.zeros(1, 6), 0.0
        for _ in range(steps):
            h = self.cell(position, h)
            position = 0.9 * position + 0.2 * torch.tanh(self.act(h))
            reward -= position.square().sum().item()
        return reward


def main():
    torch.manual_seed(2123)
    policy, worker = Policy(), Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for generation in range(4):
        centre = parameters_to_vector(policy.parameters()).detach()
        noise = torch.randn(5, len(centre))
        rewards = []
        for row in torch.cat([noise, -noise]):
            vector_to_parameters(centre + 0.1 * row, worker.parameters())
            rewards.append(worker.play())
        scores = torch.tensor(rewards)
        scores = (scores - scores.mean()) / (scores.std() + 1e-6)
        gradient = -(scores[:5] - scores[5:]) @ noise / 10
        sizes = [p.numel() for p in policy.parameters()]
        for p, g in zip(policy.parameters(), gradient.split(sizes)):
            p.grad = g.view_as(p)
        optimizer.step()
        print(generation, max(rewards))


if __name__ == "__main__":
    main()
