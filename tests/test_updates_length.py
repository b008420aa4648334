"""`len(updates)` is what iteration yields: against counting.

Shapes: `T` steps, `B` lanes.
"""

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import throughtime as tt
from strategies import recordings
from throughtime.gradient import Policy
from throughtime.updates import Updates

POLICIES: dict[str, Policy] = {
    "horizon is stride": tt.Truncated(6),
    "horizon beyond stride": tt.Truncated(5, 12),
    "burn-in": tt.Truncated(7, 9, burn_in=3),
    "one step": tt.Truncated(1),
    "longer than the epoch": tt.Truncated(1000),
    "exact": tt.Exact(),
    "exact in segments": tt.Exact(chunk=4),
    "exact with cuts": tt.Exact(cut_every=8),
}
DATA: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "one": ([31], 1, {}),
    "parts of one": ([41], 3, {}),
    "handed on": ([41], 3, {"hand_off": True}),
    "ragged ends": ([31, 7, 20, 3, 11], 3, {}),
    "in order": ([6, 6, 12, 5], 1, {"seed": None}),
    "common ends": ([8, 8, 8, 8], 2, {}),
    "offset": ([31, 17], 2, {"offset": 9}),
}
UNKNOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "jitter": (tt.Truncated(6, jitter=True), {}),
    "warm-up of the stream": (tt.Truncated(6), {"warm_up": 2}),
    "random": (tt.Randomized(6), {}),
    "measured": (tt.Adaptive(0.5, 4, 16), {}),
}


def updates_of(stream: Any, policy: Any, accumulate: int = 1) -> Updates:
    torch.manual_seed(0)
    net = tt.carry(nn.GRU(3, 2).double())
    return tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate)


@pytest.mark.parametrize("data", list(DATA.values()), ids=list(DATA))
@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
def test_length_is_the_number_of_updates_to_come(
    policy: Policy, data: tuple[list[int], int, dict[str, Any]]
) -> None:
    lengths, lanes, options = data
    stream = tt.Stream(recordings(lengths), lanes, 8, **options)
    for accumulate, _ in product((1, 2, 3), range(2)):
        updates = updates_of(stream, policy, accumulate)
        total, yielded = len(updates), 0
        for _update in updates:
            yielded += 1
            assert len(updates) == total - yielded
        assert yielded == total > 0
        assert (len(updates), bool(updates)) == (0, True)


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("policy", [tt.Truncated(5, 12), tt.Exact()], ids=["truncated", "exact"])
def test_length_after_a_resume_is_that_of_the_rest(policy: Policy, taken: int) -> None:
    def stream() -> tt.Stream:
        return tt.Stream(recordings([8, 8, 13, 5]), 1, 8)

    updates = updates_of(stream(), policy)
    total = len(updates)
    for _ in range(taken):
        next(updates)
    resumed = updates_of(stream(), policy)
    resumed.load_state_dict(updates.state_dict())
    assert len(resumed) == total - taken == len(list(resumed))


@pytest.mark.parametrize(("policy", "options"), list(UNKNOWN.values()), ids=list(UNKNOWN))
def test_a_number_that_is_not_known_is_an_error_and_the_loop_goes_on(
    policy: Any, options: dict[str, Any]
) -> None:
    updates = updates_of(tt.Stream(recordings([31, 20]), 2, 8, **options), policy)
    with pytest.raises(TypeError, match=re.escape("not known beforehand: a policy other than")):
        len(updates)
    assert updates
    assert list(updates)  # which asks for the length, and does without


def test_chunks_of_an_iterable_have_no_number() -> None:
    updates = updates_of(iter(tt.Stream(recordings([31]), 1, 8)), tt.Truncated(6))
    with pytest.raises(TypeError, match="an iterable of chunks"):
        len(updates)
    assert len(list(updates)) == 6


def test_strides_without_a_target_are_counted_and_yield_nothing() -> None:
    data = recordings([24])
    data[0]["targets"][6:12] = float("nan")
    updates = updates_of(tt.Stream(data, 1, 8), tt.Truncated(6))
    assert (len(updates), len(list(updates))) == (4, 3)
