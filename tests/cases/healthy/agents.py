"""Healthy loops of agents."""

import random
from collections import deque

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Policy2(nn.Module):
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


def evolution_strategies():
    """The gradient is estimated from rewards of perturbed copies of the policy, without backward,
    and given to the optimizer by hand.
    """
    torch.manual_seed(2123)
    policy, worker = Policy2(), Policy2()
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


def masked_by_not_done():
    """Rollouts of several environments: inside a rollout the state of each is multiplied by its
    not-done flag; between rollouts it is detached.
    """
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


def sequences_from_a_replay_buffer():
    """A recurrent Q-network learns from sequences drawn from a replay buffer; each is warmed up
    from the state that was stored with its beginning.
    """
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
