"""examples/rl/ppo_lstm.py learns."""

import pytest

pytest.importorskip("gymnasium", reason="needs throughtime[rl]")

from examples.rl import ppo_lstm as example


@pytest.mark.slow  # a minute
def test_it_learns_to_balance_without_velocities() -> None:
    _, mean = example.train(rollouts=40, history=2, seed=0)
    assert mean > 100  # at random: 20
