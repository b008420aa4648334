"""`check_rollout`: sound agents obey its laws, and each of the usual faults breaks one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import DataError, LawError
from throughtime.testing.rollout import CAUSES, Play

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


def late(h: Tensor, starts: Tensor, t: int) -> Tensor:
    return h if t == 0 else h * ~starts[t - 1, :, None]


def never(h: Tensor, starts: Tensor, t: int) -> Tensor:
    del starts, t
    return h


def wrong_lane(h: Tensor, starts: Tensor, t: int) -> Tensor:
    return h * ~starts[t].roll(1)[:, None]


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


@pytest.mark.parametrize(
    ("reset", "broken"),
    [
        (late, {"starts"}),
        (never, {"starts"}),
        (wrong_lane, {"starts"}),
        (shuffled, {"environments"}),
        (leaky, {"gradients"}),
    ],
)
def test_each_fault_of_training_breaks_its_law(
    reset: Callable[[Tensor, Tensor, int], Tensor], broken: set[str]
) -> None:
    assert broken <= check(by_steps(gru(), reset))


@pytest.mark.parametrize("reset", [late, never, wrong_lane, shuffled])
def test_each_fault_of_acting_alone_is_a_difference_from_training(
    reset: Callable[[Tensor, Tensor, int], Tensor],
) -> None:
    layer = gru()
    assert "acting" in check(layer, act=one_step(layer, reset))


def one_step(layer: nn.GRU, reset: Callable[[Tensor, Tensor, int], Tensor]) -> Play:
    """Steps that remember the starts of the step before, for a reset that is late."""
    before: list[Tensor] = []

    def play(x: Tensor, h: Any, starts: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.cat([*before[-1:], starts])
        before.append(starts)
        return layer(x, reset(h, known, len(known) - 1))

    return play


def test_the_state_of_the_end_of_an_episode_is_not_stored_for_its_start() -> None:
    """Training that begins each minibatch from the state after its first step, as loops have it."""
    layer = gru()

    def play(x: Tensor, h: Any, starts: Tensor) -> tuple[Tensor, Tensor]:
        stale = layer(x[:1], h, starts[:1])[1] if len(x) > 1 else h
        return layer(x, stale, starts & (torch.arange(len(x)) > 0)[:, None])

    assert "acting" in check(play)


def test_outputs_may_be_several_and_acting_may_have_no_graph() -> None:
    layer, head = gru(), nn.Linear(4, 2).double()

    def actor_critic(x: Tensor, h: Any, starts: Tensor) -> tuple[Any, Any]:
        y, h = layer(x, h, starts)
        return (head(y), y.sum(dim=2)), h

    assert check(actor_critic) == set()
    assert check(actor_critic, act=torch.no_grad()(actor_critic)) == set()


def test_a_rollout_that_shows_nothing_is_refused() -> None:
    inputs, starts, state = rollout()
    for refused in (
        (inputs, torch.zeros_like(starts), state),
        (inputs[:, :1], starts[:, :1], state[:, :1]),
    ):
        with pytest.raises(DataError, match="give a rollout of two"):
            tt.testing.check_rollout(gru(), *refused)
    with pytest.raises(DataError, match="nothing is checked"):
        tt.testing.check_rollout(lambda x, h, _: (x, h), inputs, starts, state)
