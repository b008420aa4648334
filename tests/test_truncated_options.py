"""Options of truncated BPTT: jitter, burn_in, warm-up; and the forum's loop.

Shapes: `T` steps, `B` lanes.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData, UpdateGrads, data_for, deviation, policy_gradients
from quick import examples
from strategies import (
    Row,
    Weights,
    apart,
    gradients,
    lawless,
    named,
    recordings,
    seeds,
    some_nets,
    start,
    states_apart,
    weights,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError
from throughtime.state import State
from throughtime.updates import Updates

EXACT = 1e-11
Window = tuple[int, int, int]  # where its graph starts, where its losses start, where it stops


def windowed(net: Carried, data: PolicyData, windows: Sequence[Window]) -> UpdateGrads:
    """Each window alone: earlier steps without a graph, then one forward and one backward pass."""
    results: UpdateGrads = []
    for begin, counted, stop in windows:
        state = start(net, data.x)
        if begin:
            with torch.no_grad():
                _, state = net(data.x[:begin], state, data.resets[:begin])
        net.zero_grad()
        y, _ = net(data.x[begin:stop], state, data.resets[begin:stop])
        valid = data.mask[counted:stop]
        if valid.any():
            loss = nn.functional.mse_loss(
                y[counted - begin :][valid], data.targets[counted:stop][valid]
            )
            loss.backward()
            results.append((int(valid.sum()), loss.item(), gradients(net)))
    net.zero_grad()
    return results


def strides(steps: int, stride: int, first: int | None = None) -> list[tuple[int, int]]:
    """The steps between updates, the first stride of a length of its own."""
    stops = [*range(first or stride, steps, stride), steps]
    return list(itertools.pairwise([0, *stops]))


def looking_back(counts: Sequence[tuple[int, int]], stride: int, horizon: int) -> list[Window]:
    return [
        (counted if horizon == stride else max(0, stop - horizon), counted, stop)
        for counted, stop in counts
    ]


def jittered_first(seed: int, stride: int) -> int:
    """The length of the first stride that torch's generator draws."""
    torch.manual_seed(seed)
    return int(torch.randint(1, stride + 1, ()))


sizes = {
    "steps": st.sampled_from([1, 2, 13, 29]),
    "stride": st.sampled_from([1, 3, 7, 40]),
    "further": st.sampled_from([0, 1, 5, 40]),
    "lanes": st.sampled_from([1, 2]),
    "seed": seeds,
    "resets": st.sampled_from([0.0, 0.2]),
    "masked": st.sampled_from([0.0, 0.5]),
}


@examples(25)
@given(**sizes)
@some_nets("tensor-state", "hides-layer", "learnt-start")
def test_jittered_gradient_equals_plain_autograd_of_its_windows(
    row: Row,
    steps: int,
    stride: int,
    further: int,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    """The first stride is as drawn, the others are regular."""
    net, data = row.net(), PolicyData.draw(steps, lanes, seed, resets, masked)
    first = jittered_first(seed, stride)
    torch.manual_seed(seed)
    results = policy_gradients(
        net, [data.chunk], tt.Truncated(stride, stride + further, jitter=True)
    )
    expected = windowed(
        net, data, looking_back(strides(steps, stride, min(first, steps)), stride, stride + further)
    )
    assert deviation(results, expected) < EXACT


def test_first_stride_takes_every_length_from_one_to_the_stride_alike() -> None:
    net, data = named("tensor-state").net(), PolicyData.draw(30, 1, 0)
    firsts: list[int] = []
    for seed in range(250):
        torch.manual_seed(seed)
        run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(5, jitter=True))
        firsts.append(next(run).chunk.steps)
        assert next(run).chunk.steps == 5
    counts = [firsts.count(length) for length in range(1, 6)]
    assert sum(counts) == 250
    assert (
        sum((count - 50) ** 2 / 50 for count in counts) < 18.5
    )  # chi squared, 4 degrees of freedom: one in a thousand


def test_every_epoch_begins_anew_and_only_its_start_is_jittered() -> None:
    stream = tt.Stream(recordings([40, 33]), lanes=2, chunk=8)
    net, firsts = named("hides-layer").net(), set[int]()
    for epoch in range(12):
        torch.manual_seed(epoch)
        lengths = [
            u.chunk.steps
            for u in tt.updates(
                net, stream, nn.MSELoss(), gradient=tt.Truncated(6, 10, jitter=True)
            )
        ]
        assert lengths[0] == jittered_first(epoch, 6)
        assert set(lengths[1:-1]) == {6}
        assert sum(lengths) == 40
        firsts.add(lengths[0])
    assert len(firsts) > 2


@pytest.mark.parametrize("done", [1, 3])
def test_resuming_in_the_middle_of_an_epoch_does_not_jitter_again(done: int) -> None:
    policy = tt.Truncated(6, 15, jitter=True)
    net, optimizer, run = _training(policy)
    torch.manual_seed(2)
    _train(optimizer, run, done)
    saved = copy.deepcopy((net.state_dict(), run.state_dict()))
    lengths = _train(optimizer, run)
    net_again, optimizer_again, rest = _training(policy)
    net_again.load_state_dict(saved[0])
    rest.load_state_dict(saved[1])
    torch.manual_seed(99)  # nothing is drawn any more
    assert _train(optimizer_again, rest) == lengths
    assert apart(weights(net_again), weights(net)) == 0


def _training(policy: tt.Truncated) -> tuple[Carried, torch.optim.Optimizer, Updates]:
    net = named("hides-layer").net()
    stream = tt.Stream(recordings([40, 33]), lanes=2, chunk=8)
    return (
        net,
        torch.optim.SGD(net.parameters(), lr=0.3),
        tt.updates(net, stream, nn.MSELoss(), gradient=policy),
    )


def _train(
    optimizer: torch.optim.Optimizer, run: Updates, most: int = 1000
) -> list[tuple[int, float]]:
    results: list[tuple[int, float]] = []
    for update in itertools.islice(run, most):
        optimizer.step()
        optimizer.zero_grad()
        results.append((update.chunk.steps, update.loss.item()))
    return results


@examples(20)
@given(burn_in=st.sampled_from([1, 2, 5, 40]), **sizes)
@some_nets("tensor-state", "hides-layer", "learnt-start", "namedtuple-state")
def test_refresh_changes_nothing_at_fixed_weights(
    row: Row,
    burn_in: int,
    steps: int,
    stride: int,
    further: int,
    lanes: int,
    seed: int,
    resets: float,
    masked: float,
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    results = policy_gradients(
        net, [data.chunk], tt.Truncated(stride, stride + further, burn_in=burn_in)
    )
    assert (
        deviation(
            results, policy_gradients(net, [data.chunk], tt.Truncated(stride, stride + further))
        )
        < EXACT
    )


def downhill(net: Carried, rate: float) -> None:
    with torch.no_grad():
        for weight in net.parameters():
            if weight.grad is not None:
                weight.sub_(weight.grad, alpha=rate)
    net.zero_grad()


def with_burn_in(
    net: Carried, data: PolicyData, stride: int, horizon: int, burn_in: int, rate: float
) -> list[Weights]:
    """By the definition, the weights going downhill: `burn_in` steps before each window run again
    from where the state is known.

    That state is the one that the update before passed there, under the weights of then.
    """
    known: dict[int, State] = {0: start(net, data.x)}
    results: list[Weights] = []
    for counted, stop in strides(len(data.x), stride):
        begin = counted if horizon == stride else max(0, stop - horizon)
        lead = max(0, begin - burn_in)
        state, states = known[lead], {lead: known[lead]}
        with torch.no_grad():
            for step in range(lead, begin):
                _, state = net(data.x[step : step + 1], state, data.resets[step : step + 1])
                states[step + 1] = state
        outputs: list[Tensor] = []
        for step in range(begin, stop):
            y, state = net(data.x[step : step + 1], state, data.resets[step : step + 1])
            states[step + 1] = tt.state.detach(state)
            outputs.append(y)
        nn.functional.mse_loss(
            torch.cat(outputs)[counted - begin :], data.targets[counted:stop]
        ).backward()
        known = states
        results.append(gradients(net))
        downhill(net, rate)
    return results


@pytest.mark.covering
@pytest.mark.parametrize(("stride", "horizon"), [(3, 3), (3, 7), (5, 11)])
@pytest.mark.parametrize("burn_in", [1, 4, 100])
@some_nets("tensor-state", "hides-cell")
def test_state_entering_the_window_is_that_of_a_run_under_the_new_weights(
    row: Row, stride: int, horizon: int, burn_in: int
) -> None:
    rate, results = 0.05, list[Weights]()
    net, data = row.net(), PolicyData.draw(29, 2, 0, resets=0.05)
    for _ in tt.updates(
        net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(stride, horizon, burn_in=burn_in)
    ):
        results.append(gradients(net))
        downhill(net, rate)
    expected = with_burn_in(row.net(), data, stride, horizon, burn_in, rate)
    assert max(apart(a, b) for a, b in zip(results, expected, strict=True)) < EXACT
    for other in (burn_in - 1, burn_in + 1):  # the mutants: a step less, a step more
        fresh = with_burn_in(row.net(), data, stride, horizon, other, rate)
        assert (max(apart(a, b) for a, b in zip(results, fresh, strict=True)) > 1e-9) == (
            min(other, burn_in) < 29 - horizon
        )


def test_burn_in_from_the_start_carries_the_state_of_the_present_weights() -> None:
    net, data = named("tensor-state").net(), PolicyData.draw(29, 2, 0)
    for update in tt.updates(
        net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(4, 6, burn_in=100)
    ):
        last = int(update.chunk.position[-1, 0]) + 1
        _, expected = net(data.x[:last], start(net, data.x), data.resets[:last])
        assert states_apart(update.state, expected) < EXACT
        downhill(net, 0.05)


def test_last_stride_looks_back_the_horizon_however_short_it_is() -> None:
    """The mutant looks back as far as a whole stride would from where the last one began."""
    net, data = named("tensor-state").net(), PolicyData.draw(22, 2, 0)
    results = policy_gradients(net, [data.chunk], tt.Truncated(5, 11))
    right = looking_back(strides(22, 5), 5, 11)
    assert right[-1] == (11, 20, 22)
    assert deviation(results, windowed(net, data, right)) < EXACT
    assert deviation(results, windowed(net, data, [*right[:-1], (14, 20, 22)])) > 1e-6


class Scale(nn.Module):
    """`h' = w h`, whatever comes in; it is the output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))

    def initial_state(self, lanes: int) -> Tensor:
        return torch.full((lanes, 1), 0.9, dtype=torch.float64)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden: list[Tensor] = []
        for _ in x:
            state = state * self.w
            hidden.append(state)
        return torch.stack(hidden), state


def forum_loop(steps: int, *, clear: bool) -> list[float]:
    """discuss.pytorch.org/t/15500: states are leaves, each chunk's graph is gone through again for
    every loss.

    Their `.grad` is what goes back into the graph before; unless it is cleared, what an earlier
    loss left there goes back once more.
    """
    w = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    pairs: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.tensor(0.9, dtype=torch.float64))]
    results: list[float] = []
    for _ in range(steps):
        entering = pairs[-1][1].detach().requires_grad_()
        pairs.append((entering, w * entering))
        w.grad = None
        if clear:
            for leaf, _ in pairs:
                leaf.grad = None
        pairs[-1][1].backward(retain_graph=True)
        for (_, before), (after, _) in zip(pairs[-2:0:-1], pairs[:1:-1], strict=True):
            before.backward(after.grad, retain_graph=True)
        assert w.grad is not None
        results.append(w.grad.item())
    return results


def test_forum_loop_gives_288_where_the_truth_is_108() -> None:
    """d/dw w^k 0.9 = k w^(k-1) 0.9: with w = 0.2, 0.9, 0.36, 0.108."""
    assert forum_loop(3, clear=False) == pytest.approx([0.9, 0.36, 0.288], abs=1e-12)
    assert forum_loop(3, clear=True) == pytest.approx([0.9, 0.36, 0.108], abs=1e-12)
    zeros = torch.zeros(3, 1, 1, dtype=torch.float64)
    for horizon, expected in (
        (3, [0.9, 0.36, 0.108]),
        (100, [0.9, 0.36, 0.108]),
        (2, [0.9, 0.36, 0.072]),
    ):
        results = policy_gradients(
            lawless(tt.carry(Scale()), zeros),
            [Chunk.from_tensors(zeros, zeros)],
            tt.Truncated(1, horizon),
            lambda y, _: y.mean(),
        )
        assert [g["module.w"].item() for *_, g in results] == pytest.approx(expected, abs=1e-12)
    whole = policy_gradients(
        lawless(tt.carry(Scale()), zeros),
        [Chunk.from_tensors(zeros, zeros)],
        tt.Truncated(3),
        tt.SequenceLoss(lambda y, _: y.sum()),
    )
    assert whole[0][2]["module.w"].item() == pytest.approx(0.9 + 0.36 + 0.108, abs=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "burn_in negative": ({"burn_in": -1}, "burn_in=-1: expected a whole number of at least 0"),
    "burn_in a float": ({"burn_in": 1.5}, r"burn_in=1\.5: expected a whole number of at least 0"),
}


@pytest.mark.parametrize(("setting", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_option_out_of_range_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tt.Truncated(5, 10, **setting)


def test_options_are_described() -> None:
    said = tt.Truncated(10, 20, jitter=True, burn_in=7).describe()
    assert "the first stride of an epoch of random length" in said
    assert "the 7 steps before run again under the new weights" in said
