"""examples/rl/ppo_lstm.py: its gradient is that of the whole history, and it learns."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

import throughtime as tt

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


def gradient_by_updates(net: Any, history: Any, horizon: int) -> list[Tensor]:
    lanes = torch.tensor([4, 1])
    net.zero_grad()
    state = tt.state.select(history[0].state, lanes)
    steps = example.STEPS
    policy = tt.Truncated(stride=steps, horizon=horizon * steps)
    loss_fn = tt.SequenceLoss(example.ppo_loss)
    data = example.chunks(history, lanes)
    (update,) = tt.updates(net, data, loss_fn, gradient=policy, state=state)
    assert update.steps == steps * len(lanes)
    return [p.grad.clone() for p in net.parameters()]


def gradient_by_hand(net: Any, history: Any) -> list[Tensor]:
    """Plain autograd over all rollouts from the stored state."""
    lanes = torch.tensor([4, 1])
    net.zero_grad()
    inputs, starts = (
        torch.cat([getattr(part, name)[:, lanes] for part in history])
        for name in ("inputs", "starts")
    )
    outputs, _ = net(inputs, tt.state.select(history[0].state, lanes), starts)
    outputs, newest = outputs[-example.STEPS :].flatten(0, 1), history[-1]
    advantages = newest.advantages()
    returns = (advantages + newest.values)[:, lanes].flatten()
    advantages = advantages[:, lanes].flatten()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy = Categorical(logits=outputs[:, :-1])
    old = newest.logarithms[:, lanes].flatten()
    ratio = (policy.log_prob(newest.actions[:, lanes].flatten()) - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    error = (outputs[:, -1] - returns).square().mean() / 2
    (0.5 * error - gain - 0.01 * policy.entropy().mean()).backward()
    return [p.grad.clone() for p in net.parameters()]


def test_credit_crosses_rollouts_as_plain_autograd_has_it() -> None:
    net = example.make_net(2, 2)
    history = rollouts(net, 3)
    expected = gradient_by_hand(net, history)
    pairs = zip(gradient_by_updates(net, history, 3), expected, strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) < 1e-6
    shorter = gradient_by_updates(net, history, 1)  # the mutant: each rollout alone
    assert max((a - b).abs().max().item() for a, b in zip(shorter, expected, strict=True)) > 1e-6


def test_the_net_obeys_the_laws_of_a_rollout() -> None:
    net = example.make_net(2, 2)
    part = rollouts(net, 1)[0]
    laws = tt.testing.check_rollout(net, part.inputs, part.starts, part.state)
    assert all(law.holds for law in laws)


@pytest.mark.slow  # a minute
def test_it_learns_to_balance_without_velocities() -> None:
    _, mean = example.train(rollouts=40, history=2, seed=0)
    assert mean > 100  # at random: 20
