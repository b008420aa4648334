"""examples/rl/ppo_lstm.py: its gradient is that of the whole history, and it learns."""

from collections import deque
from typing import Any

import pytest
import torch
from torch.distributions import Categorical

pytest.importorskip("gymnasium", reason="needs throughtime[rl]")

from examples.rl import ppo_lstm as example


def rollouts(net: Any, count: int) -> deque[Any]:
    """Rollouts of random observations that continue each other."""
    torch.manual_seed(1)
    shape, state, history = (example.STEPS, example.LANES), net.initial_state(example.LANES), []
    start = torch.ones(shape[1], dtype=torch.bool)
    for _ in range(count):
        inputs, ends = torch.randn(*shape, 2), torch.rand(shape) < 0.03
        starts = torch.cat([start[None], ends[:-1]])
        with torch.no_grad():
            outputs, after = net(inputs, state, starts)
        policy = Categorical(logits=outputs[..., :-1])
        actions = policy.sample()
        logarithms = policy.log_prob(actions) + 0.1 * torch.randn(shape)  # of older weights
        values, rewards = outputs[..., -1], torch.rand(shape)
        series = (inputs, starts, actions, logarithms, values, rewards, ends)
        history.append(example.Rollout(state, *series, torch.zeros(shape[1])))
        state, start = after, ends[-1]
    return deque(history)


@pytest.mark.slow  # a minute
def test_it_learns_to_balance_without_velocities() -> None:
    _, mean = example.train(rollouts=40, history=2, seed=0)
    assert mean > 100  # at random: 20
