"""A recurrent Q-network learns from sequences drawn from a replay buffer; each is warmed up from
the state that was stored with its beginning.
"""

import random
from collections import deque

import torch
from torch import nn


class QNetwork(nn.Module):
    def __init__(self, observation=3, actions=2, n=8):
        super().__init__()
        self.lstm, self.q = nn.LSTM(observation, n), nn.Linear(n, actions)

    def forward(self, x, state):
        y, state = self.lstm(x, state)
        return self.q(y), state


def sample(buffer, size):
    obs, act, rew, h, c = zip(*random.sample(list(buffer), size))
    return (
        torch.stack(obs, 1),
        torch.stack(act, 1),
        torch.stack(rew, 1),
        (torch.cat(h, 1), torch.cat(c, 1)),
    )


def main():
    torch.manual_seed(2008)
    random.seed(2008)
    net, target = QNetwork(), QNetwork()
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    buffer, burn_in, length = deque(maxlen=40), 4, 12
    world = torch.randn(241, 1, 3).cumsum(0) / 8
    state = (torch.zeros(1, 1, 8), torch.zeros(1, 1, 8))
    for begin in range(0, 240, length):
        obs = world[begin : begin + length]
        with torch.no_grad():
            q, after = net(obs, state)
        act = torch.where(torch.rand(length, 1) < 0.1, torch.randint(2, (length, 1)), q.argmax(-1))
        rew = (obs[..., 0] * (act * 2 - 1)).tanh()
        buffer.append((obs[:, 0], act[:, 0], rew[:, 0], *state))
        state = after
        if len(buffer) < 4:
            continue
        obs, act, rew, start = sample(buffer, 4)
        with torch.no_grad():
            _, warm = net(obs[:burn_in], start)
            _, target_warm = target(obs[:burn_in], start)
            best = target(obs[burn_in:], target_warm)[0].amax(-1)
        q, _ = net(obs[burn_in:], warm)
        chosen = q.gather(-1, act[burn_in:].unsqueeze(-1)).squeeze(-1)
        goal = rew[burn_in:-1] + 0.9 * best[1:]
        loss = nn.functional.smooth_l1_loss(chosen[:-1], goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        if begin % 60 == 0:
            target.load_state_dict(net.state_dict())


if __name__ == "__main__":
    main()
