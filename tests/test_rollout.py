"""tt.rollout against the net itself, whatever the loss: outputs, state and every gradient.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import Complex
from quick import examples
from rollouts import (
    EXACT,
    LOSSES,
    Loss,
    deviation,
    of_all,
    of_both,
    of_last,
    played,
    random_resets,
    random_state,
    rolled,
    whole,
)
from strategies import (
    FEATURES,
    HIDDEN,
    HidesLayer,
    Rotation,
    Row,
    TensorState,
    Weights,
    apart,
    every_net,
    gradients,
    in_chunks,
    inputs,
    lawless,
    named,
    remembering,
    seeds,
    start,
)
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient import segment
from throughtime.state import State


@examples(12)
@given(
    steps=st.sampled_from([1, 2, 7, 23]),
    chunk=st.sampled_from([1, 2, 3, 7, 50, None]),
    lanes=st.sampled_from([1, 2]),
    seed=seeds,
    resets=st.booleans(),
    given_state=st.booleans(),
    loss=st.sampled_from(LOSSES),
)
@every_net
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


def test_module_whose_state_is_not_explicit_is_refused() -> None:
    for module in (nn.LSTM(FEATURES, HIDDEN), named("hides-layer").module()):
        with pytest.raises(
            ModelError,
            match=rf"the net is a {type(module).__name__}; .*: net = tt\.carry\(module\)",
        ):
            # what a user may well do
            tt.rollout(module, inputs(5, 2))  # pyright: ignore[reportArgumentType]


def test_gradient_is_that_of_finite_differences() -> None:
    net, x = named("hides-layer").net(), inputs(5, 2).requires_grad_()
    state = tt.state.map_leaves(lambda leaf: leaf.requires_grad_(), random_state(net, x))
    leaves = tt.state.tensors(state)

    def play(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        y, after = tt.rollout(net, x, state, chunk=2)
        return y, *tt.state.tensors(after)

    assert torch.autograd.gradcheck(play, (x, *leaves))


def test_automatic_chunk_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = named("hides-layer").net(), inputs(97, 2)
    expected, calls = played(net, whole(net), x, None, None, of_both), list[int]()
    net.module.register_forward_hook(lambda _, args, __: calls.append(len(args[0])))
    lengths = set[int]()
    for most in (1, 30_000, 10**9):
        calls.clear()
        monkeypatch.setattr(segment, "MOST_BYTES", most)
        assert deviation(played(net, rolled(net), x, None, None, of_both), expected) < EXACT
        lengths.add(calls[1])  # after the trial
    assert {1, 97} < lengths


class Reads(nn.Module):
    """Tokens in, tokens out; the state counts them as well, in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, FEATURES)
        self.rotation = TensorState()

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        embedded = self.embedding(x)
        if state is None:
            state = {
                "h": embedded.new_zeros(x.shape[1], HIDDEN),
                "read": torch.zeros(x.shape[1], dtype=torch.long),
            }
        y, h = self.rotation(embedded, state["h"])
        return y, {"h": h, "read": state["read"] + len(x)}


def test_tokens_are_read_and_whole_numbers_carried() -> None:
    net, tokens = tt.carry(remembering(Reads())), torch.randint(0, 11, (23, 2))
    expected, end = net(tokens, start(net, tokens))
    of_last(expected, None).backward()
    wanted = gradients(net)
    net.zero_grad()
    y, state = tt.rollout(net, tokens, chunk=4)
    of_last(y, None).backward()
    assert (y - expected).abs().max() < EXACT
    assert apart(gradients(net), wanted) < EXACT
    assert wanted["module.embedding.weight"].abs().max() > 1e-6
    assert state["read"].tolist() == [23, 23] == end["read"].tolist()
    assert not state["read"].requires_grad


def test_dropout_draws_as_the_chunks_do_and_the_same_numbers_again() -> None:
    net, x = tt.carry(remembering(HidesLayer(dropout=0.4))), inputs(23, 2)

    def chunks(x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        return in_chunks(net, x, [4] * 5, state, resets)

    torch.manual_seed(3)
    expected = played(net, chunks, x, None, None, of_all)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    y, state = tt.rollout(net, x, chunk=4)
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.manual_seed(77)  # whatever is drawn in between
    now = torch.get_rng_state()
    of_all(y, state).backward()
    assert torch.equal(torch.get_rng_state(), now)
    assert (
        apart(gradients(net), {name: g for name, g in expected.gradients.items() if name != "x"})
        < EXACT
    )
    torch.manual_seed(4)  # the mutant: other numbers
    assert deviation(played(net, rolled(net, chunk=4), x, None, None, of_all), expected) > 1e-6


def test_buffers_change_once() -> None:
    class Normalised(HidesLayer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x.flatten(0, 1)).view_as(x))

    found = list[Weights]()
    for roll in (False, True):
        torch.manual_seed(5)
        x = inputs(24, 2)
        net = lawless(tt.carry(remembering(Normalised())), x)
        y, state = tt.rollout(net, x, chunk=6) if roll else in_chunks(net, x, [6] * 3)
        of_all(y, state).backward()
        found.append(gradients(net) | {name: b.clone().double() for name, b in net.named_buffers()})
    assert apart(found[1], found[0]) < EXACT
    assert found[0]["module.norm.num_batches_tracked"] == 4


def test_autocast_is_that_of_the_net_in_chunks() -> None:
    found = list[Weights]()
    for roll in (False, True):
        net, x = (
            tt.carry(named("hides-layer").module().float()),
            inputs(24, 2).float().requires_grad_(),
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if roll:
                y, state = tt.rollout(net, x, chunk=6)
            else:
                parts, state = list[Tensor](), start(net, x)
                for part in x.split(6):
                    torch.clear_autocast_cache()
                    y, state = net(part, state)
                    parts.append(y)
                y = torch.cat(parts)
            loss = of_all(y.float(), state)
        assert y.dtype == torch.bfloat16
        assert {leaf.dtype for leaf in tt.state.tensors(state)} == {torch.float32}
        loss.backward()  # outside autocast: the rollout goes back to its own
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        found.append(gradients(net) | {"x": x.grad})
    assert apart(found[1], found[0]) < 1e-7
    assert found[0]["module.lstm.weight_hh_l0"].abs().max() > 1e-4


class Restless(Rotation):
    def initial_state(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.play(x * random.uniform(0.5, 1.5), state)


class RestlessReadout(HidesLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.uniform(0.5, 1.5)


@pytest.mark.parametrize("make", [Restless, RestlessReadout])
def test_net_that_does_not_repeat_is_refused(make: Callable[[], nn.Module]) -> None:
    x = inputs(23, 2)
    net = lawless(tt.carry(make().double()), x)
    with pytest.raises(
        ModelError,
        match="the forward pass does not repeat: run again, steps 20 to 22 differ in",
    ):
        of_all(*tt.rollout(net, x, chunk=4)).backward()
    assert all(p.grad is None for p in net.parameters())


def test_complex_states_hand_back_their_credit() -> None:
    net, x = tt.carry(Complex().double()), inputs(23, 2)
    expected = played(net, whole(net), x, None, None, of_all)
    assert deviation(played(net, rolled(net, chunk=4), x, None, None, of_all), expected) < EXACT


@pytest.mark.parametrize(
    ("x", "options", "error", "reason"),
    [
        (inputs(23, 2)[:0], {}, DataError, r"\(0, 2, 3\) has no steps, expected one at least"),
        (torch.zeros(23), {}, DataError, r"inputs have shape \(23,\), expected \(T, B, D\)"),
        (
            inputs(23, 2),
            {"resets": torch.zeros(22, 2, dtype=torch.bool)},
            DataError,
            r"resets: shape \(22, 2\), expected the first two sizes \(23, 2\)",
        ),
        (
            inputs(23, 2),
            {"chunk": 0},
            ConfigError,
            "chunk=0: expected a whole number of at least 1",
        ),
    ],
    ids=["no steps", "one dimension", "resets", "chunk"],
)
def test_what_cannot_be_rolled_out_is_refused(
    x: Tensor, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        tt.rollout(named("hides-layer").net(), x, **options)
