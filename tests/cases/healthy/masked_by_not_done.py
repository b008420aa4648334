"""Rollouts of several environments: inside a rollout the state of each is multiplied by its
not-done flag; between rollouts it is detached.
"""

import torch
from torch import nn


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRUCell(3, 8)
        self.pi, self.v = nn.Linear(8, 2), nn.Linear(8, 1)

    def act(self, obs, hidden, masks):
        hidden = self.gru(obs, hidden * masks)
        dist = torch.distributions.Categorical(logits=self.pi(hidden))
        return dist, self.v(hidden).squeeze(-1), hidden


class Environments:
    def __init__(self, count):
        self.obs = torch.zeros(count, 3)

    def step(self, action):
        self.obs = self.obs + 0.5 * torch.randn_like(self.obs)
        done = torch.rand(len(self.obs)) < 0.15
        self.obs = torch.where(done.unsqueeze(1), torch.zeros(3), self.obs)
        return self.obs, (action.float() - 0.5) * self.obs[:, 0], done.float()


def main():
    torch.manual_seed(2010)
    net, envs = ActorCritic(), Environments(4)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=7e-4)
    obs, masks, hidden = envs.obs, torch.ones(4, 1), torch.zeros(4, 8)
    for _ in range(8):
        hidden = hidden.detach()
        log_probs, values, rewards, keeps, entropy = [], [], [], [], 0.0
        for _ in range(6):
            dist, value, hidden = net.act(obs, hidden, masks)
            action = dist.sample()
            obs, reward, done = envs.step(action)
            masks = (1.0 - done).unsqueeze(1)
            log_probs.append(dist.log_prob(action))
            values.append(value)
            rewards.append(reward)
            keeps.append(1.0 - done)
            entropy = entropy + dist.entropy().mean()
        with torch.no_grad():
            _, R, _ = net.act(obs, hidden, masks)
        loss = -0.01 * entropy
        for t in reversed(range(6)):
            R = rewards[t] + 0.95 * R * keeps[t]
            advantage = R - values[t]
            loss = loss + (0.5 * advantage.pow(2) - log_probs[t] * advantage.detach()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
