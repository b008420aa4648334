"""Products in bfloat16 under autocast: the kernel is the definition that rounds, and states stay
float32.

A right kernel adds up in another order than the definition, which moves a number by some 1e-7 of
it. One in ten thousand lies so near the middle of two bfloat16s that it is then rounded to the
other one, 2^-8 of it away, and through a recurrence one such number moves all that come after. No
bound on whole passes tells that from a wrong kernel. So the kernel is held to what follows from its
own outputs: each step from the h that it gave for the step before, and each gradient from the
products' gradients that it gave for the step after, which inputs that go into the gates as they are
make visible. There every rounding is known, and 1e-5 is the bound of float32.

Whole passes are compared where they are short, under a bound that is measured: the definition in
float64 again with biases moved by 1e-5, more than float32 moves anything, so that what may be
rounded otherwise is, in half of the draws.

Without products in bfloat16 on this processor the same tests hold the kernel to the definition that
does not round.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection,
`G` gates.
"""

from collections.abc import Iterator
from typing import Any, cast

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
from throughtime.kernels.cells import CELLS, GRU, LSTM, RNN_RELU, RNN_TANH, Cell, Weights
from throughtime.kernels.library import bfloat16, library

pytestmark = needs_kernels
ROUNDS = bfloat16()
needs_products = pytest.mark.skipif(
    not ROUNDS, reason="the instruction set that runs has no products in bfloat16"
)
SIZES = [(1, 1, 1), (2, 3, 7), (17, 1, 50), (13, 8, 33), (13, 3, 1), (7, 2, 64)]
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda s: "T{}-B{}-H{}".format(*s))
SHORT = [(1, 1, 1, 1), (1, 8, 5, 7), (2, 3, 5, 7), (3, 1, 16, 5), (5, 3, 2, 1)]
PROJECTED = [((1, 1, 1, 2), 1), ((2, 1, 5, 7), 3), ((1, 8, 3, 33), 32)]
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
    pairs = [
        (a.detach().double(), b.detach().double()) for a, b in zip(actual, expected, strict=True)
    ]
    return torch.stack([(a - b).norm() / b.norm().clamp(min=1e-6) for a, b in pairs])


def moved(data: LayerCase, draw: int) -> LayerCase:
    """Every gate a little off, and nothing that is rounded as it was given."""
    torch.manual_seed(draw)
    biases = (5, 6)
    return LayerCase(
        data.cell,
        [
            t + 1e-5 * torch.randn_like(t) if k in biases and t is not None else t
            for k, t in enumerate(data.tensors)
        ],
        data.resets,
    )


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


def nearest(t: Tensor) -> Tensor:
    return t.bfloat16().to(t.dtype)


def same(t: Tensor) -> Tensor:
    return t


def seen_through(cell: Cell, steps: int, lanes: int, hidden: int, often: float) -> LayerCase:
    """A layer whose first input features go into the gates as they are: their gradient is what the
    products of the backward pass take.

    Of a GRU one thing more is multiplied, r times the gradient of n's inputs: with r = 1/2
    everywhere, it rounds as that one does.
    """
    x, h, c, ih, hh, b_ih, b_hh, _ = draw(cell, steps, lanes, 3, hidden).tensors
    rows, gone = len(cell.gates) * hidden, slice(0, hidden if cell is GRU else 0)
    assert x is not None
    for weight in (ih, hh, b_ih, b_hh):
        assert weight is not None
        weight[gone] = 0
    through = torch.cat([torch.eye(rows, dtype=x.dtype), cast(Tensor, ih)], 1)
    inputs = torch.cat([torch.zeros(steps, lanes, rows, dtype=x.dtype), x], 2)
    return LayerCase(
        cell,
        [inputs, h, c, through, hh, b_ih, b_hh, None],
        torch.rand(steps, lanes) < often if often else None,
    )


def step(cell: Cell, z: Tensor, back: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """What follows the products."""
    if cell is LSTM:
        i, f, g, o = (z + back).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if cell is GRU:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = z.chunk(3, 1), back.chunk(3, 1)
        keep = (x_z + h_z).sigmoid()
        return (1 - keep) * (x_n + (x_r + h_r).sigmoid() * h_n).tanh() + keep * h, c + 0 * h
    return ((z + back).tanh() if cell is RNN_TANH else (z + back).relu()), c + 0 * h


def astray(data: LayerCase, run: Run, rounded: Any) -> float:
    """The error of a kernel, given its own outputs and `rounded` factors of every product."""
    cell, leaves = data.cell, data.to(torch.float32).leaves()
    y, h_end, *rest = data.run(run, leaves)
    weigh = [torch.randn_like(t) for t in (y, h_end, *rest)]
    actual = torch.autograd.grad([y, h_end, *rest], [t for t in leaves if t is not None], weigh)
    x, h, c, ih, hh, b_ih, b_hh, _ = (None if t is None else t.double() for t in data.tensors)
    assert x is not None
    assert h is not None
    assert ih is not None
    assert hh is not None
    steps, rows = len(x), len(ih)
    keep = (
        torch.ones(*x.shape[:2], 1).double()
        if data.resets is None
        else (~data.resets).unsqueeze(2).double()
    )
    before = torch.cat([h.unsqueeze(0), y.detach().double()[:-1]]) * keep
    z, back = rounded(x) @ rounded(ih).T + b_ih, rounded(before) @ rounded(hh).T + b_hh
    cells, results, c = list[Tensor](), list[Tensor](), torch.zeros_like(h) if c is None else c
    for t in range(steps):
        cells.append(c * keep[t])
        h_next, c = step(cell, z[t], back[t], before[t], cells[t])
        results.append(h_next)
    worst = max_difference(
        [y, h_end, *rest], [torch.stack(results), results[-1], *([c] if rest else [])]
    )
    dx = actual[0].double()
    observed = dx[..., :rows]
    to_back = (
        torch.cat([observed[..., : rows // 3 * 2], observed[..., rows // 3 * 2 :] / 2], 2)
        if cell is GRU
        else observed
    )
    dh, dc = weigh[1].double(), weigh[2].double() if rest else torch.zeros_like(c)
    dz, dback = torch.empty_like(z), torch.empty_like(z)
    for t in reversed(range(steps)):
        inside = [v.detach().requires_grad_() for v in (z[t], back[t], before[t], cells[t])]
        pulled = torch.autograd.grad(
            step(cell, *inside), inside, (dh + weigh[0][t].double(), dc), materialize_grads=True
        )
        dz[t], dback[t] = pulled[0], pulled[1]
        dh, dc = (pulled[2] + to_back[t] @ rounded(hh)) * keep[t], pulled[3] * keep[t]
    half = (
        2.0**-8 * dz.abs() if rounded is nearest else 0 * dz
    )  # of the distance between two bfloat16s, at most
    worst = max(
        worst,
        float(((observed - dz).abs() - half).amax() / dz.abs().amax().clamp(min=1)),
        max_difference([rounded(observed)], [observed]),
    )
    flat = (
        observed.flatten(0, 1).T @ rounded(x).flatten(0, 1),
        to_back.flatten(0, 1).T @ rounded(before).flatten(0, 1),
    )
    expected = [
        observed @ rounded(ih),
        dh,
        *([dc] if rest else []),
        *flat,
        dz.sum((0, 1)),
        dback.sum((0, 1)),
    ]
    return max(worst, max_difference(actual, expected))


@every_cell
@sizes
@resets_or_none
def test_everything_follows_from_what_the_kernel_gave_before(
    cell: Cell, size: tuple[int, int, int], often: float
) -> None:
    """Outputs, states and all gradients, entry by entry."""
    data, rounded, other = (
        seen_through(cell, *size, often),
        *((nearest, same) if ROUNDS else (same, nearest)),
    )
    limit = tolerance(torch.float32)
    assert astray(data, fused, rounded) < limit
    assert sum(size) == 3 or astray(data, fused, other) > 10 * limit  # a single relu may be shut


def cut(t: Tensor) -> Tensor:
    """Towards zero instead of to the nearest."""
    return (t.detach().float().view(torch.int32) & -65536).view(torch.float32).to(t.dtype) + (
        t - t.detach()
    )


def truncating(cell: Cell, x: Tensor, *rest: Any) -> Any:
    return rounding(cell, cut(x), *rest)


def half_outputs(*given: Any) -> Any:
    y, ends = rounding(*given)
    return nearest(y), tuple(nearest(leaf) for leaf in ends)


@every_cell
@pytest.mark.parametrize("wrong", [reference.run, truncating, half_outputs])
def test_a_wrong_kernel_is_noticed(cell: Cell, wrong: Run) -> None:
    """What the tests above are worth, on every processor."""
    limit, data = tolerance(torch.float32), seen_through(cell, 13, 8, 33, 0.3)
    assert astray(data, rounding, nearest) < limit
    assert astray(data, wrong, nearest) > 10 * limit


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


@every_cell
def test_gradients_of_gradients_are_those_of_the_definition(cell: Cell) -> None:
    data = draw(cell, 4, 2, 3, 7, often=0.3).to(torch.float32)
    actual = list[list[Tensor]]()
    for run in (fused, expected_run, reference.run):
        leaves = [t for t in data.leaves() if t is not None]
        present = [k for k, t in enumerate(data.tensors) if t is not None]
        filled = dict(zip(present, leaves, strict=True))
        y, *_ = data.run(run, [filled.get(k) for k in range(len(data.tensors))])
        first = torch.autograd.grad((y * y).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(torch.stack([(g * g).sum() for g in first]).sum(), leaves)
        actual.append([*first, *second])
    assert max_difference(actual[0], actual[1]) < (
        0.02 if ROUNDS else 1e-5
    )  # what is loss_grads for the kernel's y may round otherwise here and there
    assert (max_difference(actual[2], actual[1]) > 1e-3) == ROUNDS


def test_derivatives_of_a_rounded_product_are_right() -> None:
    """Of any order and both ways, where rounding to the type that the numbers have changes none."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return reference._linear(x, w, None, torch.float64)

    x, w = (
        torch.randn(3, 2, 5, dtype=torch.float64).requires_grad_(),
        torch.randn(4, 5, dtype=torch.float64).requires_grad_(),
    )
    assert torch.autograd.gradcheck(product, (x, w), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(product, (x, w))


def test_a_rounding_lets_gradients_through_and_rounds_them_in_products() -> None:
    x, w, dy = (
        torch.randn(size, dtype=torch.float64).float().double() for size in ((3, 5), (4, 5), (3, 4))
    )
    x.requires_grad_()
    w.requires_grad_()
    y = reference._linear(x, w, None, torch.bfloat16)
    assert torch.equal(y, nearest(x) @ nearest(w).T)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    assert max_difference([dx, dw], [nearest(dy) @ nearest(w), nearest(dy).T @ nearest(x)]) < 1e-15
