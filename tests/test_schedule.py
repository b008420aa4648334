"""Plans of integers: what is counted, how far a window reaches, where the next one starts."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from throughtime.errors import ConfigError
from throughtime.gradient.schedule import Window, windows

plans = st.tuples(
    st.integers(1, 200),
    st.integers(1, 40),
    st.integers(0, 60),
    st.integers(0, 30),
    st.integers(1, 40),
)


@given(plans)
def test_every_step_is_counted_once_and_every_window_reaches_back_the_horizon(
    plan: tuple[int, int, int, int, int],
) -> None:
    steps, stride, more, burn_in, first = plan
    found = list(windows(steps, stride, stride + more, burn_in=burn_in, first=min(first, stride)))
    assert [step for w in found for step in range(w.counted, w.stop)] == list(range(steps))
    assert all(w.start == (max(0, w.stop - stride - more) if more else w.counted) for w in found)
    assert all(w.lead == max(0, w.start - burn_in) for w in found)


@given(plans)
def test_the_next_window_leads_in_where_a_state_was_kept(
    plan: tuple[int, int, int, int, int],
) -> None:
    steps, stride, more, burn_in, first = plan
    found = list(windows(steps, stride, stride + more, burn_in=burn_in, first=min(first, stride)))
    assert all(now.keep == later.lead for now, later in pairwise(found))
    assert all(w.lead <= w.keep <= w.stop for w in found)


def test_a_plan_that_counts_a_step_twice_breaks_the_law() -> None:
    """The mutant: windows that count all they run."""
    mutant = [Window(w.lead, w.start, w.start, w.stop, w.keep) for w in windows(10, 4, 6)]
    assert [step for w in mutant for step in range(w.counted, w.stop)] != list(range(10))


def test_numbers_that_are_not_whole_are_refused() -> None:
    half: float = 10.5
    with pytest.raises(ConfigError, match=r"stride=10\.5, horizon=10\.5: expected whole numbers"):
        tt.Truncated(half)  # pyright: ignore[reportArgumentType]  # what a user may well do


def test_settings_that_no_plan_can_serve_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"horizon=50 is below stride=100: .*Take horizon >= stride, or stride=50"
    ):
        tt.Truncated(100, 50)
    with pytest.raises(ConfigError, match="stride=0: expected at least 1 step"):
        tt.Truncated(0)
    assert (
        tt.Truncated(100).describe()
        == "an update every 100 steps, credit back through 1 to 100 steps (50.5 on average)"
    )
