"""tt.rollout against the net itself: whatever the loss, whatever it is part of.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from givens import Complex
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
    named,
    remembering,
    seeds,
    some_nets,
    start,
    states_apart,
    weights,
)
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient.sweep import Adjoint, Piece, Pulled
from throughtime.state import State

EXACT = 1e-10
Play = Callable[[Tensor, State, Tensor | None], tuple[Tensor, State]]
Loss = Callable[[Tensor, State], Tensor]


def of_all(y: Tensor, _: State) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).square().mean()


def of_last(y: Tensor, _: State) -> Tensor:
    return y[-1].square().sum()


def of_spectrum(y: Tensor, _: State) -> Tensor:
    return torch.fft.rfft(y, dim=0).abs().square()[1 : 1 + len(y) // 3].mean() + y.std(0, correction=0).square().sum()


def of_end(_: Tensor, state: State) -> Tensor:
    return torch.stack([leaf.square().sum() for leaf in tt.state.tensors(state)]).sum()


def of_both(y: Tensor, state: State) -> Tensor:
    return of_all(y, state) + of_end(y, state) + y.exp().mean() * y.max()


LOSSES: list[Loss] = [of_all, of_last, of_spectrum, of_end, of_both]


class Played(NamedTuple):
    """Outputs, state, and gradients to parameters, inputs, and the state that entered."""

    y: Tensor
    state: State
    gradients: Weights


def played(net: tt.Carried, play: Play, x: Tensor, state: State, resets: Tensor | None, loss: Loss) -> Played:
    net.zero_grad()
    x = x.detach().clone().requires_grad_()
    entering = None if state is None else tt.state.map_leaves(lambda leaf: leaf.detach().clone().requires_grad_(), state)
    y, after = play(x, entering, resets)
    loss(y, after).backward()
    found = gradients(net) | {"x": torch.zeros_like(x) if x.grad is None else x.grad}
    for name, leaf in () if state is None else tt.state.leaves(entering):
        found[f"state.{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    net.zero_grad()
    return Played(y.detach(), tt.state.detach(after), found)


def whole(net: tt.Carried) -> Play:
    return lambda x, state, resets: net(x, start(net, x) if state is None else state, resets)


def rolled(net: tt.Carried, **options: Any) -> Play:
    return lambda x, state, resets: tt.rollout(net, x, state, resets=resets, **options)


def deviation(a: Played, b: Played) -> float:
    return max((a.y - b.y).abs().max().item(), states_apart(a.state, b.state), apart(a.gradients, b.gradients))


def random_state(net: tt.Carried, x: Tensor, seed: int = 9) -> State:
    draw = torch.Generator().manual_seed(seed)
    return tt.state.map_leaves(lambda leaf: torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype) * 0.5, tt.state.detach(start(net, x)))


def random_resets(steps: int, lanes: int, seed: int = 9) -> Tensor:
    return torch.rand(steps, lanes, generator=torch.Generator().manual_seed(seed)) < 0.1


@settings(max_examples=12)
@given(
    steps=st.sampled_from([1, 2, 7, 23]),
    chunk=st.sampled_from([1, 2, 3, 7, 50, "auto"]),
    lanes=st.sampled_from([1, 2]),
    seed=seeds,
    resets=st.booleans(),
    given_state=st.booleans(),
    verify=st.sampled_from(["first", "all", "off"]),
    loss=st.sampled_from(LOSSES),
)
@every_net
def test_rollout_is_the_net(
    row: Row, steps: int, chunk: Any, lanes: int, seed: int, resets: bool, given_state: bool, verify: Any, loss: Loss
) -> None:
    """Outputs, state, and the gradients to parameters, inputs and the state that enters."""
    net, x = row.net(), inputs(steps, lanes, seed=seed) * 0.3
    state = random_state(net, x, seed) if given_state else None
    where = random_resets(steps, lanes, seed) if resets else None
    found = played(net, rolled(net, chunk=chunk, verify=verify), x, state, where, loss)
    assert deviation(found, played(net, whole(net), x, state, where, loss)) < EXACT


def drops_an_adjoint(patch: pytest.MonkeyPatch) -> None:
    right = Piece.pull

    def pull(piece: Piece, weights: Sequence[Tensor], roots: Any, adjoint: Adjoint | None, **options: Any) -> Pulled:
        return right(piece, weights, roots, None if piece.index == 1 else adjoint, **options)

    patch.setattr(Piece, "pull", pull)


@pytest.mark.parametrize("loss", LOSSES)
@some_nets("lstm", "namedtuple-state", "learnt-start")
def test_rollout_that_loses_something_is_not_the_net(row: Row, loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutants: no resets, no state, credit lost at an edge, no credit from the end state."""
    net, x = row.net(), inputs(23, 2) * 0.3
    state, resets = random_state(net, x), torch.zeros(23, 2, dtype=torch.bool)
    resets[20, 1] = True
    expected = played(net, whole(net), x, state, resets, loss)
    play = rolled(net, chunk=7)
    assert deviation(played(net, play, x, state, resets, loss), expected) < EXACT
    assert deviation(played(net, lambda x, state, _: play(x, state, None), x, state, resets, loss), expected) > 1e-6
    assert (
        deviation(
            played(net, lambda x, state, resets: play(x, tt.state.map_leaves(lambda s: s * 0, state), resets), x, state, resets, loss),
            expected,
        )
        > 1e-6
    )
    monkeypatch.setattr("throughtime.gradient.sweep.Sweep._compare", lambda *_: None)
    drops_an_adjoint(monkeypatch)
    broken = played(net, play, x, state, resets, loss).gradients
    for part in (
        "x",
        next(name for name in broken if name.startswith("module")),
        next(name for name in broken if name.startswith("state")),
    ):
        assert apart({part: broken[part]}, {part: expected.gradients[part]}) > 1e-7


@pytest.mark.parametrize("resets", [None, random_resets(23, 1)[:, 0]], ids=["unbroken", "resets"])
@some_nets("hides-layer", "hides-cell-batch-first", "namedtuple-state", "learnt-start")
def test_one_unbatched_lane_is_rolled_out(row: Row, resets: Tensor | None) -> None:
    """Inputs `(T, D)` and resets `(T,)` give outputs `(T, C)`; the state keeps its lane."""
    net, x = row.net(), inputs(23, 1)[:, 0] * 0.3
    state = random_state(net, inputs(1, 1))
    for entering in (state, None):
        found = played(net, rolled(net, chunk=4), x, entering, resets, of_both)
        one = played(net, rolled(net, chunk=4), x.unsqueeze(1), entering, None if resets is None else resets.unsqueeze(1), of_both)
        assert found.y.shape == one.y[:, 0].shape
        assert found.gradients["x"].shape == x.shape
        batched = Played(one.y[:, 0], one.state, one.gradients | {"x": one.gradients["x"][:, 0]})
        assert deviation(found, batched) == 0
        unbatched = played(
            net, lambda x, s, r: net(x, net.initial_state(1, like=inputs(1, 1)) if s is None else s, r), x, entering, resets, of_both
        )
        assert deviation(found, unbatched) < EXACT


def test_one_unbatched_lane_of_tokens_is_rolled_out() -> None:
    net, tokens = tt.carry(remembering(Reads())), torch.randint(0, 11, (23,))
    y, state = tt.rollout(net, tokens, chunk=4)
    expected, end = tt.rollout(net, tokens.unsqueeze(1), chunk=4)
    assert torch.equal(y, expected[:, 0])
    assert states_apart(state, end) == 0


def test_module_whose_state_is_not_explicit_is_refused() -> None:
    for module in (nn.LSTM(FEATURES, HIDDEN), named("hides-layer").module()):
        with pytest.raises(ModelError, match=rf"the net is a {type(module).__name__}; .*: net = tt\.carry\(module\)"):
            tt.rollout(module, inputs(5, 2))  # pyright: ignore[reportArgumentType]  # what a user may well do


def test_gradient_is_that_of_finite_differences() -> None:
    net, x = named("hides-layer").net(), inputs(5, 2).requires_grad_()
    state = tt.state.map_leaves(lambda leaf: leaf.requires_grad_(), random_state(net, x))
    leaves = tt.state.tensors(state)

    def play(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        y, after = tt.rollout(net, x, state, chunk=2)
        return y, *tt.state.tensors(after)

    assert torch.autograd.gradcheck(play, (x, *leaves))


@pytest.mark.parametrize("offload", ["cpu", "folder"])
def test_offload_changes_no_bit_and_leaves_no_file(offload: str, tmp_path: Path) -> None:
    net, x = named("namedtuple-state").net(), inputs(23, 2)
    kept = played(net, rolled(net, chunk=3), x, None, None, of_both)
    moved = played(net, rolled(net, chunk=3, offload=tmp_path if offload == "folder" else offload), x, None, None, of_both)
    assert deviation(moved, kept) == 0
    y, _ = tt.rollout(net, x, chunk=3, offload=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert y.requires_grad


def test_memory_changes_no_gradient() -> None:
    net, x = named("hides-layer").net(), inputs(97, 2)
    expected = played(net, whole(net), x, None, None, of_both)
    calls = list[int]()
    net.module.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    lengths = set[int]()
    for memory in ("10kB", "16kB", 40_000, "512MB"):
        assert deviation(played(net, rolled(net, memory=memory), x, None, None, of_both), expected) < EXACT
        lengths.add(max(calls[-2:]))
    assert len(lengths) > 2
    with pytest.raises(ConfigError, match="a memory of 100 bytes is too small for 97 steps"):
        tt.rollout(net, x, memory=100)


def test_rollout_is_part_of_a_larger_graph() -> None:
    """An encoder before it, another net after it, its state made from something else and used by another rollout."""
    first, second = named("hides-layer").net(), named("tensor-state").net()
    found = list[Weights]()
    for play_first, play_second in ((whole(first), whole(second)), (rolled(first, chunk=3), rolled(second, chunk=4))):
        torch.manual_seed(1)
        encoder, starter, link = nn.Linear(FEATURES, FEATURES).double(), nn.Linear(2, HIDDEN).double(), nn.Linear(2, FEATURES).double()
        x, z = encoder(inputs(30, 2)), starter(torch.ones(2, 2, dtype=torch.float64))
        y, state = play_first(x, None, None)
        more, end = play_second(link(y).tanh(), z, None)
        again, _ = play_first(x.flip(0), state, None)  # the same net once more, from where it was
        (more.square().mean() + again.square().mean() + y[3:5].sum() * end.sum()).backward()
        parts = {"first": first, "second": second, "encoder": encoder, "starter": starter, "link": link}
        found.append({f"{name}.{key}": g for name, part in parts.items() for key, g in gradients(part).items()})
        first.zero_grad()
        second.zero_grad()
    assert apart(found[1], found[0]) < EXACT
    assert all(g.abs().max() > 1e-9 for g in found[0].values())


def test_rollouts_one_after_another_are_one() -> None:
    net, x = named("namedtuple-state").net(), inputs(30, 2)

    def in_two(x: Tensor, state: State, resets: Tensor | None) -> tuple[Tensor, State]:
        del resets
        y, state = tt.rollout(net, x[:13], state, chunk=4)
        more, state = tt.rollout(net, x[13:], state, chunk=5)
        return torch.cat([y, more]), state

    state = random_state(net, x)
    assert deviation(played(net, in_two, x, state, None, of_both), played(net, whole(net), x, state, None, of_both)) < EXACT


def test_several_losses_may_go_back_one_after_another() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2).requires_grad_()
    both = played(net, whole(net), x, None, None, lambda y, s: of_all(y, s) + of_end(y, s))
    y, state = tt.rollout(net, x, chunk=4)
    of_all(y, state).backward(retain_graph=True)
    of_end(y, state).backward()
    assert x.grad is not None
    assert apart(gradients(net) | {"x": x.grad}, both.gradients) < EXACT
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        of_all(y, state).backward()


def test_gradients_may_be_asked_for_without_touching_any() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2).requires_grad_()
    expected = played(net, whole(net), x, None, None, of_all)
    y, state = tt.rollout(net, x, chunk=4)
    (found,) = torch.autograd.grad(of_all(y, state), [x])
    assert (found - expected.gradients["x"]).abs().max() < EXACT
    assert x.grad is None
    assert all(p.grad is None for p in net.parameters())


def test_only_what_wants_a_gradient_gets_one() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    net.get_submodule("module.lstm").requires_grad_(requires_grad=False)
    expected = played(net, whole(net), x, None, None, of_all).gradients
    y, state = tt.rollout(net, x, chunk=4)
    of_all(y, state).backward()
    assert apart(gradients(net), {name: g for name, g in expected.items() if name != "x"}) < EXACT
    assert x.grad is None
    net.requires_grad_(requires_grad=False)
    y, _ = tt.rollout(net, x, chunk=4)
    assert not y.requires_grad
    found = played(net, rolled(net, chunk=4), x, random_state(net, x), None, of_both)
    net.requires_grad_(requires_grad=False)
    assert deviation(found, played(net, whole(net), x, random_state(net, x), None, of_both)) < EXACT
    assert found.gradients["x"].abs().max() > 1e-6


def test_without_gradients_there_is_no_graph() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    expected, end = net(x, start(net, x))
    for mode in (torch.no_grad, torch.inference_mode):
        for chunk in (4, "auto"):
            with mode():
                y, state = tt.rollout(net, x, chunk=chunk)
            assert not y.requires_grad
            assert (y - expected).abs().max() < EXACT
            assert states_apart(state, end) < EXACT


class Reads(nn.Module):
    """Tokens in, tokens out; the state counts them as well, in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, FEATURES)
        self.rotation = TensorState()

    def forward(self, x: Tensor, state: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        embedded = self.embedding(x)
        if state is None:
            state = {"h": embedded.new_zeros(x.shape[1], HIDDEN), "read": torch.zeros(x.shape[1], dtype=torch.long)}
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
    assert apart(gradients(net), {name: g for name, g in expected.gradients.items() if name != "x"}) < EXACT
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
        net, x = tt.carry(remembering(Normalised())), inputs(24, 2)
        y, state = tt.rollout(net, x, chunk=6) if roll else in_chunks(net, x, [6] * 3)
        of_all(y, state).backward()
        found.append(gradients(net) | {name: b.clone().double() for name, b in net.named_buffers()})
    assert apart(found[1], found[0]) < EXACT
    assert found[0]["module.norm.num_batches_tracked"] == 4


def test_autocast_is_that_of_the_net_in_chunks() -> None:
    found = list[Weights]()
    for roll in (False, True):
        net, x = tt.carry(named("hides-layer").module().float()), inputs(24, 2).float().requires_grad_()
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


def test_second_derivatives_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2).requires_grad_()
    y, state = tt.rollout(net, x, chunk=4)
    with pytest.raises(ModelError, match=r"a second derivative \(create_graph=True\).*call the net itself, net\(x, state, resets\)"):
        torch.autograd.grad(of_all(y, state), [x], create_graph=True)


def test_weights_changed_before_the_backward_pass_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first, second = tt.rollout(net, x, chunk=4), tt.rollout(net, x, chunk=4)
    of_all(*first).backward()
    kept = gradients(net)
    optimizer.step()
    with pytest.raises(ModelError, match=r"weights were changed in place \(optimizer\.step\(\)\?\).*call backward first"):
        of_all(*second).backward()
    assert apart(gradients(net), kept) == 0
    of_all(*tt.rollout(net, x, chunk=4)).backward()


def test_inputs_changed_before_the_backward_pass_are_refused() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    y, state = tt.rollout(net, x, chunk=4)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        of_all(y, state).backward()


def test_state_changed_before_the_backward_pass_changes_nothing() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    state = random_state(net, x)
    expected = played(net, whole(net), x, state, None, of_all)
    y, after = tt.rollout(net, x, state, chunk=4)
    for leaf in (*tt.state.tensors(state), *tt.state.tensors(tt.state.detach(after))):
        leaf.zero_()
    of_all(y, after).backward()
    assert apart(gradients(net), {name: g for name, g in expected.gradients.items() if name.startswith("module")}) < EXACT


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
    net, x = tt.carry(make().double()), inputs(23, 2)
    for verify in ("first", "all"):
        with pytest.raises(ModelError, match="the forward pass does not repeat: run again, steps 20 to 22 of the stretch"):
            of_all(*tt.rollout(net, x, chunk=4, verify=verify)).backward()
    assert all(p.grad is None for p in net.parameters())
    of_all(*tt.rollout(net, x, chunk=4, verify="off")).backward()


def test_hooks_on_parameters_are_called_once_with_the_whole_gradient() -> None:
    net, x = named("hides-layer").net(), inputs(23, 2)
    expected = played(net, whole(net), x, None, None, of_all).gradients
    calls = list[tuple[str, Tensor]]()
    for name, p in net.named_parameters():
        p.register_hook(lambda gradient, name=name: calls.append((name, gradient)))
    of_all(*tt.rollout(net, x, chunk=4)).backward()
    assert len(calls) == len(weights(net))
    assert apart(dict(calls), {name: g for name, g in expected.items() if name != "x"}) < EXACT


def test_complex_states_hand_back_their_credit() -> None:
    net, x = tt.carry(Complex().double()), inputs(23, 2)
    expected = played(net, whole(net), x, None, None, of_all)
    assert deviation(played(net, rolled(net, chunk=4), x, None, None, of_all), expected) < EXACT


@pytest.mark.parametrize(
    ("x", "options", "error", "reason"),
    [
        (inputs(23, 2)[:0], {}, DataError, r"inputs have shape \(0, 2, 3\), expected \(T, B, D\) or \(T, B\) with at least one step"),
        (torch.zeros(23), {}, DataError, r"inputs have shape \(23,\), expected \(T, B, D\)"),
        (inputs(23, 2), {"resets": torch.zeros(22, 2, dtype=torch.bool)}, DataError, r"resets have shape \(22, 2\), expected \(23, 2\)"),
        (inputs(23, 2), {"chunk": 0}, ConfigError, "chunk=0: expected a whole number of at least 1"),
        (inputs(23, 2), {"memory": "much"}, ConfigError, "memory='much'"),
        (inputs(23, 2), {"offload": "/no/such/folder"}, ConfigError, "or a folder that exists"),
        (inputs(23, 2), {"verify": "some"}, ConfigError, "verify='some': expected 'first', 'all' or 'off'"),
    ],
    ids=["no steps", "one dimension", "resets", "chunk", "memory", "offload", "verify"],
)
def test_what_cannot_be_rolled_out_is_refused(x: Tensor, options: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        tt.rollout(named("hides-layer").net(), x, **options)
