"""The example of real-time recurrent learning: untruncated on a stream without end.

Shapes: `T` steps, `B` lanes, `n` numbers of the state, `P` weights.
"""

import copy
import doctest
from typing import Any

import pytest
import torch
from examples.policies import rtrl
from examples.policies.rtrl import RTRL
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import (
    Complex,
    PolicyData,
    data_for,
    plain,
    policy_gradients,
    summed,
    train,
)
from quick import examples
from strategies import (
    Rotation,
    Row,
    Weights,
    apart,
    gradients,
    named,
    recordings,
    seeds,
    some_nets,
    start,
    weights,
)
from throughtime.carry import Carried
from throughtime.errors import ConfigError, StateError

EXACT = 1e-12
NETS = (
    "lstm",
    "gru",
    "rnn",
    "lstm-cell",
    "hides-cell",
    "tensor-state",
    "dict-state",
    "namedtuple-state",
    "learnt-start",
)


def exact(net: Carried, data: PolicyData) -> Weights:
    ((_, _, results),) = plain(net, data)
    return results


@examples(12)
@given(
    steps=st.sampled_from([1, 2, 7, 13, 23]),
    stride=st.sampled_from([1, 3, 5, 8, 50]),
    lanes=st.sampled_from([1, 2, 3]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.1, 0.5]),
    masked=st.sampled_from([0.0, 0.3, 0.9]),
)
@some_nets(*NETS)
def test_updates_sum_to_the_exact_gradient(
    row: Row, steps: int, stride: int, lanes: int, seed: int, resets: float, masked: float
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    assume(bool(data.mask.any()))
    results = policy_gradients(net, [data.chunk], RTRL(stride))
    assert apart(summed(results), exact(net, data)) < EXACT


def test_complex_states_are_refused() -> None:
    net, data = tt.carry(Complex().double()), PolicyData.draw(13, 2, 0)
    with pytest.raises(StateError, match=r"two leaves, or take tt\.Exact"):
        policy_gradients(net, [data.chunk], RTRL(4))


def by_definition(net: Carried, data: PolicyData, stride: int, rate: float) -> list[Weights]:
    """Williams and Zipser's recursion with whole Jacobians.

    The weights go downhill after every stride.
    """
    names = list(dict(net.named_parameters()))
    shapes = [w.shape for w in net.parameters()]
    flat = torch.cat([w.detach().flatten() for w in net.parameters()])
    first = start(net, data.x)
    sizes = [leaf.numel() for leaf in tt.state.tensors(first)]

    def named_weights(flat: Tensor) -> Weights:
        parts = flat.split([shape.numel() for shape in shapes])
        return {
            name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)
        }

    def shaped(s: Tensor) -> Any:
        parts = iter(s.split(sizes))
        return tt.state.map_leaves(lambda leaf: next(parts).view(leaf.shape), first)

    def play(begin: int, flat: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        rows = slice(begin, begin + stride)
        y, after = torch.func.functional_call(
            net, named_weights(flat), (data.x[rows], shaped(s), data.resets[rows])
        )
        valid = data.mask[rows]
        return nn.functional.mse_loss(y[valid], data.targets[rows][valid]), torch.cat(
            [leaf.flatten() for leaf in tt.state.tensors(after)]
        )

    s = torch.cat([leaf.flatten() for leaf in tt.state.tensors(first)])
    influence = torch.zeros(len(s), len(flat), dtype=torch.float64)
    results: list[Weights] = []
    for begin in range(0, len(data.x), stride):
        (dl_dw, dl_ds), (ds_dw, ds_ds) = torch.autograd.functional.jacobian(
            lambda w, s, begin=begin: play(begin, w, s), (flat, s)
        )
        gradient = dl_dw + dl_ds @ influence
        influence = ds_ds @ influence + ds_dw
        s = play(begin, flat, s)[1].detach()
        flat = flat - rate * gradient
        results.append(named_weights(gradient))
    return results


@pytest.mark.parametrize("rate", [0.0, 0.3])
@some_nets("tensor-state", "dict-state", "lstm")
def test_every_update_equals_the_recursion_written_out_while_the_weights_move(
    row: Row, rate: float
) -> None:
    net = row.net()
    data = data_for(net, 15, 2, 0, resets=0.1)
    expected = by_definition(net, data, 4, rate)
    before, results = weights(net), list[Weights]()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=RTRL(4)):
        results.append(gradients(net))
        optimizer.step()
        optimizer.zero_grad()
    assert max(apart(a, b) for a, b in zip(results, expected, strict=True)) < EXACT
    assert (apart(weights(net), before) > 1e-3) == (rate > 0)


def stream(chunk: int = 8) -> tt.Stream:
    return tt.Stream(recordings([31, 17, 20]), lanes=2, chunk=chunk, warm_up=1)


@pytest.mark.parametrize("done", [1, 4])
@some_nets("hides-layer", "learnt-start")
def test_resume_keeps_the_influence_to_the_bit(row: Row, done: int) -> None:
    net = row.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    run = tt.updates(net, stream(), nn.MSELoss(), gradient=RTRL(5))
    train(optimizer, run, done)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), run.state_dict()))
    losses = train(optimizer, run)

    def resumed(place: dict[str, Any]) -> tuple[list[float], Carried]:
        other = row.net()
        other_optimizer = torch.optim.Adam(other.parameters(), lr=0.05)
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(copy.deepcopy(saved[1]))
        rest = tt.updates(other, stream(), nn.MSELoss(), gradient=RTRL(5))
        rest.load_state_dict(copy.deepcopy(place))
        return train(other_optimizer, rest), other

    again, other = resumed(saved[2])
    assert again == losses
    assert apart(weights(other), weights(net)) == 0
    policy = saved[2]["policy"]
    mutant = policy | {"memory": torch.zeros_like(policy["memory"])}
    assert resumed(saved[2] | {"policy": mutant})[0] != losses


@pytest.mark.parametrize("stride", [0, -3])
def test_a_stride_out_of_range_is_refused(stride: int) -> None:
    with pytest.raises(ConfigError, match=f"stride={stride}: expected at least 1 step"):
        RTRL(stride)


def test_frozen_parameters_take_no_part() -> None:
    """Neither in `.grad` nor in the memory."""
    net, data = named("tensor-state").net(), PolicyData.draw(13, 2, 0)
    expected = exact(net, data)
    frozen = net.module.get_parameter("turn").requires_grad_(False)
    run = tt.updates(net, tt.Stream(recordings([13, 13]), 2, 5), nn.MSELoss(), gradient=RTRL(4))
    next(run)
    count = sum(w.numel() for w in net.parameters()) - frozen.numel()
    assert run.policy_state.shape == (2 * 4, count)
    net.zero_grad()
    results = summed(policy_gradients(net, [data.chunk], RTRL(4)))
    assert frozen.grad is None
    assert apart(results, expected | {"module.turn": torch.zeros_like(frozen)}) < EXACT


class Counter(Rotation):
    """Besides `h` it counts the steps of each lane, in whole numbers."""

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, count = (
            (self.zeros(x), torch.zeros(x.shape[1], dtype=torch.long)) if state is None else state
        )
        y, h = self.play(x, h)
        phase = (count + torch.arange(1, len(x) + 1).unsqueeze(1)) % 3
        return y * (1 + phase).unsqueeze(2), (h, count + len(x))


def test_whole_numbers_in_the_state_are_carried() -> None:
    net, data = tt.carry(Counter().double()), PolicyData.draw(13, 2, 0, resets=0.1)
    run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=RTRL(4))
    assert [update.steps for update in run] == [8, 8, 8, 2]
    assert run.state[1].dtype == torch.long
    net.zero_grad()
    assert apart(summed(policy_gradients(net, [data.chunk], RTRL(4))), exact(net, data)) < EXACT


def test_the_example_of_the_docstring_runs() -> None:
    assert doctest.testmod(rtrl) == doctest.TestResults(failed=0, attempted=4)
