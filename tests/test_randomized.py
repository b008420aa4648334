"""Randomized truncation: unbiased, to the last digit where every pattern of cuts can be written
down, and by statistics elsewhere.

Shapes: `T` steps, `B` lanes, `P` weights.
"""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import throughtime as tt
from policy_data import PolicyData, UpdateGrads, data_for, plain, policy_gradients
from quick import examples
from strategies import (
    Row,
    Weights,
    apart,
    some_nets,
    weights,
)
from throughtime.carry import Carried
from throughtime.gradient.randomized import Survival

EXACT = 1e-12
Lengths = tuple[int, ...]


def cut_at(patch: pytest.MonkeyPatch, lengths: Sequence[int]) -> None:
    """Stretches of these lengths, one after another, instead of drawn ones.

    The last one for ever.
    """
    coming = itertools.chain(lengths, itertools.repeat(lengths[-1]))
    patch.setattr(Survival, "draw", lambda _: next(coming))


def patterns(steps: int, grain: int, survival: Survival) -> Iterator[tuple[Lengths, float]]:
    """Every way to cut `steps` steps, and its chance.

    The last stretch may be longer than what is left.
    """
    places = (steps - 1) // grain
    for cuts in itertools.product((False, True), repeat=places):
        stops = [grain * (i + 1) for i, cut in enumerate(cuts) if cut] + [steps]
        lengths = tuple(b - a for a, b in itertools.pairwise([0, *stops]))
        chance = 1.0
        for length in lengths[:-1]:
            chance *= survival(length - grain) - survival(length)
        yield lengths, chance * survival(((lengths[-1] - 1) // grain) * grain)


def summed(results: UpdateGrads, policy: tt.Randomized, data: PolicyData) -> Weights:
    """The gradient of an epoch's mean loss from the sum of its updates: one factor for all."""
    factor = policy.mean_horizon * data.mask.shape[1] / int(data.mask.sum())
    return {
        name: torch.stack([g[name] for *_, g in results]).sum(0) * factor for name in results[0][2]
    }


def expectation(net: Carried, data: PolicyData, policy: tt.Randomized) -> Weights:
    """The mean of the estimate over every pattern of cuts."""
    mean = {name: torch.zeros_like(w) for name, w in weights(net).items()}
    whole = 0.0
    for lengths, chance in patterns(len(data.x), policy._grain, policy._survival):
        with pytest.MonkeyPatch.context() as patch:
            cut_at(patch, lengths)
            results = policy_gradients(net, [data.chunk], policy)
        whole += chance
        for name, estimate in summed(results, policy, data).items():
            mean[name] += chance * estimate
    assert whole == pytest.approx(1.0, abs=1e-14)
    return mean


def exact(net: Carried, data: PolicyData) -> Weights:
    ((_, _, results),) = plain(net, data)
    return results


@examples(10)
@given(
    size=st.sampled_from([(2, 1), (3, 1), (4, 1), (4, 2), (5, 2), (5, 3)]),
    mean=st.sampled_from([3, 7]),
    alpha=st.sampled_from([1.5, 6.0]),
    lanes=st.sampled_from([1, 2]),
    seed=st.integers(0, 999),
    resets=st.sampled_from([0.0, 0.3]),
    masked=st.sampled_from([0.0, 0.3]),
)
@some_nets("tensor-state", "lstm", "dict-state", "learnt-start")
def test_expectation_over_all_patterns_of_cuts_is_the_exact_gradient(
    row: Row,
    size: tuple[int, int],
    mean: int,
    alpha: float,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    (steps, grain), net = size, row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    assume(bool(data.mask.any()))
    assert (
        apart(expectation(net, data, tt.Randomized(mean, alpha, grain)), exact(net, data)) < EXACT
    )


@pytest.mark.parametrize(
    ("mean", "alpha", "grain"), [(10, 6.0, 1), (10, 3.0, 4), (50, 6.0, 3), (7, 6.0, 7)]
)
def test_drawn_lengths_follow_the_law(mean: int, alpha: float, grain: int) -> None:
    law, count = Survival.with_mean(mean, alpha, grain), 4000
    drawn = torch.tensor([law.draw() for _ in range(count)], dtype=torch.float64)
    assert (drawn % grain == 0).all()
    assert drawn.min() >= grain
    assert abs(drawn.mean() - mean) <= 4.5 * drawn.std() / count**0.5 + 1e-9
    for k in range(1, 6):
        chance = law(k * grain)
        assert (
            abs((drawn > k * grain).double().mean() - chance)
            <= 4.5 * (chance * (1 - chance) / count) ** 0.5 + 1e-9
        )
