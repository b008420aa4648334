"""Products in bfloat16 under autocast: the kernel is the definition that rounds, and states stay
float32.

A right kernel adds up in another order than the definition, which moves a number by some 1e-7 of
it. One in ten thousand lies so near the middle of two bfloat16s that it is then rounded to the
other one, 2^-8 of it away, and through a recurrence one such number moves all that come after. So
passes are short, and compared under a bound that is measured: the definition in float64 again with
biases moved by 1e-5, more than float32 moves anything, so that what may be rounded otherwise is, in
half of the draws.

Without products in bfloat16 on this processor the same tests hold the kernel to the definition that
does not round.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`G` gates.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from recurrences import (
    LayerCase,
    Run,
    every_cell,
    loss_grads,
    max_difference,
    needs_kernels,
    run_and_grad,
    tolerance,
)
from throughtime.kernels import dispatch, recurrent, reference
from throughtime.kernels.cells import CELLS, LSTM, RNN_RELU, Cell, Weights
from throughtime.kernels.library import bfloat16, library

pytestmark = needs_kernels
ROUNDS = bfloat16()
needs_products = pytest.mark.skipif(
    not ROUNDS, reason="the instruction set that runs has no products in bfloat16"
)
SHORT = [
    *((1, 1, 1, 1), (2, 3, 5, 7), (5, 3, 2, 1)),
    *((1, 9, 40, 64), (2, 17, 3, 50)),  # in whole vectors and tiles, and a rest
]
PROJECTED = [((2, 1, 5, 7), 3), ((1, 8, 3, 33), 32)]
resets_or_none = pytest.mark.parametrize("often", [0.0, 0.3], ids=["", "resets"])
DRAWS = 12


def ways() -> list[int]:
    """The methods of this processor (`tt_pairs` of throughtime.h), the active one last."""
    core = library()
    if core is None or not bfloat16():
        return [0]
    own: int = core.tt_bfloat16()
    actual = [way for way in (1, 2) if core.tt_use_bfloat16(way)]
    core.tt_use_bfloat16(own)
    return sorted(actual, key=lambda way: way == own)


@pytest.fixture(autouse=True, params=ways(), ids=lambda way: ("float32", "avx512", "amx")[way])
def by_each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each way, and at any number of lanes."""
    monkeypatch.setattr(dispatch, "ROUNDING_LANES", 1)
    core = library()
    assert core is not None
    own: int = core.tt_bfloat16()
    assert core.tt_use_bfloat16(request.param)
    yield
    core.tt_use_bfloat16(own)


def draw(cell: Cell, *size: int, **options: Any) -> LayerCase:
    """In float64, of numbers that float32 has: they round as those that the kernel is given."""
    return LayerCase.draw(cell, *size, **options).to(torch.float32).to(torch.float64)


def rounding(*given: Any) -> Any:
    return reference.run(*given, products=torch.bfloat16)


def expected_run(*given: Any) -> Any:
    """What the kernel is to be on this processor."""
    return rounding(*given) if ROUNDS else reference.run(*given)


def fused(*given: Any) -> Any:
    """Autocast is left before the backward pass, as torch recommends."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return recurrent.run(*given)


def distances(actual: list[Tensor], expected: list[Tensor]) -> Tensor:
    """Of each tensor, relative to its norm."""
    assert [t.shape for t in actual] == [t.shape for t in expected]
    pairs = [(a.double(), b.double()) for a, b in zip(actual, expected, strict=True)]
    return torch.stack([(a - b).norm() / b.norm().clamp(min=1e-6) for a, b in pairs]).detach()


def moved(data: LayerCase, draw: int) -> LayerCase:
    """Every gate a little off, and nothing that is rounded as it was given."""
    torch.manual_seed(draw)
    tensors = list(data.tensors)
    for k in (5, 6):
        bias = tensors[k]
        assert bias is not None
        tensors[k] = bias + 1e-5 * torch.randn_like(bias)
    return LayerCase(data.cell, tensors, data.resets)


def bound(data: LayerCase, run: Run) -> Tensor:
    """How far each tensor may be from the definition, `run`."""
    right = run_and_grad(data, run)
    draws = torch.stack([distances(run_and_grad(moved(data, k), run), right) for k in range(DRAWS)])
    return 4 * draws.amax(0) + tolerance(torch.float32)


@pytest.mark.parametrize(
    ("cell", "size", "projection"),
    [
        *((cell, size, 0) for cell in CELLS.values() for size in SHORT),
        *((LSTM, size, projection) for size, projection in PROJECTED),
    ],
    ids=str,
)
@resets_or_none
def test_short_passes_are_those_of_the_definition(
    cell: Cell, size: tuple[int, int, int, int], projection: int, often: float
) -> None:
    data = draw(cell, *size, projection=projection, often=often)
    right, allowed = run_and_grad(data, expected_run), bound(data, expected_run)
    actual = run_and_grad(data.to(torch.float32), fused)
    assert all(t.dtype is torch.float32 for t in actual)
    assert (distances(actual, right) <= allowed).all()
    other = run_and_grad(data, reference.run if ROUNDS else rounding)
    assert (distances(other, right) / allowed).amax() > 3


def edges() -> Tensor:
    """Numbers in the middle of two bfloat16s, and right beside it, of both signs."""
    middle = (1 + (2 * torch.arange(128) + 1) * 2.0**-8).float()
    near = torch.cat(
        [middle, middle.nextafter(middle.new_tensor(0)), middle.nextafter(middle.new_tensor(9))]
    )
    return torch.cat([near, -near])


def one_unit(x: Tensor, w_ih: Tensor, h: Tensor, w_hh: Tensor, b: float = 0.0) -> Tensor:
    """A relu of a single unit, `(B,)`: w_ih x + w_hh h + b where that is positive."""
    weights = Weights(w_ih.view(1, -1), w_hh.view(1, 1), torch.full((1,), b), torch.zeros(1), None)
    return fused(RNN_RELU, x.view(1, len(x), -1), (h.view(-1, 1),), weights)[0].flatten()


@needs_products
def test_rounding_is_to_nearest_and_ties_to_even() -> None:
    """The inputs, the state and both weights, one at a time, against torch's own rounding."""
    for x in edges().split(1):
        one, none = torch.ones(1), torch.zeros(1)
        expected = x.bfloat16().float().abs()
        for given in (
            (x.abs(), one, none, none),
            (one, x.abs(), none, none),
            (none, none, x, x.sign()),
            (none, none, x.sign(), x),
        ):
            assert torch.equal(one_unit(*given), expected)


@needs_products
def test_sums_and_biases_are_float32() -> None:
    """A sum in bfloat16 would lose the second term, a rounded bias the third."""
    x, w = torch.tensor([[1.0, 2.0**-12]]), torch.ones(2)
    assert (
        one_unit(x, w, torch.zeros(1), torch.zeros(1), 2.0**-20).item() == 1 + 2.0**-12 + 2.0**-20
    )


@every_cell
def test_backward_takes_the_products_of_the_forward_pass(cell: Cell) -> None:
    """Wherever it runs: outside autocast, inside, and the other way round."""
    data = draw(cell, 7, 3, 5, 33).to(torch.float32)
    actual = list[list[Tensor]]()
    for inside in (False, True):
        leaves = data.leaves()
        results = data.run(fused, leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            actual.append(loss_grads(results, leaves))
    assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))
    plain, leaves = run_and_grad(data, recurrent.run), data.leaves()
    results = data.run(recurrent.run, leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(
            torch.equal(a, b)
            for a, b in zip([*results, *loss_grads(results, leaves)], plain, strict=True)
        )
    assert (max_difference(actual[0], plain[len(results) :]) > 1e-4) == ROUNDS
