"""The compiled layers are the definition, the definition is torch.nn: outputs, states, gradients,
resets, whatever the sizes.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import throughtime as tt
from recurrences import (
    LayerCase,
    both_types,
    every_cell,
    loss_grads,
    max_difference,
    needs_kernels,
    run_and_grad,
    split,
    tolerance,
)
from throughtime.kernels import recurrent, reference
from throughtime.kernels.cells import GRU, LSTM, Cell, Weights

pytestmark = needs_kernels


@every_cell
@given(
    steps=st.integers(1, 23),
    lanes=st.integers(1, 9),
    inputs=st.integers(1, 40),
    hidden=st.integers(1, 70),
    bias=st.booleans(),
    projected=st.booleans(),
    often=st.sampled_from([0.0, 0.1, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_sizes_are_the_definition(
    cell: Cell,
    steps: int,
    lanes: int,
    inputs: int,
    hidden: int,
    bias: bool,
    projected: bool,
    often: float,
    dtype: torch.dtype,
) -> None:
    projection = hidden // 2 if projected and cell is LSTM else 0
    data = LayerCase.draw(
        cell, steps, lanes, inputs, hidden, bias=bias, projection=projection, often=often
    )
    actual, expected = (
        run_and_grad(data.to(dtype), recurrent.run),
        run_and_grad(data, reference.run),
    )
    assert max_difference(actual, expected) < tolerance(dtype)


@every_cell
def test_gradients_of_gradients_are_right(cell: Cell) -> None:
    data = LayerCase.draw(cell, 3, 2, 2, 3, often=0.4)
    leaves = data.leaves()
    present = [k for k, t in enumerate(leaves) if t is not None]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        filled = list[Tensor | None](leaves)
        for k, t in zip(present, tensors, strict=True):
            filled[k] = t
        return tuple(data.run(recurrent.run, filled))

    inputs = [t for t in leaves if t is not None]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def every_level() -> Iterator[bytes]:
    """Each instruction set of the library and this processor in turn, the first one twice."""
    core = recurrent.core()
    widest, ran = core.tt_level(), set[bytes]()
    try:
        for level in (b"base", b"v2", b"v3", b"v4", b"v2"):
            if core.tt_use(level):
                ran.add(core.tt_level())
                yield level
    finally:
        core.tt_use(widest)
    assert widest in ran


@every_cell
def test_reset_forgets_what_is_not_a_number_and_passes_no_credit(cell: Cell) -> None:
    x, states, weights = split(LayerCase.draw(cell, 9, 3, 4, 6).leaves())
    resets = torch.zeros(9, 3, dtype=torch.bool)
    resets[0, 1] = resets[4, 2] = True
    poison = torch.tensor([[1.0], [float("nan")], [1.0]], dtype=torch.float64)
    entering = tuple((leaf.detach() * poison).requires_grad_() for leaf in states)
    y, ends = recurrent.run(cell, x, entering, weights, resets)
    assert all(t.isfinite().all() for t in (y, *ends))
    loss = y[4:, 2].square().sum() + y[:, 1].square().sum()
    dx, dh = torch.autograd.grad(loss, [x, entering[0]])
    assert dx[:4, 2].abs().max() == 0 < dx[4, 2].abs().max()
    assert dh[[1, 2]].abs().max() == 0


@every_cell
def test_strided_and_unaligned_tensors_are_read_as_they_are(cell: Cell) -> None:
    data = LayerCase.draw(cell, 11, 3, 5, 7, often=0.2)
    expected = run_and_grad(data, reference.run)

    def odd(tensor: Tensor | None) -> Tensor | None:
        """The same numbers at an address that no vector starts at."""
        if tensor is None:
            return None
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
        return room.copy_(tensor.flatten()).view_as(tensor).requires_grad_()

    def strided(tensor: Tensor | None) -> Tensor | None:
        """The same numbers with gaps between them, last dimension first."""
        if tensor is None:
            return None
        room = torch.full((*reversed(tensor.shape), 2), float("nan"), dtype=tensor.dtype)[..., 0]
        return room.permute(*reversed(range(tensor.dim()))).copy_(tensor).requires_grad_()

    for changed in (odd, strided):
        leaves = [changed(t) for t in data.tensors]
        results = data.run(recurrent.run, leaves)
        assert max_difference([*results, *loss_grads(results, leaves)], expected) < 1e-12
    assert data.resets is not None
    transposed = LayerCase(cell, data.tensors, data.resets.T.contiguous().T)
    assert max_difference(run_and_grad(transposed, recurrent.run), expected) < 1e-12


@every_cell
def test_outputs_may_be_changed_in_place(cell: Cell) -> None:
    data = LayerCase.draw(cell, 5, 2, 3, 4)
    actual = list[list[Tensor]]()
    for in_place in (True, False):
        leaves = data.leaves()
        y, *ends = data.run(recurrent.run, leaves)
        y = y.mul_(2).relu_() if in_place else (y * 2).relu()
        loss = y.sum() + sum(end.square().sum() for end in ends)
        actual.append(list(torch.autograd.grad(loss, [t for t in leaves if t is not None])))
    assert max_difference(*actual) < 1e-12


@pytest.mark.covering
@every_cell
@pytest.mark.parametrize("kind", ["f64", "f32", "autocast"])
def test_bits_do_not_depend_on_the_number_of_threads(cell: Cell, kind: str) -> None:
    # enough work for two, and for two with products in bfloat16
    for size in ((64, 16, 64, 128), (23, 19, 100, 310)):
        data = LayerCase.draw(cell, *size, often=0.1)
        actual = list[list[Tensor]]()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    data = data if kind == "f64" else data.to(torch.float32)
                    actual.append(run_and_grad(data, recurrent.run))
            finally:
                torch.set_num_threads(1)
        assert all(torch.equal(a, b) for a, b in zip(*actual, strict=True))


@every_cell
def test_rows_of_a_jacobian_come_in_one_pass(cell: Cell) -> None:
    """As `torch.func.jacrev` asks for them."""
    data = LayerCase.draw(cell, 5, 2, 3, 4, often=0.3)
    leaves = data.leaves()
    y, *_ = data.run(recurrent.run, leaves)
    rows, asked = torch.randn(6, *y.shape, dtype=y.dtype), [t for t in leaves if t is not None]
    options: dict[str, Any] = {"retain_graph": True, "materialize_grads": True}
    together = torch.autograd.grad(y, asked, rows, is_grads_batched=True, **options)
    for k, row in enumerate(rows):
        alone = torch.autograd.grad(y, asked, row, **options)
        assert max_difference([t[k] for t in together], alone) < 1e-12


@pytest.mark.parametrize("cell", [LSTM, GRU], ids=str)
@both_types
def test_saturated_gates_keep_the_state_to_the_bit(cell: Cell, dtype: torch.dtype) -> None:
    """A gate that is off by one unit in the last place forgets a long memory step by step."""
    hidden = 33
    x = torch.randn(500, 2, 3, dtype=dtype)
    zeros = torch.zeros(len(cell.gates) * hidden, hidden, dtype=dtype)
    bias = torch.zeros(len(cell.gates), hidden)
    bias[cell.gates.index("f" if cell is LSTM else "z")] = 500.0
    start = [torch.randn(2, hidden, dtype=dtype) for _ in cell.states]
    weights = Weights(zeros[:, :3], zeros, bias.flatten().to(dtype), zeros[:, 0], None)
    for _ in every_level():
        _, ends = recurrent.run(cell, x, tuple(start), weights)
        assert torch.equal(ends[-1], start[-1])


@every_cell
@both_types
def test_every_instruction_set_computes_the_same_in_one_process(
    cell: Cell, dtype: torch.dtype
) -> None:
    """Saved values are in whole vectors, whose width depends on the level."""
    data = LayerCase.draw(cell, 5, 2, 3, 33)
    expected = run_and_grad(data, reference.run)
    for _ in every_level():
        actual = run_and_grad(data.to(dtype), recurrent.run)
        assert max_difference(actual, expected) < tolerance(dtype)


def test_a_tensor_that_is_two_of_the_states_has_the_gradient_of_each_once() -> None:
    """As torch's layer, in a graph of the gradient too."""
    torch.manual_seed(0)
    ours, theirs = tt.nn.LSTM(3, 4).double(), torch.nn.LSTM(3, 4).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    state = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    grads: list[list[Tensor]] = []
    for layer in (ours, theirs):
        y = layer(x, (state, state))[0]
        (first,) = torch.autograd.grad(y.square().sum(), state, create_graph=True)
        grads.append([first, *torch.autograd.grad(first.square().sum(), state)])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
