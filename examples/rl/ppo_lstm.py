"""PPO with an LSTM in one file: CartPole without velocities, credit across rollouts.

    pip install "throughtime[rl]"
    python examples/rl/ppo_lstm.py [--rollouts 150] [--history 2] [--seed 0]

What differs from the usual single file:

- The net is called once for a rollout, and `resets` marks where an episode starts.
- `history` rollouts are kept, and the state that entered the oldest. They are played again before
  the newest one, without a loss: so the stored state, which older weights have made, is burnt in
  (Kapturowski et al. 2019), and the horizon, `history` rollouts, lets credit cross from one to the
  next. With `history` 1 this is the usual truncation at each rollout.
- The loss of PPO is a `tt.SequenceLoss` of named series: actions, advantages, returns and the
  probabilities of the policy that has acted.

References: Schulman et al., Proximal policy optimization algorithms (2017). Schulman et al.,
High-dimensional continuous control using generalized advantage estimation, ICLR (2016). Kapturowski
et al., Recurrent experience replay in distributed reinforcement learning, ICLR (2019).

Shapes: `T` steps of a rollout, `B` environments, `A` actions.
"""

import argparse
import statistics
from collections import deque
from dataclasses import dataclass
from itertools import chain
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Chunk

STEPS, LANES, EPOCHS, BATCH, RATE = 128, 8, 4, 2, 2e-3  # BATCH: lanes of an update
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, NORM = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5


def make_net(width: int, actions: int) -> Carried:
    """Outputs `(T, B, A + 1)`: logits of the actions, and the value."""
    layers = nn.Linear(width, 64), nn.Tanh(), tt.nn.LSTM(64, 64), nn.Linear(64, actions + 1)
    nn.init.orthogonal_(layers[-1].weight, 0.01)
    return tt.carry(nn.Sequential(*layers))


@dataclass
class Rollout:
    """What an agent did: all `(T, B, ...)`, and the state that entered the first step."""

    state: Any
    inputs: Tensor
    starts: Tensor
    actions: Tensor
    logarithms: Tensor  # of the probabilities of the actions
    values: Tensor
    rewards: Tensor
    ends: Tensor  # the last steps of episodes
    bootstrap: Tensor  # (B,): the value after the last step

    def advantages(self) -> Tensor:
        """Generalized advantage estimates."""
        results, advantage = torch.zeros_like(self.rewards), torch.zeros(LANES)
        following = torch.cat([self.values[1:], self.bootstrap[None]])
        rewards = (1 - GAMMA) * self.rewards  # so returns are of the order of 1
        errors = rewards + GAMMA * following * ~self.ends - self.values
        for t in reversed(range(STEPS)):
            advantage = errors[t] + GAMMA * LAMBDA * ~self.ends[t] * advantage
            results[t] = advantage
        return results


class Actor:
    """Plays the environments, and keeps the state from rollout to rollout."""

    def __init__(self, net: Carried, environments: Any, seed: int) -> None:
        self.net, self.environments = net, environments
        self.observation, _ = environments.reset(seed=seed)
        self.state = net.initial_state(LANES)
        self.start = torch.ones(LANES, dtype=torch.bool)
        self.returns, self.running = deque[float](maxlen=50), [0.0] * LANES

    @torch.no_grad()
    def play(self) -> Rollout:
        """The next `T` steps."""
        entered, rows = self.state, list[tuple[Tensor, ...]]()
        for _ in range(STEPS):
            inputs, start = positions(self.observation), self.start
            outputs, self.state = self.net(inputs[None], self.state, start[None])
            policy, value = Categorical(logits=outputs[0, :, :-1]), outputs[0, :, -1]
            action = policy.sample()
            self.observation, reward, terminated, cut, _ = self.environments.step(action.numpy())
            reward, self.start = torch.tensor(reward).float(), torch.tensor(terminated | cut)
            self._count(reward)
            logarithm = policy.log_prob(action)
            rows.append((inputs, start, action, logarithm, value, reward, self.start))
        series = [torch.stack(column) for column in zip(*rows, strict=True)]
        last, _ = self.net(positions(self.observation)[None], self.state)
        fields: list[Any] = [entered, *series, last[0, :, -1]]
        return Rollout(*fields)

    def _count(self, reward: Tensor) -> None:
        for lane in range(LANES):
            self.running[lane] += float(reward[lane])
            if self.start[lane]:
                self.returns.append(self.running[lane])
                self.running[lane] = 0.0


def positions(observation: Any) -> Tensor:
    """The observation without velocities, which the agent has to work out."""
    return torch.tensor(observation[:, [0, 2]]).float()


def ppo_loss(outputs: Tensor, chunk: Chunk) -> Tensor:
    """The clipped objective, the error of the value and the entropy, over the newest rollout."""
    newest, series = chunk.mask, chunk.series
    outputs, old = outputs[newest], {name: values[newest] for name, values in series.items()}
    policy, values = Categorical(logits=outputs[:, :-1]), outputs[:, -1]
    advantages = old["advantages"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (policy.log_prob(old["actions"]) - old["logarithms"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages, clipped * advantages).mean()
    error = 0.5 * (values - old["returns"]).square().mean()
    return VALUE * error - gain - ENTROPY * policy.entropy().mean()


def chunks(history: deque[Rollout], lanes: Tensor) -> list[Chunk]:
    """The rollouts of some lanes as adjacent chunks; the loss counts in the newest alone."""
    results: list[Chunk] = []
    for index, rollout in enumerate(history):
        advantages = rollout.advantages()
        series = {
            "actions": rollout.actions,
            "logarithms": rollout.logarithms,
            "advantages": advantages,
            "returns": advantages + rollout.values,
        }
        shape = STEPS, len(lanes)
        mask = torch.full(shape, index == len(history) - 1)
        position = torch.arange(STEPS)[:, None].expand(shape) + index * STEPS
        results.append(
            Chunk.from_tensors(
                rollout.inputs[:, lanes],
                rollout.values[:, lanes],
                resets=rollout.starts[:, lanes],
                mask=mask,
                position=position,
                series={name: values[:, lanes] for name, values in series.items()},
            )
        )
    return results


def train(rollouts: int, history: int, seed: int) -> tuple[Carried, float]:
    """The net, and the mean return of its last 50 episodes."""
    torch.manual_seed(seed)
    environments = gymnasium.make_vec(
        "CartPole-v1",
        LANES,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
    )
    net = make_net(2, 2)
    optimizer = tt.optim.Adam(net.parameters(), lr=RATE, max_norm=NORM)
    actor, kept = Actor(net, environments, seed), deque[Rollout](maxlen=history)
    gradient = tt.Truncated(stride=STEPS, horizon=history * STEPS)
    loss_fn = tt.SequenceLoss(ppo_loss)
    for number in range(1, rollouts + 1):
        kept.append(actor.play())
        optimizer.param_groups[0]["lr"] = RATE * (1 - (number - 1) / rollouts)
        for lanes in chain(*(torch.randperm(LANES).split(BATCH) for _ in range(EPOCHS))):
            data, state = chunks(kept, lanes), tt.state.select(kept[0].state, lanes)
            for _ in tt.updates(net, data, loss_fn, gradient=gradient, state=state):
                optimizer.step()
                optimizer.zero_grad()
        if number % 10 == 0:
            mean = statistics.fmean(actor.returns) if actor.returns else 0.0
            print(f"rollout {number}: {number * STEPS * LANES:,} steps, return {mean:.0f}")
    environments.close()
    return net, statistics.fmean(actor.returns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=150)
    parser.add_argument("--history", type=int, default=2, help="rollouts that credit crosses")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(options.rollouts, options.history, options.seed)


if __name__ == "__main__":
    main()
