"""The policies of the examples: real-time recurrent learning, dense and element by element, and
windows that start from carried states or from noise.

Shapes: `T` steps, `B` lanes, `n` numbers of the state, `P` weights.
"""

import doctest
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from examples.models.min_gru import MinGRU
from examples.policies import rtrl, rtrl_elementwise
from examples.policies.rtrl import RTRL
from examples.policies.rtrl_elementwise import ElementwiseRTRL
from examples.policies.starts import CarriedStart
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import (
    data_for,
    plain,
    policy_gradients,
    summed,
)
from quick import examples
from strategies import (
    FEATURES,
    apart,
    named,
    recordings,
    seeds,
)
from throughtime.carry import Carried

EXACT = 1e-12


@pytest.mark.parametrize(("module", "attempted"), [(rtrl, 4), (rtrl_elementwise, 5)])
def test_the_example_of_the_docstring_runs(module: ModuleType, attempted: int) -> None:
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=attempted)


def min_gru() -> Carried:
    return tt.carry(nn.Sequential(MinGRU(FEATURES, 5), nn.Linear(5, 4)).double())


CASES: dict[str, tuple[Callable[[], Carried], type[RTRL | ElementwiseRTRL]]] = {
    "hides-cell": (named("hides-cell").net, RTRL),
    "learnt-start": (named("learnt-start").net, RTRL),
    "minGRU": (min_gru, ElementwiseRTRL),
}


@examples(8)
@given(
    steps=st.sampled_from([1, 2, 7, 23]),
    stride=st.sampled_from([1, 3, 8, 50]),
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
)
@pytest.mark.parametrize(("make", "policy"), list(CASES.values()), ids=list(CASES))
def test_updates_sum_to_the_exact_gradient(
    make: Callable[[], Carried],
    policy: type[RTRL | ElementwiseRTRL],
    steps: int,
    stride: int,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    torch.manual_seed(0)
    net = make()
    data = data_for(net, steps, lanes, seed, resets, masked)
    assume(bool(data.mask.any()))
    ((_, _, expected),) = plain(net, data)
    assert apart(summed(policy_gradients(net, [data.chunk], policy(stride))), expected) < EXACT


def test_windows_start_where_those_before_them_ended() -> None:
    """At fixed weights, so many epochs as there are windows give the outputs of whole recordings.

    Windows of 5 steps leave shorter ones, so lanes reset within chunks.
    """
    net, data = named("hides-layer").net(), recordings([23, 10, 8, 31])
    stream, policy = tt.Stream(tt.windows(data, 5), lanes=3, chunk=5, seed=1), CarriedStart(5)
    played, state = dict[tuple[int, int], Tensor](), None
    for _ in range(8):
        run = tt.updates(net, stream, nn.MSELoss(), gradient=policy, policy_state=state)
        for update in run:
            chunk = update.chunk
            for at in chunk.mask.nonzero().tolist():
                step = chunk.recording[*at].item(), chunk.position[*at].item()
                played[int(step[0]), int(step[1])] = update.outputs[*at]
        state = run.policy_state
    whole = [tt.predict(net, recording)[0] for recording in data]
    ours = torch.stack([played[at] for at in sorted(played)])
    torch.testing.assert_close(ours, torch.cat(whole), rtol=1e-10, atol=1e-12)
