"""The losses of actor and critic go backward one after the other through the GRU that both share;
the first frees its graph.
"""

# raises: second time

import torch
from torch import nn


def main():
    torch.manual_seed(1010)
    trunk, pi, v = nn.GRU(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)
    optimizer = torch.optim.Adam([*trunk.parameters(), *pi.parameters(), *v.parameters()], lr=3e-4)
    observations = torch.randn(80, 4, 3).cumsum(0) / 8
    actions = torch.randint(2, (80, 4))
    returns = torch.randn(80, 4).cumsum(0) / 8
    memory = torch.zeros(1, 4, 8)
    for i in range(0, 80, 16):
        features, memory = trunk(observations[i : i + 16], memory.detach())
        value = v(features).squeeze(-1)
        advantage = returns[i : i + 16] - value
        log_prob = -nn.functional.cross_entropy(
            pi(features).flatten(0, 1), actions[i : i + 16].flatten(), reduction="none"
        )
        actor_loss = -(log_prob * advantage.detach().flatten()).mean()
        critic_loss = advantage.pow(2).mean()
        optimizer.zero_grad()
        actor_loss.backward()  # <- TT105
        critic_loss.backward()  # <- TT105
        optimizer.step()


if __name__ == "__main__":
    main()
