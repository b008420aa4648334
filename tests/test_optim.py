"""One step equals torch's: weights, state, norm, on every instruction set and thread count."""

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
    make_params,
    needs_core,
    set_grads,
    state_vectors,
    steps,
    was_compiled,
)
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
