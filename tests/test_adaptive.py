"""Truncation whose horizon follows the measured bias.

Shapes: `T` steps, `B` lanes.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, gradients_of
from quick import examples
from strategies import (
    Noisy,
    gradients,
    inputs,
    lawless,
    named,
    recordings,
    start,
)
from throughtime.carry import Carried

BIASES = st.dictionaries(
    st.sampled_from([2, 4, 8, 16, 24]),
    st.sampled_from([0.0, 0.0625, 0.125, 0.25, 1.0, float("nan")]),
    min_size=1,
)


def stream(*lengths: int, lanes: int = 2, chunk: int = 16) -> tt.Stream:
    return tt.Stream(recordings(lengths or [400, 400]), lanes=lanes, chunk=chunk)


class Scripted:
    """Measurements that return prescribed biases, one after another, for any horizons."""

    def __init__(self, patch: pytest.MonkeyPatch, coming: Sequence[dict[int, float]]) -> None:
        self.asked: list[list[int]] = []
        self.steps: list[int] = []
        self._coming = itertools.chain(coming, itertools.repeat(coming[-1]))
        right = tt.Adaptive.plan
        patch.setattr(
            tt.Adaptive, "plan", lambda self_, source, at, _: right(self_, source, at, self.probe)
        )

    def probe(self, policy: Any, steps: int) -> list[Tensor]:
        """The exact gradient, which is asked for first, is 1."""
        if isinstance(policy, tt.Truncated):
            horizon = policy.horizon or policy.stride
            self.asked[-1].append(horizon)
            return [torch.tensor([1 + self._biases.get(horizon, 0.0)], dtype=torch.float64)]
        self._biases = next(self._coming)
        self.asked.append([])
        self.steps.append(steps)
        return [torch.ones(1, dtype=torch.float64)]


def enough(biases: dict[int, float], tolerance: float, longest: int) -> int:
    """The shortest horizon such that it and every longer one is within the tolerance.

    The longest there is if there is none.
    """
    good = [h for h in biases if all(biases[k] <= tolerance for k in biases if k >= h)]
    return min(good, default=longest)


@examples(12)
@given(
    script=st.lists(BIASES, min_size=1, max_size=9),
    patience=st.sampled_from([1, 2, 3]),
    every=st.sampled_from([1, 2, 5]),
    stride=st.sampled_from([None, 1, 2]),
)
def test_horizon_grows_at_once_and_shrinks_one_step_after_some_patience(
    script: list[dict[int, float]], patience: int, every: int, stride: int | None
) -> None:
    net, horizons, policy = (
        named("tensor-state").net(),
        [2, 4, 8, 16, 24],
        tt.Adaptive(0.125, 2, 24, stride, every, patience),
    )
    script = [{h: results.get(h, 0.0) for h in horizons} for results in script]
    now, shorter, expected, seen = 2, 0, list[int](), list[int]()
    for biases in script:
        wanted = enough(biases, 0.125, 24)
        shorter = shorter + 1 if wanted < now else 0
        if wanted > now:
            now = wanted
        elif shorter == patience:
            now, shorter = max(h for h in horizons if h < now), 0
        expected += [now] * every
    with pytest.MonkeyPatch.context() as patch:
        script_ = Scripted(patch, script)
        run = tt.updates(net, stream(3000, 3000), nn.MSELoss(), gradient=policy)
        for _ in itertools.islice(run, len(expected)):
            net.zero_grad()
            seen.append(run.policy_state["horizon"])
    assert seen == expected
    assert all(asked == horizons for asked in script_.asked)
    assert len(script_.asked) == len(script)
    assert set(script_.steps) == {96}


def measured(net: Carried, data: PolicyData, state: Any, policy: tt.Truncated) -> float:
    """The relative bias of a truncation over all of the data, by autograd over the whole of it."""
    y, _ = net(data.x, start(net, data.x) if state is None else state, data.resets)
    nn.functional.mse_loss(y[data.mask], data.targets[data.mask]).backward()
    exact = gradients(net)
    net.zero_grad()
    run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=policy, state=state)
    results = gradients_of(net, run)
    valid = sum(steps for steps, *_ in results)
    errors = [sum(g[name] * (n / valid) for n, _, g in results) - exact[name] for name in exact]
    sizes = [torch.cat([g.flatten() for g in part]).norm() for part in (errors, exact.values())]
    return (sizes[0] / sizes[1]).item()


@pytest.mark.parametrize(
    ("stride", "warm", "least"), [(None, False, 3), (1, True, 13), (3, True, 3)]
)
def test_biases_are_those_on_the_steps_ahead(stride: int | None, warm: bool, least: int) -> None:
    """At fixed weights, from the carried state, also where windows reach back to the start."""
    net, source = named("hides-layer").net(), stream(80, 60)
    count = 3 if stride is None else 20 // stride
    policy = tt.Adaptive(0.1, least, 13, stride, every=count, probe=31)
    run = tt.updates(net, source, nn.MSELoss(), gradient=policy)
    done = list(itertools.islice(run, count)) if warm else []
    position, state = source.position, done[-1].state if warm else None
    net.zero_grad()
    next(run)
    net.zero_grad()
    ahead = stream(80, 60)
    if warm:
        ahead.take(position)
    chunk = ahead.take(31)
    assert chunk is not None
    data = PolicyData.of(chunk.to(next(net.parameters()).device))
    assert [h for h, _ in run.policy_state["biases"]] == policy.horizons
    for horizon, bias in run.policy_state["biases"]:
        truncation = tt.Truncated(stride or horizon, horizon)
        expected = measured(net, data, state, truncation)
        assert expected > 1e-3
        assert bias == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("stride", "training"), [(None, True), (2, False)])
def test_measuring_moves_neither_stream_nor_gradient_nor_generator_nor_buffers(
    stride: int | None, training: bool
) -> None:
    """A policy with a fixed horizon still measures, and equals a truncation to the bit."""

    def run(policy: Any) -> tuple[dict[str, Any], list[Tensor]]:
        torch.manual_seed(0)
        net = lawless(tt.carry(Noisy().double()).train(training), inputs(3, 2))
        source = stream(60, 45)
        torch.manual_seed(5)
        updates = tt.updates(net, source, nn.MSELoss(), gradient=policy)
        losses = [update.loss for update in itertools.islice(updates, 9)]  # gradients add up
        assert not isinstance(policy, tt.Adaptive) or updates.policy_state["biases"]
        assert net.training == training
        tensors = *losses, torch.get_rng_state(), *net.buffers(), *gradients(net).values()
        return source.state_dict(), [tensor.clone() for tensor in tensors]

    results = run(tt.Adaptive(0.1, 6, 6, stride, every=1))
    expected = run(tt.Truncated(stride or 6, 6))
    assert results[0] == expected[0]
    assert all(map(torch.equal, results[1], expected[1]))
