"""REINFORCE with a recurrent policy: the list of log-probabilities is not emptied after an episode,
so the next loss contains the last one again.
"""

# raises: second time

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.action = nn.GRUCell(4, 8), nn.Linear(8, 3)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, observation, h):
        h = self.rnn(observation, h)
        return Categorical(logits=self.action(h)), h


def run_episode(policy):
    h = torch.zeros(1, 8)
    for observation in torch.randn(12, 1, 4):
        choice, h = policy(observation, h)
        action = choice.sample()
        policy.saved_log_probs.append(choice.log_prob(action))  # <- TT104
        policy.rewards.append(float(action == observation[0, :3].argmax()))


def finish_episode(policy, optimizer):
    returns = torch.tensor(policy.rewards)
    returns = returns - returns.mean()
    loss = -(torch.cat(policy.saved_log_probs) * returns).sum()  # <- TT104
    optimizer.zero_grad()
    loss.backward()  # <- TT104
    optimizer.step()


def main():
    torch.manual_seed(1009)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(6):
        run_episode(policy)
        finish_episode(policy, optimizer)


if __name__ == "__main__":
    main()
