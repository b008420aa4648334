"""Steps equal torch's on every instruction set and thread count; state, groups, schedules, scalers
and copies behave as in torch.optim."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from optimizers import (
    BOUNDS,
    PAIRS,
    Race,
    flattened,
    in_two_groups,
    layout,
    make_params,
    max_difference,
    needs_core,
    set_grads,
    state_vectors,
    steps,
    was_compiled,
)
from throughtime import optim
from throughtime.errors import ConfigError
from throughtime.kernels.library import library

pytestmark = needs_core


OF_ADAM = st.fixed_dictionaries(
    {
        "lr": st.sampled_from((1e-3, 0.1, 0)),
        "betas": st.sampled_from(((0.9, 0.999), (0.0, 0.5), (0.3, 0.99))),
        "eps": st.sampled_from((1e-8, 1e-3)),
        "weight_decay": st.sampled_from((0, 0.1)),
        "amsgrad": st.booleans(),
        "maximize": st.booleans(),
    }
)
OF_SGD = st.fixed_dictionaries(
    {
        "lr": st.sampled_from((1e-3, 0.1)),
        "momentum": st.sampled_from((0, 0.9)),
        "dampening": st.sampled_from((0, 0.3)),
        "weight_decay": st.sampled_from((0, 0.1)),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
    }
).filter(
    lambda options: not options["nesterov"] or (options["momentum"] and not options["dampening"])
)
RULED = st.one_of(
    st.tuples(st.sampled_from(("adam", "adamw")), OF_ADAM), st.tuples(st.just("sgd"), OF_SGD)
)


@given(
    RULED,
    st.sampled_from((torch.float32, torch.float64)),
    st.sampled_from((None, 0.5, 3.0, float("inf"))),
)
def test_fifty_steps_are_torchs(
    ruled: tuple[str, dict[str, Any]], dtype: torch.dtype, max_norm: float | None
) -> None:
    rule, options = ruled
    race = Race(rule, dtype, max_norm=max_norm, other={"lr": 0.02, "weight_decay": 0.03}, **options)
    race.run(0, 50)  # the first step of a rule with a state is torch's own, which makes it
    assert was_compiled(race.ours)
    assert race.apart < BOUNDS[dtype]


@pytest.mark.parametrize("rule", PAIRS)
def test_every_instruction_set_takes_torchs_step(rule: str) -> None:
    core = library()
    assert core is not None
    widest = core.tt_level()
    present = [level for level in (b"v2", b"v3", b"v4", b"base") if core.tt_use(level)]
    try:
        for level in present:
            assert core.tt_use(level)
            for dtype, bound in BOUNDS.items():
                race = Race(rule, dtype, max_norm=1.0, weight_decay=0.1)
                race.run(0, 10)
                assert was_compiled(race.ours)
                assert race.apart < bound
    finally:
        core.tt_use(widest)
    assert present


@pytest.mark.covering
@pytest.mark.parametrize("rule", PAIRS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_any_number_of_threads_gives_the_same_bits(rule: str, dtype: torch.dtype) -> None:
    """Of 400,003 numbers in four tensors, which lie across the blocks."""
    results = list[list[Tensor]]()
    for threads in (1, 2):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in (100_001, 3, 0, 299_999)]
        optimizer = PAIRS[rule][0](params, lr=0.1, max_norm=1.0)
        torch.set_num_threads(threads)
        try:
            steps(optimizer, params, 0, 3)
        finally:
            torch.set_num_threads(1)
        assert was_compiled(optimizer)
        norm = torch.tensor(optimizer.norm)
        results.append([flattened(params), *state_vectors(optimizer), norm])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("rule", PAIRS)
def test_clipping_is_over_all_groups_and_leaves_the_gradients_alone(rule: str) -> None:
    params = make_params()
    optimizer = PAIRS[rule][0](in_two_groups(params, lr=0.2), max_norm=0.5)
    assert optimizer.norm is None
    optimizer.step()
    set_grads(params, 1)
    optimizer.step()
    set_grads(params, 2)
    before = [(param.grad, param.grad.clone()) for param in params if param.grad is not None]
    optimizer.step()
    assert was_compiled(optimizer)
    assert all(
        param.grad is grad and torch.equal(grad, copied)
        for param, (grad, copied) in zip(params, before, strict=True)
    )
    assert optimizer.norm == pytest.approx(
        float(torch.cat([copied.flatten() for _, copied in before]).norm()), rel=1e-12
    )
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.norm == 0.0
    optimizer.max_norm = None
    optimizer.step()
    assert optimizer.norm is None


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_does_what_torchs_does(number: float) -> None:
    pair = Race("adamw", max_norm=1.0)
    for step in range(2):
        for params, optimizer in pair.sides:
            set_grads(params, step)
            if step == 1:
                params[0].grad[2, 3] = number  # pyright: ignore[reportOptionalSubscript]
            if optimizer is pair.torchs:
                clip_grad_norm_(params, 1.0)
            optimizer.step()
    assert all(
        torch.equal(a.isnan(), b.isnan()) for a, b in zip(pair.mine, pair.theirs, strict=True)
    )
    assert any(param.isnan().any() for param in pair.mine)
    assert not pair.ours.norm < float("inf")
    assert was_compiled(pair.ours)


@pytest.mark.parametrize("rule", PAIRS)
@pytest.mark.parametrize("first", ["ours", "torchs"])
def test_state_goes_over_between_torch_and_ours(rule: str, first: str) -> None:
    """Five steps with one, saved, and five with the other are ten with torch's."""
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1} | (
        {"momentum": 0.9} if rule == "sgd" else {"amsgrad": True}
    )
    params, whole = make_params(), make_params()
    start, goal = PAIRS[rule] if first == "ours" else reversed(PAIRS[rule])
    before = start(in_two_groups(params, lr=0.3), **options)
    reference = PAIRS[rule][1](in_two_groups(whole, lr=0.3), **options)
    steps(before, params, 0, 5)
    steps(reference, whole, 0, 5)
    assert layout(before.state_dict()) == layout(reference.state_dict())
    saved = io.BytesIO()
    torch.save(before.state_dict(), saved)
    saved.seek(0)
    after = goal(in_two_groups(params), lr=7.0)
    after.load_state_dict(torch.load(saved, weights_only=True))
    steps(after, params, 5, 10)
    steps(reference, whole, 5, 10)
    ours, theirs = [flattened(params), *state_vectors(after)], state_vectors(reference)
    assert max_difference(ours, [flattened(whole), *theirs]) < 1e-12
    assert layout(after.state_dict()) == layout(reference.state_dict())
    mine: Any = before if first == "ours" else after
    assert was_compiled(mine)


def other_state(params: list[nn.Parameter], optimizer: Any, step: int) -> None:
    """All of it, then tensors of it under their names and in their places."""
    state = optimizer.state
    name = "momentum_buffer" if isinstance(optimizer, torch.optim.SGD) else "exp_avg"
    if step == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif step == 5:
        state[params[0]][name] = torch.ones(7, 5, dtype=torch.float64)
    elif step == 6:
        del state[params[1]]
        state[params[6]][name].data = torch.ones(16, 50, dtype=torch.float64)


def moved_and_wider(params: list[nn.Parameter], optimizer: Any, step: int) -> None:
    for param in params if step in {2, 4} else ():
        state, param.grad = optimizer.state[param], None
        param.data = param.data.double().clone()
        state |= {name: leaf.double() for name, leaf in state.items() if name != "step"}
    set_grads(params, step)


def without_gradient(params: list[nn.Parameter], _: Any, step: int) -> None:
    """Such parameters stay, and keep a count of their own."""
    for number, param in enumerate(params):
        if (number + step) % 3 == 0 or number == 4:
            param.grad = None


def joined(params: list[nn.Parameter], optimizer: Any, step: int) -> None:
    if step == 5:
        params.append(nn.Parameter(torch.ones(5, 2, dtype=torch.float64)))
        optimizer.add_param_group({"params": params[-1:], "lr": 0.05})


def scheduled(_: Any, optimizer: Any, step: int) -> None:
    """A cycle also moves the momentum of SGD and the first beta of Adam."""
    group = optimizer.param_groups[0]
    group["lr"] *= 0.7
    group |= {"momentum": step / 10} if "momentum" in group else {"betas": (step / 10, 0.99)}


def rate_in_a_tensor(_: Any, optimizer: Any, step: int) -> None:
    """It changes where it is."""
    group = optimizer.param_groups[0]
    if step == 0:
        group["lr"] = torch.tensor(0.1, dtype=torch.float64)
    group["lr"].mul_(0.7)


EVENTS = other_state, moved_and_wider, without_gradient, joined, scheduled, rate_in_a_tensor


@pytest.mark.parametrize("rule", PAIRS)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_what_happens_before_a_step_is_followed(event: Callable[..., None], rule: str) -> None:
    dtype = torch.float32 if event is moved_and_wider else torch.float64
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5} if rule == "sgd" else {}
    race = Race(rule, dtype, **options)
    for step in range(9):
        for params, optimizer in race.sides:
            set_grads(params, step)
            event(params, optimizer, step)
            optimizer.step()
    assert was_compiled(race.ours)
    assert race.apart < BOUNDS[dtype]
    assert layout(race.ours.state_dict()) == layout(race.torchs.state_dict())


def test_a_grad_scaler_unscales_before_the_norm_and_skips_overflows() -> None:
    race = Race("adam", torch.float32, max_norm=1.0, fused=True)
    for params, optimizer in race.sides:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            set_grads(params, step)
            for param in params:
                assert param.grad is not None
                param.grad *= scaler.get_scale() if step != 3 or not param.numel() else float("inf")
            scaler.scale(torch.zeros(()))
            if optimizer is race.torchs:
                scaler.unscale_(optimizer)
                clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert race.apart < 1e-5
    assert race.ours.state[race.mine[0]]["step"] == 5
    assert was_compiled(race.ours)


class Own(Tensor):
    """A subclass."""


NOT_OURS: dict[str, Callable[[], list[nn.Parameter]]] = {
    "half": lambda: [nn.Parameter(torch.randn(5, dtype=torch.bfloat16))],
    "with gaps": lambda: [nn.Parameter(torch.randn(5, 2, dtype=torch.float64)[:, 0])],
    "a subclass": lambda: [nn.Parameter(torch.randn(5, dtype=torch.float64).as_subclass(Own))],
    "one memory": lambda: [
        nn.Parameter(part)
        for part in torch.randn(8, dtype=torch.float64).as_strided((2, 5), (3, 1))
    ],
    "no core": make_params,
}


@pytest.mark.parametrize("kind", NOT_OURS)
def test_what_the_core_cannot_take_steps_in_torch_with_the_same_clipping(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "no core":
        monkeypatch.setattr(optim, "need", lambda _: None)
        monkeypatch.setattr(optim, "why_missing", lambda: "a test took it away")
    torch.manual_seed(3)
    mine = NOT_OURS[kind]()
    torch.manual_seed(3)
    theirs = NOT_OURS[kind]()
    ours, torchs = optim.Adam(mine, lr=0.1, max_norm=0.5), torch.optim.Adam(theirs, lr=0.1)
    for step in range(3):
        for params in (mine, theirs):
            torch.manual_seed(step)
            for param in params:
                param.grad = torch.randn_like(param) * (step + 0.1)
        held = [(param.grad, param.grad.clone()) for param in mine if param.grad is not None]
        norm = clip_grad_norm_(theirs, 0.5)
        ours.step()
        torchs.step()
        assert ours.fallback
        assert ours.norm == float(norm)
        assert all(
            param.grad is grad and torch.equal(grad, copied)
            for param, (grad, copied) in zip(mine, held, strict=True)
        )
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_graph_that_saved_the_weights_notices_the_step() -> None:
    weight, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([weight, frozen], lr=0.1)
    weight.grad = torch.ones(3)
    values, other = weight.square().sum(), frozen.square().sum()
    optimizer.step()
    assert was_compiled(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.backward()
    other.backward()  # it had no gradient then, so it did not change


def test_copies_and_pickles_keep_the_norm_and_go_on_alike() -> None:
    params = make_params()
    optimizer = optim.AdamW(params, lr=0.1, max_norm=0.7)
    steps(optimizer, params, 0, 2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.max_norm == 0.7
        theirs: list[Any] = other.param_groups[0]["params"]
        steps(other, theirs, 2, 4)
        twins = make_params()
        reference = optim.AdamW(twins, lr=0.1, max_norm=0.7)
        steps(reference, twins, 0, 4)
        assert max_difference([flattened(theirs)], [flattened(twins)]) < 1e-12
        assert was_compiled(other)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_norm_that_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0, or None"):
        optim.SGD(make_params(), max_norm=value)
    optimizer = optim.SGD(make_params(), max_norm=2.0)
    with pytest.raises(ConfigError, match="max_norm"):
        optimizer.max_norm = value
    assert optimizer.max_norm == 2.0
