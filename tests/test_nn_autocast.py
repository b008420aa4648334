"""Layers of tt.nn under autocast: fused, products in bfloat16 where the processor has them, states
in float32 for as long as they live.

Where products are bfloat16, a number that lies between two of them may be rounded to the other one
(tests/test_bfloat16.py), so whole layers are compared to 2 %: what a layer does with products is
held to float32 there, and here to the 1e-5 of float32 where there are none.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import throughtime as tt
from recurrences import (
    LAYERS,
    call_and_grad,
    every_layer,
    leaves_of,
    loss_grads,
    max_difference,
    needs_kernels,
    random_state,
)
from throughtime.kernels import dispatch, library, recurrent, reference
from throughtime.kernels.library import bfloat16

pytestmark = needs_kernels
ROUNDS = bfloat16()
CLOSE = 0.02 if ROUNDS else 1e-5
OPTIONS: dict[str, dict[str, Any]] = {
    "batch-first": {"batch_first": True, "num_layers": 2, "dropout": 0.4},
    "both-ways": {"bidirectional": True, "bias": False},
}
LANES = dispatch.ROUNDING_LANES


@pytest.fixture(autouse=True)
def at_any_number_of_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with many, but that nets are small."""
    monkeypatch.setattr(dispatch, "ROUNDING_LANES", 1)
    dispatch.static_backend.cache_clear()
    yield
    dispatch.static_backend.cache_clear()


every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def lower(*, dtype: torch.dtype = torch.bfloat16, on: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=on)


def under(
    layer: nn.Module, x: Tensor, hx: Any = None, resets: Tensor | None = None
) -> list[Tensor]:
    """Outputs, state and gradients: forward under autocast, backward outside, dropout as always."""
    x, states = (
        x.clone().requires_grad_(),
        ([] if hx is None else [leaf.clone().requires_grad_() for leaf in leaves_of(hx)]),
    )
    entering = None if hx is None else states[0] if len(states) == 1 else tuple(states)
    torch.manual_seed(11)
    with lower():
        y, end = layer(x, entering) if resets is None else layer(x, entering, resets)
    results = [y, *leaves_of(end)]
    return [*results, *loss_grads(results, [x, *states, *layer.parameters()])]


def defined(*given: Any) -> Any:
    """The definition of what runs under autocast on this processor."""
    return reference.run(*given, products=torch.bfloat16 if ROUNDS else torch.float32)


@every_layer
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_outputs_and_states_are_float32_whatever_comes_in(name: str, kind: torch.dtype) -> None:
    """An autocast layer before it gives bfloat16; gradients have the type of what they are of."""
    layer, x = LAYERS[name][1](4, 6, num_layers=2), torch.randn(5, 3, 4).to(kind)
    leaves = [leaf.to(kind) for leaf in leaves_of(random_state(layer, 3))]
    state, wide = (
        tuple(some) if len(some) == 2 else some[0]
        for some in (leaves, [leaf.float() for leaf in leaves])
    )
    with lower():
        assert tt.nn.backend(layer, x, state).name == "fused"
    results, count = under(layer, x, state), 1 + len(leaves)
    assert {t.dtype for t in results[:count]} == {torch.float32}
    assert {t.dtype for t in results[count : 2 * count]} == {kind}
    assert {t.dtype for t in results[2 * count :]} == {torch.float32}
    expected = under(layer, x.float(), wide)[:count]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=False))


@every_layer
def test_float64_and_calls_outside_are_left_alone(name: str) -> None:
    layer, x = LAYERS[name][1](4, 33).double(), torch.randn(9, 3, 4, dtype=torch.float64)
    exact = call_and_grad(layer, x)
    with lower():
        assert str(tt.nn.backend(layer, x)) == f"fused ({library.level()}), float64"
        inside = call_and_grad(layer, x)
    assert all(map(torch.equal, inside, exact))
    layer, x = layer.float(), x.float()
    inside, outside = under(layer, x), call_and_grad(layer, x)
    assert max_difference(outside, exact) < 1e-5
    assert (max_difference(inside, outside) > 1e-4) == ROUNDS


@pytest.mark.covering
@every_layer
@every_option
@pytest.mark.parametrize("often", [0.0, 0.3], ids=["", "resets"])
def test_every_option_is_equals_the_reference(
    name: str, options: dict[str, Any], often: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS[name][1](4, 6, **options)
    for size, lanes in (((13, 3), 3), ((13,), None)):
        transposed = layer.batch_first and lanes is not None
        x, hx = (
            torch.randn(*(reversed(size) if transposed else size), 4),
            random_state(layer, lanes),
        )
        resets = torch.rand(x.shape[:-1]) < often if often else None
        actual = under(layer, x, hx, resets)
        with monkeypatch.context() as patch:
            patch.setattr(recurrent, "run", defined)
            expected = under(layer, x, hx, resets)
        assert max_difference(actual, expected) < CLOSE
        if often:
            assert max_difference(actual, under(layer, x, hx)) > 0.05  # the mutant: no resets


def test_backend_names_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, level = tt.nn.GRU(4, 6), torch.randn(5, 2, 4), library.level()
    rounds, rest = (
        f"fused ({level}), bfloat16 products, float32 states",
        "with this instruction set",
    )
    for present, words in (
        (True, rounds),
        (False, f"fused ({level}), float32: no products in bfloat16 {rest}"),
    ):
        dispatch.static_backend.cache_clear()
        monkeypatch.setattr(dispatch, "bfloat16", lambda present=present: present)
        with lower():
            assert str(tt.nn.backend(layer, x)) == str(tt.nn.backend(layer, x.bfloat16())) == words
    dispatch.static_backend.cache_clear()
    with lower(dtype=torch.float16):
        assert (
            str(tt.nn.backend(layer, x))
            == f"fused ({level}), float32: no products in float16 {rest}"
        )
    with lower():
        assert (
            "whose weights are float32"
            in tt.nn.backend(copy.deepcopy(layer).bfloat16(), x.bfloat16()).reason
        )
        assert tt.nn.backend(layer, x.double()).name == "torch.nn"
        assert tt.nn.backend(layer, x, torch.zeros(1, 2, 6, dtype=torch.float64)).name == "torch.nn"


@pytest.mark.skipif(not ROUNDS, reason="the instruction set that runs has no products in bfloat16")
@every_layer
def test_few_lanes_take_the_products_of_float32_which_are_faster_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ROUNDING_LANES", LANES)
    layer, x = LAYERS[name][1](4, 6), torch.randn(5, LANES, 4)
    few, plain = x[:, : LANES - 1], [t[..., : LANES - 1, :] for t in call_and_grad(layer, x)[:1]]
    with lower():
        assert "float32: products in bfloat16 are faster from 8 lanes on" in str(
            tt.nn.backend(layer, few)
        )
        assert "bfloat16 products" in str(tt.nn.backend(layer, x))
        assert max_difference(call_and_grad(layer, few)[:1], plain) < 1e-6
    y = call_and_grad(layer, x)[:1]
    with lower():
        assert max_difference(call_and_grad(layer, x)[:1], y) > 1e-4


@every_layer
def test_under_float16_products_are_float32(name: str) -> None:
    """As wide as float32 and as near; torch.nn's LSTM refuses float16 where oneDNN has none."""
    layer, x = LAYERS[name][1](4, 6), torch.randn(5, 3, 4)
    plain = call_and_grad(layer, x)
    with lower(dtype=torch.float16):
        actual = call_and_grad(layer, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, plain, strict=True))


@every_layer
def test_transforms_of_torch_func_see_the_same_products(name: str) -> None:
    layer = LAYERS[name][1](4, 6)
    x, resets = torch.randn(3, 7, 2, 4), torch.rand(7, 2) < 0.2
    params = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, *, on: bool = True) -> Tensor:
        with lower(on=on):
            y, _ = torch.func.functional_call(layer, weights, (x, None, resets))
        return y.square().mean()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for k in range(3):
        live = {n: p.clone().requires_grad_() for n, p in params.items()}
        alone = torch.autograd.grad(loss(live, x[k]), list(live.values()))
        assert max_difference([g[k] for g in each.values()], alone) < CLOSE
    exact = torch.func.grad(loss)(params, x[0], on=False)
    gap = max_difference([g[0] for g in each.values()], list(exact.values()))
    assert (gap > 1e-5) == ROUNDS


def test_packed_input_comes_back_float32() -> None:
    layer, x, lengths = tt.nn.GRU(4, 6), torch.randn(5, 3, 4), torch.tensor([5, 3, 2])
    plain, _ = layer(pack_padded_sequence(x, lengths))
    lowered = pack_padded_sequence(x.bfloat16(), lengths)
    with lower():
        theirs, _ = nn.GRU(4, 6)(lowered)
        y, h = layer(lowered)
    assert theirs.data.dtype is torch.bfloat16
    assert y.data.dtype is h.dtype is torch.float32
    assert torch.equal(y.batch_sizes, plain.batch_sizes)
    assert max_difference([y.data], [plain.data]) < 0.02
