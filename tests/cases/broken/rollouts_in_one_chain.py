"""An actor-critic agent learns from rollouts of five steps of one endless episode.

Its memory goes from one rollout into the next with its graph.
"""

# raises: second time

import torch
from torch import nn


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 8)
        self.memory = nn.LSTMCell(8, 8)
        self.actor, self.critic = nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, obs, hx, cx):
        hx, cx = self.memory(torch.relu(self.body(obs)), (hx, cx))  # <- TT101
        return torch.distributions.Categorical(logits=self.actor(hx)), self.critic(hx), hx, cx


def main():
    torch.manual_seed(1007)
    world = torch.randn(41, 1, 3).cumsum(0) / 5
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    hx, cx = torch.zeros(1, 8), torch.zeros(1, 8)
    clock = 0
    for update in range(8):
        log_probs, values, rewards = [], [], []
        for _ in range(5):
            policy, value, hx, cx = agent(world[clock], hx, cx)  # <- TT101
            action = policy.sample()
            clock += 1
            rewards.append((world[clock, 0, 0] * (2 * action - 1)).item())
            log_probs.append(policy.log_prob(action))
            values.append(value.squeeze())
        R, loss = 0.0, torch.zeros(())
        for log_prob, value, reward in zip(log_probs[::-1], values[::-1], rewards[::-1]):
            R = reward + 0.9 * R
            advantage = R - value
            loss = loss + 0.5 * advantage.pow(2) - log_prob.squeeze() * advantage.detach()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(update, loss.item())


if __name__ == "__main__":
    main()
