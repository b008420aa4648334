"""Plans of integers: what is counted, how far a window reaches, where the next one starts."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from strategies import seeds
from throughtime.errors import ConfigError
from throughtime.gradient import Progress, Window

planned = given(
    steps=st.integers(1, 200),
    stride=st.integers(1, 40),
    further=st.integers(0, 60),
    burn_in=st.integers(0, 30),
    jitter=st.booleans(),
    seed=seeds,
)


def plans(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> list[Window]:
    """The windows of an epoch, planned without data."""
    torch.manual_seed(seed)
    policy = tt.Truncated(stride, stride + further, jitter, burn_in)
    at, results, unused = Progress(), list[Window](), cast("Any", None)
    while True:
        source: Any = SimpleNamespace(remaining=lambda n, at=at: min(n, steps - at.step))
        window, _ = policy.plan(source, at, unused)
        if window is None:
            return results
        results.append(window)
        at = Progress(window.stop, lead=window.keep)


@planned
def test_every_step_is_counted_once_and_every_window_reaches_back_the_horizon(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> None:
    results = plans(steps, stride, further, burn_in, jitter, seed)
    assert [step for w in results for step in range(w.counted, w.stop)] == list(range(steps))
    for w in results:
        assert w.start == (max(0, w.stop - stride - further) if further else w.counted)
        assert w.lead == max(0, w.start - burn_in)


@planned
def test_the_next_window_leads_in_where_a_state_was_kept(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> None:
    results = plans(steps, stride, further, burn_in, jitter, seed)
    assert all(now.keep == later.lead for now, later in pairwise(results))
    assert all(w.lead <= w.keep <= w.stop for w in results)


def test_numbers_that_are_not_whole_are_refused() -> None:
    half: float = 10.5
    with pytest.raises(ConfigError, match=r"stride=10\.5: expected a whole number of at least 1"):
        tt.Truncated(half)  # pyright: ignore[reportArgumentType]  # what a user may well do


def test_settings_that_no_plan_can_serve_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"horizon=50 is below stride=100: .*Take horizon >= stride, or stride=50"
    ):
        tt.Truncated(100, 50)
    with pytest.raises(ConfigError, match="stride=0: expected a whole number of at least 1"):
        tt.Truncated(0)
    assert (
        tt.Truncated(100).describe()
        == "an update every 100 steps, gradients flow back 1 to 100 steps (50.5 on average)"
    )
