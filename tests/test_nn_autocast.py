"""Layers of tt.nn under autocast: fused, products in bfloat16 where the processor has them, states
in float32 for as long as they live.

Where products are bfloat16, a number that lies between two of them may be rounded to the other one
(tests/test_bfloat16.py), so whole layers are compared to 2 %: what a layer does with products is
held to float32 there, and here to the 1e-5 of float32 where there are none.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

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
    max_difference,
    needs_kernels,
    random_state,
)
from throughtime.kernels import dispatch
from throughtime.kernels.library import bfloat16

pytestmark = needs_kernels
ROUNDS = bfloat16()
CLOSE = 0.02 if ROUNDS else 1e-5
LANES = dispatch.ROUNDING_LANES


@pytest.fixture(autouse=True)
def at_any_number_of_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with many, but that nets are small."""
    monkeypatch.setattr(dispatch, "ROUNDING_LANES", 1)
    dispatch.static_backend.cache_clear()
    yield
    dispatch.static_backend.cache_clear()


def lower(*, on: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=on)


def under(
    layer: nn.Module, x: Tensor, hx: Any = None, resets: Tensor | None = None
) -> list[Tensor]:
    """Outputs, state and gradients: forward under autocast, backward outside, dropout as always."""
    torch.manual_seed(11)

    def play(*given: Any) -> Any:
        with lower():
            return layer(*given)

    return call_and_grad(play, x, hx, resets, layer.parameters())


@every_layer
def test_outputs_and_states_are_float32_whatever_comes_in(name: str) -> None:
    """An autocast layer before it gives bfloat16; gradients have the type of what they are of."""
    layer, x = LAYERS[name][1](4, 6, num_layers=2), torch.randn(5, 3, 4).bfloat16()
    leaves = [leaf.bfloat16() for leaf in leaves_of(random_state(layer, 3))]
    state = tuple(leaves) if len(leaves) == 2 else leaves[0]
    with lower():
        assert tt.nn.backend(layer, x, state).name == "fused"
    results, count = under(layer, x, state), 1 + len(leaves)
    assert {t.dtype for t in results[:count]} == {torch.float32}
    assert {t.dtype for t in results[count : 2 * count]} == {torch.bfloat16}
    assert {t.dtype for t in results[2 * count :]} == {torch.float32}
    expected = under(layer, x.float(), tt.state.map_leaves(Tensor.float, state))
    assert all(map(torch.equal, results[:count], expected[:count]))


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
def test_transforms_of_torch_func_see_the_same_products(name: str) -> None:
    layer, x, resets = LAYERS[name][1](4, 6), torch.randn(7, 2, 4), torch.rand(7, 2) < 0.2
    params = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], *, on: bool = True) -> Tensor:
        with lower(on=on):
            y, _ = torch.func.functional_call(layer, weights, (x, None, resets))
        return y.square().mean()

    given, results = {n: p.clone().requires_grad_() for n, p in params.items()}, list[Any]()
    for on, close in ((True, CLOSE), (False, 1e-5)):
        alone = torch.autograd.grad(loss(given, on=on), list(given.values()))
        results.append(list(torch.func.grad(loss)(params, on=on).values()))
        assert max_difference(results[-1], alone) < close
    assert (max_difference(*results) > 1e-5) == ROUNDS


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
