"""The compiled layers are the definition, the definition is torch.nn: outputs, states, gradients,
resets, whatever the sizes.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection.
"""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recurrences import (
    Given,
    apart,
    blamed,
    both_types,
    every_kind,
    exact,
    needs_kernels,
    played,
    twins,
)
from throughtime.kernels import recurrent, reference
from throughtime.kernels.layer import Kind, Weights

pytestmark = needs_kernels
Some = tuple[Tensor | None, ...]  # gradients where allow_unused
SIZES = [
    (1, 1, 1, 1),
    (2, 3, 5, 7),
    (17, 1, 16, 50),
    (13, 8, 3, 33),
    (5, 3, 70, 50),
    (11, 2, 1, 64),
    (3, 13, 9, 20),
]
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda s: "T{}-B{}-D{}-H{}".format(*s))


@every_kind
@both_types
@sizes
@pytest.mark.parametrize("often", [0.0, 0.3], ids=["", "resets"])
def test_kernel_is_the_definition(
    kind: Kind, dtype: torch.dtype, size: tuple[int, int, int, int], often: float
) -> None:
    data = Given.draw(kind, *size, often=often)
    assert apart(played(data.to(dtype), recurrent.run), played(data, reference.run)) < exact(dtype)


@every_kind
def test_a_wrong_definition_is_seen(kind: Kind) -> None:
    """The mutants: biases of one gate forgotten, a lane whose state is its neighbour's, resets that come a step late."""
    data = Given.draw(kind, 13, 3, 5, 7, often=0.3)
    right = played(data, reference.run)

    def late(
        kind: Kind, x: Tensor, h: Tensor, c: Tensor | None, weights: Weights, resets: Tensor
    ) -> Any:
        return reference.run(kind, x, h, c, weights, resets.roll(1, 0))

    def mixed(
        kind: Kind, x: Tensor, h: Tensor, c: Tensor | None, weights: Weights, resets: Tensor
    ) -> Any:
        return reference.run(kind, x, h.roll(1, 0), c, weights, resets)

    def unbiased(
        kind: Kind, x: Tensor, h: Tensor, c: Tensor | None, weights: Weights, resets: Tensor
    ) -> Any:
        assert weights.b_hh is not None
        return reference.run(
            kind,
            x,
            h,
            c,
            weights._replace(b_hh=weights.b_hh * (torch.arange(len(weights.b_hh)) >= 7)),
            resets,
        )

    data_kept = Given(
        kind,
        data.tensors,
        data.resets & (torch.arange(13).unsqueeze(1) > 0) if data.resets is not None else None,
    )
    assert apart(played(data, late), right) > 1e-3
    assert apart(played(data_kept, mixed), played(data_kept, reference.run)) > 1e-3
    assert apart(played(data, unbiased), right) > 1e-3


@every_kind
def test_credit_of_the_last_step_reaches_the_first(kind: Kind) -> None:
    """What makes the other tests bite: a gradient over 50 steps is not small."""
    data = Given.draw(kind, 51, 1, 3, 8)
    leaves = data.leaves()
    with torch.no_grad():
        for small in (
            (0, 1, 5, 6) if kind.startswith("rnn") else ()
        ):  # so that tanh is not saturated; gates remember by themselves
            cast(Tensor, leaves[small]).mul_(0.1)
    y, *_ = data.run(recurrent.run, leaves)
    assert leaves[0] is not None
    (dx,) = torch.autograd.grad(y[-1].square().sum(), leaves[0])
    assert dx[0].abs().max() > 1e-4


@both_types
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("often", [0.0, 0.3], ids=["", "resets"])
def test_projection_is_the_definition(dtype: torch.dtype, bias: bool, often: float) -> None:
    for size, projection in (((1, 1, 1, 2), 1), ((13, 3, 5, 33), 7), ((7, 8, 3, 50), 49)):
        data = Given.draw("lstm", *size, bias=bias, projection=projection, often=often)
        assert apart(played(data.to(dtype), recurrent.run), played(data, reference.run)) < exact(
            dtype
        )


@every_kind
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
    kind: Kind,
    steps: int,
    lanes: int,
    inputs: int,
    hidden: int,
    bias: bool,
    projected: bool,
    often: float,
    dtype: torch.dtype,
) -> None:
    projection = hidden // 2 if projected and kind == "lstm" else 0
    data = Given.draw(
        kind, steps, lanes, inputs, hidden, bias=bias, projection=projection, often=often
    )
    assert apart(played(data.to(dtype), recurrent.run), played(data, reference.run)) < exact(dtype)


@every_kind
def test_definition_is_torch_nn(kind: Kind) -> None:
    """Without resets, torch itself says what is right."""
    data = Given.draw(kind, 13, 3, 5, 7)
    name = {"lstm": "LSTM", "gru": "GRU"}.get(kind, "RNN")
    plain, _ = twins(
        name, 5, 7, dtype=torch.float64, **({"nonlinearity": kind[4:]} if name == "RNN" else {})
    )
    leaves = data.leaves()
    x, h, c, *weights = leaves
    assert x is not None
    assert h is not None
    named = {
        n: w
        for n, w in zip([n for n, _ in plain.named_parameters()], weights, strict=False)
        if w is not None
    }
    entering = h.unsqueeze(0) if c is None else (h.unsqueeze(0), c.unsqueeze(0))
    y, state = torch.func.functional_call(plain, named, (x, entering))
    ends = [state] if isinstance(state, Tensor) else list(state)
    made = [y, *(end.squeeze(0) for end in ends)]
    assert apart([*made, *blamed(made, leaves)], played(data, reference.run)) < 1e-12


@every_kind
def test_gradients_of_gradients_are_right(kind: Kind) -> None:
    data = Given.draw(kind, 3, 2, 2, 3, often=0.4)
    leaves = data.leaves()
    there = [k for k, t in enumerate(leaves) if t is not None]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        filled = list[Tensor | None](leaves)
        for k, t in zip(there, tensors, strict=True):
            filled[k] = t
        return tuple(data.run(recurrent.run, filled))

    inputs = [t for t in leaves if t is not None]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@every_kind
def test_reset_forgets_what_is_not_a_number_and_passes_no_credit(kind: Kind) -> None:
    data = Given.draw(kind, 9, 3, 4, 6)
    resets = torch.zeros(9, 3, dtype=torch.bool)
    resets[0, 1] = resets[4, 2] = True
    x, h, c, *weights = data.leaves()
    assert x is not None
    assert h is not None
    poison = torch.tensor([1.0, float("nan"), 1.0], dtype=torch.float64).unsqueeze(1)
    entering = (
        (h.detach() * poison).requires_grad_(),
        (None if c is None else (c.detach() * poison).requires_grad_()),
    )
    y, *ends = (
        t for t in recurrent.run(kind, x, *entering, Weights(*weights), resets) if t is not None
    )  # pyright: ignore[reportArgumentType]
    assert y.isfinite().all()
    assert all(end.isfinite().all() for end in ends)
    dx, dh = torch.autograd.grad(
        y[4:, 2].square().sum() + y[:, 1].square().sum(), [x, entering[0]], allow_unused=True
    )
    assert dx[:4, 2].abs().max() == 0 < dx[4, 2].abs().max()
    assert dh[[1, 2]].abs().max() == 0


@every_kind
@both_types
def test_gates_that_are_wide_open_or_shut_give_numbers(kind: Kind, dtype: torch.dtype) -> None:
    data = Given.draw(kind, 7, 3, 5, 9).to(dtype)
    x = data.tensors[0]
    assert x is not None
    x.mul_(1e4)
    if kind == "rnn_relu":
        assert apart(
            played(data, recurrent.run), played(data.to(torch.float64), reference.run)
        ) < 10 * exact(dtype)
    assert all(t.isfinite().all() for t in played(data, recurrent.run))


@every_kind
def test_strided_and_unaligned_tensors_are_read_as_they_are(kind: Kind) -> None:
    data = Given.draw(kind, 11, 3, 5, 7, often=0.2)
    expected = played(data, reference.run)

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
        made = data.run(recurrent.run, leaves)
        assert apart([*made, *blamed(made, leaves)], expected) < 1e-12
    turned = Given(
        kind, data.tensors, data.resets.T.contiguous().T if data.resets is not None else None
    )
    assert apart(played(turned, recurrent.run), expected) < 1e-12


@every_kind
def test_graph_can_be_used_twice_and_for_a_part(kind: Kind) -> None:
    data = Given.draw(kind, 9, 2, 4, 6, often=0.2)
    leaves = data.leaves()
    made, x = data.run(recurrent.run, leaves), leaves[0]
    assert x is not None
    once, again = (
        torch.autograd.grad(made[0].square().sum(), x, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(once, again)
    expected = data.run(reference.run, leaves)
    assert (
        apart([once], torch.autograd.grad(expected[0].square().sum(), x, retain_graph=True)) < 1e-12
    )
    for part in range(len(made)):  # a loss on one of the results, the others without a gradient
        alone = [
            torch.autograd.grad(m[part].square().sum(), cast(Tensor, leaves[4]), retain_graph=True)[
                0
            ]
            for m in (made, expected)
        ]
        assert apart(alone[:1], alone[1:]) < 1e-12


@every_kind
def test_weights_alone_or_inputs_alone_may_need_a_gradient(kind: Kind) -> None:
    data = Given.draw(kind, 9, 2, 4, 6)
    for wanted in range(len(data.tensors)):
        if data.tensors[wanted] is None:
            continue
        found = list[list[Tensor]]()
        for run in (recurrent.run, reference.run):
            leaves = [
                None if t is None else t.clone().requires_grad_(k == wanted)
                for k, t in enumerate(data.tensors)
            ]
            made = data.run(run, leaves)
            found.append(blamed(made, [leaves[wanted]]))
        assert apart(*found) < 1e-12


@every_kind
def test_outputs_changed_in_place_are_noticed(kind: Kind) -> None:
    data = Given.draw(kind, 5, 2, 3, 4)
    leaves = data.leaves()
    y, *_ = data.run(recurrent.run, leaves)
    loss = y.sum()
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_kind
@both_types
def test_bits_do_not_depend_on_the_number_of_threads(kind: Kind, dtype: torch.dtype) -> None:
    for size in (
        (7, 9, 16, 50),
        (64, 16, 64, 128),
        (33, 1, 40, 200),
    ):  # small, and enough work for two
        data = Given.draw(kind, *size, often=0.1).to(dtype)
        found = list[list[Tensor]]()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            try:
                found.append(played(data, recurrent.run))
            finally:
                torch.set_num_threads(1)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@every_kind
def test_rows_of_a_jacobian_come_in_one_pass(kind: Kind) -> None:
    """As `tt.RTRL` asks for them."""
    data = Given.draw(kind, 5, 2, 3, 4, often=0.3)
    leaves = data.leaves()
    y, *_ = data.run(recurrent.run, leaves)
    rows, asked = torch.randn(6, *y.shape, dtype=y.dtype), [t for t in leaves if t is not None]
    together = torch.autograd.grad(
        y, asked, rows, is_grads_batched=True, retain_graph=True, allow_unused=True
    )
    for k, row in enumerate(rows):
        alone = torch.autograd.grad(y, asked, row, retain_graph=True, allow_unused=True)
        pairs = [
            (t[k], a)
            for t, a in zip(cast(Some, together), cast(Some, alone), strict=True)
            if a is not None and t is not None
        ]
        assert len(pairs) >= 5
        assert apart([t for t, _ in pairs], [a for _, a in pairs]) < 1e-12


@every_kind
def test_without_a_graph_the_same_numbers_come(kind: Kind) -> None:
    data = Given.draw(kind, 9, 2, 4, 6, often=0.2)
    leaves = data.leaves()
    expected = data.run(recurrent.run, leaves)
    with torch.no_grad():
        quiet = data.run(recurrent.run, leaves)
    with torch.inference_mode():
        inferred = data.run(recurrent.run, leaves)
    for found in (quiet, inferred):
        assert all(
            torch.equal(a, b) and not a.requires_grad for a, b in zip(found, expected, strict=True)
        )


@every_kind
def test_checkpointed_call_has_the_same_gradients(kind: Kind) -> None:
    data = Given.draw(kind, 9, 2, 4, 6, often=0.2)
    leaves = data.leaves()

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(data.run(recurrent.run, tensors))

    made = checkpoint(call, *leaves, use_reentrant=False)
    assert isinstance(made, tuple)
    assert apart([*made, *blamed(made, leaves)], played(data, recurrent.run)) == 0.0


@every_kind
@both_types
def test_every_instruction_set_computes_the_same_in_one_process(
    kind: Kind, dtype: torch.dtype
) -> None:
    """What is kept for the backward pass is in whole vectors, whose width changes with the level."""
    core, data = recurrent.core(), Given.draw(kind, 5, 2, 3, 33)
    widest, expected, ran = core.tt_level(), played(data, reference.run), set[bytes]()
    try:
        for level in (b"base", b"v2", b"v3", b"v4", b"v2"):
            if core.tt_use(level):
                ran.add(core.tt_level())
                assert apart(played(data.to(dtype), recurrent.run), expected) < exact(dtype)
    finally:
        core.tt_use(widest)
    assert widest in ran
