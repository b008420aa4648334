"""tt.rollout against the net itself, whatever the loss: outputs, state and every gradient.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import allocated
from quick import examples
from strategies import (
    FEATURES,
    HIDDEN,
    HidesLayer,
    Row,
    Weights,
    apart,
    gradients,
    in_chunks,
    inputs,
    named,
    remembering,
    seeds,
    some_nets,
    start,
    states_apart,
)
from throughtime.carry import Carried
from throughtime.errors import ConfigError, DataError, LawError, ModelError
from throughtime.state import State
from throughtime.testing.rollout import CAUSES, Play

EXACT = 1e-10
LaneSlice = Callable[[Tensor, State, Tensor | None], tuple[Tensor, State]]
Loss = Callable[[Tensor, State], Tensor]


def of_all(y: Tensor, _: State) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).square().mean()


def of_last(y: Tensor, _: State) -> Tensor:
    return y[-1].square().sum()


def of_end(_: Tensor, state: State) -> Tensor:
    return torch.stack([leaf.square().sum() for leaf in tt.state.tensors(state)]).sum()


def of_both(y: Tensor, state: State) -> Tensor:
    return of_all(y, state) + of_end(y, state) + y.exp().mean() * y.max()


LOSSES: list[Loss] = [of_last, of_end, of_both]


class Played(NamedTuple):
    """Outputs, state, and gradients to parameters, inputs, and the state that entered."""

    y: Tensor
    state: State
    gradients: Weights


def played(
    net: Carried, play: LaneSlice, x: Tensor, state: State, resets: Tensor | None, loss: Loss
) -> Played:
    net.zero_grad()
    x = x.detach().clone().requires_grad_()
    entering = (
        None
        if state is None
        else tt.state.map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(), state)
    )
    y, after = play(x, entering, resets)
    loss(y, after).backward()
    found = gradients(net) | {"x": torch.zeros_like(x) if x.grad is None else x.grad}
    for name, leaf in () if state is None else tt.state.leaves(entering):
        found[f"state.{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    net.zero_grad()
    return Played(y.detach(), tt.state.detach(after), found)


def whole(net: Carried) -> LaneSlice:
    return lambda x, state, resets: net(x, start(net, x) if state is None else state, resets)


def rolled(net: Carried, **options: Any) -> LaneSlice:
    return lambda x, state, resets: tt.rollout(net, x, state, resets=resets, **options)


def deviation(a: Played, b: Played) -> float:
    return max(
        (a.y - b.y).abs().max().item(),
        states_apart(a.state, b.state),
        apart(a.gradients, b.gradients),
    )


def random_state(net: Carried, x: Tensor, seed: int = 9) -> State:
    draw = torch.Generator().manual_seed(seed)
    return tt.state.map_leaves(
        lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype) * 0.5,
        tt.state.detach(start(net, x)),
    )


def random_resets(steps: int, lanes: int, seed: int = 9) -> Tensor:
    return torch.rand(steps, lanes, generator=torch.Generator().manual_seed(seed)) < 0.1


@examples(10)
@given(
    steps=st.sampled_from([1, 2, 7, 23]),
    chunk=st.sampled_from([1, 2, 3, 7, 50, None]),
    lanes=st.sampled_from([1, 2]),
    seed=seeds,
    resets=st.booleans(),
    given_state=st.booleans(),
    loss=st.sampled_from(LOSSES),
)
@some_nets(
    "lstm-2-batch-first-proj", "sequential", "dict-state", "namedtuple-state", "learnt-start"
)
def test_rollout_is_the_net(
    row: Row,
    steps: int,
    chunk: int | None,
    lanes: int,
    seed: int,
    resets: bool,
    given_state: bool,
    loss: Loss,
) -> None:
    """Outputs, state, and the gradients to parameters, inputs and the state that enters."""
    net, x = row.net(), inputs(steps, lanes, seed=seed) * 0.3
    state = random_state(net, x, seed) if given_state else None
    where = random_resets(steps, lanes, seed) if resets else None
    found = played(net, rolled(net, chunk=chunk), x, state, where, loss)
    assert deviation(found, played(net, whole(net), x, state, where, loss)) < EXACT


def test_dropout_draws_as_the_chunks_do_and_the_same_numbers_again() -> None:
    net, x = tt.carry(remembering(HidesLayer(dropout=0.4))), inputs(23, 2)
    torch.manual_seed(3)
    expected = played(net, lambda x, *_: in_chunks(net, x, [4] * 5), x, None, None, of_all)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    y, state = tt.rollout(net, x, chunk=4)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.manual_seed(77)  # whatever is drawn in between
    now = torch.get_rng_state()
    of_all(y, state).backward()
    assert torch.equal(torch.get_rng_state(), now)
    assert apart(gradients(net) | {"x": expected.gradients["x"]}, expected.gradients) < EXACT


def test_what_cannot_be_rolled_out_is_refused() -> None:
    net, resets = named("hides-layer").net(), torch.zeros(22, 2, dtype=torch.bool)
    refused: list[tuple[Any, int, dict[str, Any], type[Exception]]] = [
        (net, 0, {}, DataError),
        (net, 23, {"resets": resets}, DataError),
        (net, 23, {"chunk": 0}, ConfigError),
        (nn.LSTM(FEATURES, HIDDEN), 5, {}, ModelError),
    ]
    for played_, steps, options, error in refused:
        with pytest.raises(error):
            tt.rollout(played_, inputs(steps, 2), **options)


def test_memory_is_that_of_a_chunk() -> None:
    net = tt.carry(nn.Sequential(nn.LSTM(3, 32), nn.Linear(32, 1)))
    x = torch.randn(1000, 4, 3)

    def most(chunk: int) -> int:
        def run() -> None:
            tt.rollout(net, x, chunk=chunk)[0].square().mean().backward()

        run()  # gradients, and whatever torch sets up once
        return allocated(run).most

    assert most(50) < most(1000) / 4


def test_second_derivatives_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2).requires_grad_()
    y, state = tt.rollout(net, x, chunk=4)
    with pytest.raises(ModelError, match="a second derivative"):
        torch.autograd.grad(of_all(y, state), [x], create_graph=True)


def test_weights_changed_before_the_backward_pass_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first, second = tt.rollout(net, x, chunk=4), tt.rollout(net, x, chunk=4)
    of_all(*first).backward()
    kept = gradients(net)
    optimizer.step()
    with pytest.raises(ModelError, match="weights were changed in place"):
        of_all(*second).backward()
    assert apart(gradients(net), kept) == 0
    of_all(*tt.rollout(net, x, chunk=4)).backward()


STEPS, LANES = 12, 3


def rollout() -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS, LANES, 3, generator=draws, dtype=torch.float64)
    starts = torch.zeros(STEPS, LANES, dtype=torch.bool)
    starts[0] = starts[5, 1] = starts[8, 0] = starts[9, 1] = True
    return inputs, starts, torch.zeros(1, LANES, 4, dtype=torch.float64)


def gru() -> nn.GRU:
    torch.manual_seed(1)
    return tt.nn.GRU(3, 4).double()


def by_steps(layer: nn.GRU, reset: Callable[[Tensor, Tensor, int], Tensor]) -> Play:
    """An agent's own loop over `done`."""

    def play(x: Tensor, h: Any, starts: Tensor) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        for t in range(len(x)):
            h = reset(h, starts, t)
            y, h = layer(x[t : t + 1], h)
            outputs.append(y)
        return torch.cat(outputs), h

    return play


def sound(h: Tensor, starts: Tensor, t: int) -> Tensor:
    return h * ~starts[t, :, None]


def never(h: Tensor, starts: Tensor, t: int) -> Tensor:
    del starts, t
    return h


def shuffled(h: Tensor, starts: Tensor, t: int) -> Tensor:
    return (h * ~starts[t, :, None]).roll(1, dims=1)


def leaky(h: Tensor, starts: Tensor, t: int) -> Tensor:
    """The value is reset, and its gradient goes on."""
    return h - (h * starts[t, :, None]).detach()


def check(play: Play, **options: Any) -> set[str]:
    """The names of the laws that are broken."""
    try:
        laws = tt.testing.check_rollout(play, *rollout(), tolerance=1e-9, **options)
    except LawError as error:
        return {name for name in CAUSES if f"{name}: " in str(error)}
    assert [law.name for law in laws] == list(CAUSES)
    return set()


def test_a_layer_with_resets_and_a_sound_loop_obey_the_laws() -> None:
    layer = gru()
    loop = by_steps(layer, sound)
    assert check(layer) == set()
    assert check(loop) == set()
    assert check(layer, act=loop) == set()


def test_each_fault_of_training_breaks_its_law() -> None:
    for reset, broken in ((never, "starts"), (shuffled, "environments"), (leaky, "gradients")):
        assert broken in check(by_steps(gru(), reset))


def test_the_state_of_the_end_of_an_episode_is_not_stored_for_its_start() -> None:
    """Training that begins each minibatch from the state after its first step, as loops have it."""
    layer = gru()

    def play(x: Tensor, h: Any, starts: Tensor) -> tuple[Tensor, Tensor]:
        stale = layer(x[:1], h, starts[:1])[1] if len(x) > 1 else h
        return layer(x, stale, starts & (torch.arange(len(x)) > 0)[:, None])

    assert "acting" in check(play)
