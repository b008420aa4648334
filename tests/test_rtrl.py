"""Real-time recurrent learning, chunk by chunk: untruncated on a stream without end.

Shapes: `T` steps, `B` lanes, `n` numbers in a lane's state, `P` weights.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import (
    Complex,
    Marked,
    PolicyData,
    UpdateGrads,
    data_for,
    deviation,
    no_resets,
    plain,
    policy_gradients,
    train,
)
from quick import examples
from strategies import (
    FEATURES,
    Rotation,
    Row,
    TensorState,
    Weights,
    apart,
    gradients,
    inputs,
    lawless,
    named,
    recordings,
    seeds,
    some_nets,
    start,
    states_apart,
    weights,
)
from throughtime.errors import ConfigError, ModelError, RunError, ThroughtimeError
from throughtime.gradient import Policy
from throughtime.gradient import rtrl as rtrl_module

EXACT = 1e-10
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


def summed(results: UpdateGrads) -> Weights:
    """The gradient of the mean loss over all valid steps, from the updates' means."""
    total = sum(steps for steps, *_ in results)
    return {
        name: torch.stack([g[name] * (steps / total) for steps, _, g in results]).sum(0)
        for name in results[0][2]
    }


def exact(net: tt.Carried, data: PolicyData) -> Weights:
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
    results = policy_gradients(net, [data.chunk], tt.RTRL(stride))
    assert apart(summed(results), exact(net, data)) < EXACT


def forgets(patch: pytest.MonkeyPatch) -> Policy:
    right = rtrl_module._next_influence
    patch.setattr(rtrl_module, "_next_influence", lambda *given: torch.zeros_like(right(*given)))
    return tt.RTRL(5)


def forgets_one_number(patch: pytest.MonkeyPatch) -> Policy:
    right = rtrl_module._next_influence

    def next_influence(*given: Any) -> Tensor:
        influence = right(*given)
        influence[:, 0] = 0
        return influence

    patch.setattr(rtrl_module, "_next_influence", next_influence)
    return tt.RTRL(5)


def mixes_lanes(patch: pytest.MonkeyPatch) -> Policy:
    right = rtrl_module._next_influence
    patch.setattr(rtrl_module, "_next_influence", lambda *given: right(*given).flip(0))
    return tt.RTRL(5)


def ignores_resets(_: pytest.MonkeyPatch) -> Policy:
    return Marked(tt.RTRL(5), no_resets)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], Policy]] = {
    "forgets the influence": forgets,
    "forgets the influence on one number": forgets_one_number,
    "mixes the lanes": mixes_lanes,
    "ignores resets": ignores_resets,
    "truncates": lambda _: tt.Truncated(5, 15),
}


@pytest.mark.covering
@pytest.mark.parametrize("mutant", list(MUTANTS.values()), ids=list(MUTANTS))
@some_nets("tensor-state", "lstm", "hides-cell")
def test_mutant_does_not_sum_to_the_exact_gradient(
    row: Row, mutant: Callable[[pytest.MonkeyPatch], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = row.net()
    data = data_for(net, 29, 2, 3, resets=0.03)
    assert data.resets[1:].any()
    expected = exact(net, data)
    assert apart(summed(policy_gradients(net, [data.chunk], tt.RTRL(5))), expected) < EXACT
    assert apart(summed(policy_gradients(net, [data.chunk], mutant(monkeypatch))), expected) > 1e-6


def test_influence_forgotten_at_every_chunk_is_a_truncation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, data = named("gru").net(), PolicyData.draw(29, 2, 3, resets=0.1, outputs=4)
    mutant = policy_gradients(net, [data.chunk], forgets(monkeypatch))
    assert deviation(mutant, policy_gradients(net, [data.chunk], tt.Truncated(5))) < EXACT


class ComplexAndReal(Complex):
    """Beside the complex leaf it keeps a sum of its inputs, which is real."""

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        state = {"z": None, "sum": x.new_zeros(x.shape[1], FEATURES)} if state is None else state
        y, z = super().forward(x + 0.1 * (state["sum"] + x.cumsum(0)), state["z"])
        return y, {"z": z, "sum": state["sum"] + x.sum(0)}


@pytest.mark.parametrize("module", [Complex, ComplexAndReal])
def test_complex_states_hand_back_their_credit_or_are_refused(
    module: Callable[[], nn.Module],
) -> None:
    net, data = tt.carry(module().double()), PolicyData.draw(13, 2, 0)
    try:
        results = policy_gradients(net, [data.chunk], tt.RTRL(4))
    except ThroughtimeError:
        return
    assert apart(summed(results), exact(net, data)) < EXACT


def by_definition(net: tt.Carried, data: PolicyData, stride: int, rate: float) -> list[Weights]:
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
    for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.RTRL(4)):
        results.append(gradients(net))
        optimizer.step()
        optimizer.zero_grad()
    assert max(apart(a, b) for a, b in zip(results, expected, strict=True)) < EXACT
    assert (apart(weights(net), before) > 1e-3) == (rate > 0)


def test_carried_state_is_that_of_one_long_forward() -> None:
    net, data = named("hides-cell").net(), PolicyData.draw(23, 2, 0, resets=0.1)
    for update in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.RTRL(5)):
        last = int(update.chunk.position[-1, 0]) + 1
        _, expected = net(data.x[:last], start(net, data.x), data.resets[:last])
        assert states_apart(update.state, expected) < EXACT
        assert not any(leaf.requires_grad for leaf in tt.state.tensors(update.state))
        assert not update.outputs.requires_grad


def test_stride_without_valid_step_yields_nothing_but_carries_state_and_influence() -> None:
    net, data = named("hides-cell").net(), PolicyData.draw(24, 2, 0)
    mask = torch.zeros(24, 2, dtype=torch.bool)
    mask[9, 1] = mask[22] = True
    data = PolicyData(data.x, data.targets, data.resets, mask)
    results = policy_gradients(net, [data.chunk], tt.RTRL(3))
    assert [steps for steps, *_ in results] == [1, 2]
    assert apart(summed(results), exact(net, data)) < EXACT


def stream(chunk: int = 8) -> tt.Stream:
    return tt.Stream(recordings([31, 17, 20]), lanes=2, chunk=chunk, warm_up=1)


@examples(10)
@given(
    lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4),
    chunks=st.lists(st.sampled_from([1, 3, 7, 500]), min_size=2, max_size=2, unique=True),
    stride=st.sampled_from([1, 4, 9]),
)
@some_nets("tensor-state", "hides-layer")
def test_chunk_length_of_the_stream_changes_no_gradient(
    row: Row, lengths: list[int], chunks: list[int], stride: int
) -> None:
    lanes = min(2, sum(lengths))
    first, second = (
        policy_gradients(row.net(), tt.Stream(recordings(lengths), lanes, c), tt.RTRL(stride))
        for c in chunks
    )
    assert deviation(first, second) == 0


@pytest.mark.parametrize("done", [1, 4])
@some_nets("hides-layer", "learnt-start")
def test_resume_keeps_the_influence_to_the_bit(row: Row, done: int) -> None:
    net = row.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    run = tt.updates(net, stream(), nn.MSELoss(), gradient=tt.RTRL(5))
    train(optimizer, run, done)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), run.state_dict()))
    losses = train(optimizer, run)

    def resumed(place: dict[str, Any]) -> tuple[list[float], tt.Carried]:
        other = row.net()
        other_optimizer = torch.optim.Adam(other.parameters(), lr=0.05)
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(copy.deepcopy(saved[1]))
        rest = tt.updates(other, stream(), nn.MSELoss(), gradient=tt.RTRL(5))
        rest.load_state_dict(copy.deepcopy(place))
        return train(other_optimizer, rest), other

    again, other = resumed(saved[2])
    assert again == losses
    assert apart(weights(other), weights(net)) == 0
    assert (
        resumed(saved[2] | {"policy": saved[2]["policy"] | {"influence": None}})[0] != losses
    )  # the mutant: a place without the influence


class Opaque(torch.autograd.Function):
    """A tanh whose backward pass looks into its numbers, which torch cannot batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.tanh())
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, *adjoint: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return adjoint[0] * (1 - y * y) if adjoint[0].sum().item() else torch.zeros_like(y)


class Custom(Rotation):
    def __init__(self, squash: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.squash = squash

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h, hidden = self.zeros(x) if state is None else state, list[Tensor]()
        for step in x.unbind(0):
            h = self.squash(h @ self.turn + step @ self.into)
            hidden.append(h)
        return self.read(torch.stack(hidden)), h


def test_operation_that_cannot_be_batched_gives_the_same() -> None:
    def net(squash: Any) -> tt.Carried:
        torch.manual_seed(0)
        return tt.carry(Custom(squash).double())

    data = PolicyData.draw(13, 2, 0)
    results = policy_gradients(net(Opaque.apply), [data.chunk], tt.RTRL(4))
    assert apart(summed(results), exact(net(torch.tanh), data)) < EXACT
    assert deviation(results, policy_gradients(net(torch.tanh), [data.chunk], tt.RTRL(4))) < EXACT


def test_error_of_the_net_in_its_backward_pass_comes_through() -> None:
    """Looping over what cannot be batched hides no error."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *adjoint: Tensor) -> Tensor:
            del ctx, adjoint
            raise RuntimeError("never mind")

    data = PolicyData.draw(13, 2, 0)
    net = lawless(tt.carry(Custom(Broken.apply).double()), data.chunk.inputs)
    with pytest.raises(RuntimeError, match="never mind"):
        policy_gradients(net, [data.chunk], tt.RTRL(4))


def test_state_above_max_state_is_refused_naming_the_memory() -> None:
    net, data = named("tensor-state").net(), PolicyData.draw(9, 3, 0)
    parameters = sum(w.numel() for w in net.parameters())
    needed = f"{12 * parameters * 8 / 1000:.3g} kB"
    message = (
        rf"4 numbers in each of 3 lanes, above max_state=11: its dependence on {parameters} weights"
        rf" takes {needed}, "
        r".*and 12 backward passes for every 5 steps\. .*tt\.Exact or tt\.Randomized.*max_state=12"
    )
    with pytest.raises(ConfigError, match=message):
        policy_gradients(net, [data.chunk], tt.RTRL(5, max_state=11))
    assert len(policy_gradients(net, [data.chunk], tt.RTRL(5, max_state=12))) == 2
    chunk = tt.Chunk.from_tensors(torch.randn(5, 1, FEATURES), torch.randn(5, 1, 256))
    with pytest.raises(ConfigError, match=r"above max_state=128: .* takes [\d.]+ MB"):
        policy_gradients(tt.carry(nn.LSTM(FEATURES, 256)), [chunk], tt.RTRL(5))


@pytest.mark.parametrize(
    "setting", [{"stride": 0}, {"stride": 2.5}, {"stride": True}, {"max_state": 0}]
)
def test_setting_out_of_range_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a whole number of at least 1"):
        tt.RTRL(**{"stride": 5, **setting})


def test_gradient_that_is_not_finite_is_refused_and_nothing_touched() -> None:
    net, data = named("hides-cell").net(), PolicyData.draw(20, 2, 0)
    data.targets[13] = torch.nan
    run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.RTRL(5))
    kept = [gradients(net) for _ in itertools.islice(run, 2)]
    before = weights(net)
    with pytest.raises(
        RunError,
        match=r"gradient of '[\w.]+' is not finite .* steps 10 to 14 of the epoch \(recording 0\)",
    ):
        next(run)
    assert apart(gradients(net), kept[-1]) == 0
    assert apart(weights(net), before) == 0


def test_frozen_parameters_take_no_part() -> None:
    """Neither in `.grad` nor in the memory."""
    net, data = named("tensor-state").net(), PolicyData.draw(13, 2, 0)
    expected = exact(net, data)
    frozen = net.module.get_parameter("turn").requires_grad_(False)
    run = tt.updates(net, tt.Stream(recordings([13, 13]), 2, 5), nn.MSELoss(), gradient=tt.RTRL(4))
    next(run)
    assert run.state_dict()["policy"]["influence"].shape == (
        2,
        4,
        sum(w.numel() for w in net.parameters()) - frozen.numel(),
    )
    net.zero_grad()
    results = summed(policy_gradients(net, [data.chunk], tt.RTRL(4)))
    assert frozen.grad is None
    assert apart(results, expected | {"module.turn": torch.zeros_like(frozen)}) < EXACT
    with pytest.raises(ModelError, match="the loss depends on no parameter"):
        policy_gradients(net.requires_grad_(requires_grad=False), [data.chunk], tt.RTRL(4))


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
    run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.RTRL(4))
    assert [update.steps for update in run] == [8, 8, 8, 2]
    assert run.state[1].dtype == torch.long
    net.zero_grad()
    assert apart(summed(policy_gradients(net, [data.chunk], tt.RTRL(4))), exact(net, data)) < EXACT


def test_gradients_add_up_until_they_are_zeroed() -> None:
    net, data = tt.carry(TensorState().double()), PolicyData.draw(20, 2, 0)
    single: Sequence[Any] = policy_gradients(net, [data.chunk], tt.RTRL(5))
    for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.RTRL(5)):
        pass
    added = {name: torch.stack([g[name] for *_, g in single]).sum(0) for name in gradients(net)}
    assert apart(gradients(net), added) < EXACT


def test_no_targets_means_no_update() -> None:
    assert (
        policy_gradients(named("lstm").net(), [tt.Chunk.from_tensors(inputs(9, 1))], tt.RTRL(3))
        == []
    )
