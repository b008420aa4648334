"""PPO: four epochs over each rollout, all from the state that was stored at its beginning; the
environment goes on from the state at its end.
"""

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 8)
        self.pi, self.v = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, obs, state):
        y, state = self.lstm(obs, state)
        return self.pi(y), self.v(y).squeeze(-1), state


def main():
    torch.manual_seed(2025)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2.5e-4, eps=1e-5)
    world = torch.randn(64, 4, 3).cumsum(0) / 8
    state = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
    for obs in world.split(16):
        initial = state
        with torch.no_grad():
            logits, values, state = policy(obs, initial)
            dist = torch.distributions.Categorical(logits=logits)
            action = dist.sample()
            old = dist.log_prob(action)
            reward = obs[..., 0] * (action * 2 - 1)
            returns = reward.flip(0).cumsum(0).flip(0) / 16
            advantage = returns - values
        for _ in range(4):
            logits, value, _ = policy(obs, initial)
            dist = torch.distributions.Categorical(logits=logits)
            ratio = (dist.log_prob(action) - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            gain = torch.min(ratio * advantage, clipped * advantage).mean()
            loss = 0.5 * (value - returns).pow(2).mean() - gain - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()


if __name__ == "__main__":
    main()
