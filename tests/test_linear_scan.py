"""The scan equals the loop over its steps: values, gradients of any order, resets, any gates."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import throughtime as tt
from strategies import seeds
from throughtime.errors import DataError, StateError
from throughtime.kernels import scan
from throughtime.kernels.scan import linear_scan


def loop(gates: Tensor, inputs: Tensor, state: Tensor, resets: Tensor | None = None) -> Tensor:
    """The oracle: what the words say, by plain autograd.

    Resets as `tt.state.reset` applies them.
    """
    gates, inputs = torch.broadcast_tensors(gates, inputs)
    h, states = state.expand(inputs.shape[1:]), list[Tensor]()
    for t in range(len(inputs)):
        if resets is not None:
            h = tt.state.reset(h, torch.zeros_like(h), resets[t])
        h = gates[t] * h + inputs[t]
        states.append(h)
    return torch.stack(states)


@dataclass(frozen=True)
class Case:
    """What a scan is given.

    Gates turn or hold what they are given: nothing fades, so no credit is too small to be seen.
    """

    gates: Tensor
    inputs: Tensor
    state: Tensor
    resets: Tensor | None

    @classmethod
    def draw(
        cls,
        steps: int,
        lanes: int = 2,
        behind: tuple[int, ...] = (3,),
        *,
        often: float = 0.0,
        complex_: bool = False,
        seed: int = 0,
    ) -> "Case":
        torch.manual_seed(seed)
        dtype = torch.complex128 if complex_ else torch.float64
        gates = torch.randn(steps, lanes, *behind, dtype=dtype)
        gates = gates / gates.abs() * (0.97 + 0.06 * torch.rand(gates.shape, dtype=torch.float64))
        gates = gates * (torch.rand(gates.shape) > 0.02)
        inputs, state = (
            torch.randn(*shape, *behind, dtype=dtype) for shape in ((steps, lanes), (lanes,))
        )
        return cls(gates, inputs, state, torch.rand(steps, lanes) < often if often else None)

    def leaves(self) -> list[Tensor]:
        return [leaf.clone().requires_grad_() for leaf in (self.gates, self.inputs, self.state)]


def deviation(case: Case) -> float:
    """How far outputs and gradients are from the loop's, relative to the largest entry of each."""
    torch.manual_seed(1)
    actual: list[list[Tensor]] = []
    weigh = torch.randn_like(loop(*case.leaves(), resets=case.resets))
    for way in (linear_scan, loop):
        leaves = case.leaves()
        states = way(*leaves, resets=case.resets)
        grads = torch.autograd.grad(states, leaves, weigh, materialize_grads=True)
        actual.append([states.detach(), *grads])
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1.0)).item()
        for a, b in zip(*actual, strict=True)
    )


@pytest.fixture(params=["loop", "blocks of 3", "as chosen"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways a scan may be computed, on sequences short enough to be checked entry by entry."""
    if request.param == "loop":
        monkeypatch.setattr(scan, "WIDE", 0)
    elif request.param == "blocks of 3":
        monkeypatch.setattr(scan, "BLOCK", 3)
        monkeypatch.setattr(scan, "LONG", 6)
    return request.param


lengths = st.sampled_from([1, 2, 3, 47, 48, 49, 63, 64, 65, 97, 131, 512, 521])
shapes = st.sampled_from([(), (1,), (3,), (2, 3)])


@given(
    lengths,
    st.integers(1, 3),
    shapes,
    st.sampled_from([0.0, 0.03, 0.5, 1.0]),
    st.booleans(),
    st.sampled_from([None, 2, 5]),
    seeds,
)
def test_the_scan_is_the_loop(
    steps: int,
    lanes: int,
    behind: tuple[int, ...],
    often: float,
    complex_: bool,
    block: int | None,
    seed: int,
) -> None:
    """Also in short blocks."""
    case = Case.draw(steps, lanes, behind, often=often, complex_=complex_, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        if block:
            patch.setattr(scan, "BLOCK", block)
            patch.setattr(scan, "LONG", 1)
        assert deviation(case) < 1e-11


@pytest.mark.covering
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's forward mode compiles with it
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(
    way: str, complex_: bool
) -> None:
    case = Case.draw(7, 1, (1,), often=0.3, complex_=complex_)
    leaves = case.leaves()
    leaves[0] = leaves[0][:, :, :1].detach().requires_grad_()

    def run(*leaves: Tensor) -> Any:
        return linear_scan(*leaves, resets=case.resets)

    assert torch.autograd.gradcheck(run, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, leaves, check_fwd_over_rev=way != "as chosen")


def test_gates_and_inputs_broadcast_and_their_gradients_are_summed() -> None:
    case = Case.draw(50, 2, (3,))
    torch.manual_seed(2)
    for gates, inputs in (
        ((50, 1, 3), (50, 2, 1)),
        ((1, 2, 3), (50, 2, 3)),
        ((3,), (50, 2, 3)),
        ((50, 2, 3), (1, 1, 3)),
    ):
        drawn = Case(
            torch.rand(gates, dtype=torch.float64),
            torch.randn(inputs, dtype=torch.float64),
            case.state[0],
            None,
        )
        assert deviation(drawn) < 1e-12


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bad", [float("nan"), 1e300])
def test_nothing_crosses_a_reset(bad: float) -> None:
    """Neither a state that is no number any more, nor its gradient."""
    case = Case.draw(60)
    case.inputs[21, 0] = bad
    case.gates[22:29, 0] = 1e3  # and grow until the reset
    resets = torch.zeros(60, 2, dtype=torch.bool)
    resets[30, 0] = True
    gates, inputs, state = leaves = case.leaves()
    states = linear_scan(*leaves, resets=resets)
    fresh = loop(gates[30:, 0], inputs[30:, 0], torch.zeros(3, dtype=torch.float64))
    beside = loop(gates[:, 1], inputs[:, 1], state[1])
    torch.testing.assert_close(states[30:, 0], fresh, rtol=0, atol=1e-12)
    torch.testing.assert_close(states[:, 1], beside, rtol=0, atol=1e-12)
    to_gates, to_inputs, to_state = torch.autograd.grad(states[30:, 0].sum(), leaves)
    # gates of steps 20 to 29 stand beside states that are no numbers: zero times NaN
    for part in (to_inputs[:30], to_inputs[:, 1], to_state, to_gates[:20]):
        assert part.count_nonzero() == 0
    assert to_gates[30:].isfinite().all()


@pytest.mark.parametrize("size", [0.0, 1e-3, 1e30, 1e200], ids=str)
def test_gates_of_any_size_give_what_the_loop_gives(size: float) -> None:
    """Products of gates that vanish or overflow within a block, beside states that are zero."""
    case = Case.draw(200)
    gates = torch.full_like(case.gates, size)
    gates[100:] = 0.5
    inputs, state = torch.zeros_like(case.inputs), torch.zeros_like(case.state)
    inputs[150:] = 1.0
    states = linear_scan(gates, inputs, state)
    torch.testing.assert_close(states, loop(gates, inputs, state), rtol=0, atol=1e-12)
    assert states[-1].count_nonzero() == states[-1].numel()


def test_what_does_not_fit_is_refused_by_name() -> None:
    whole: dict[str, Any] = {"gates": torch.ones(6, 2, 3), "inputs": torch.ones(6, 2, 3)}
    for name, wrong, error in (
        ("gates", torch.ones(5, 2), DataError),
        ("state", torch.ones(4, 3), StateError),
        ("resets", torch.ones(6, 3, dtype=torch.bool), DataError),
        ("resets", torch.ones(6, 2), DataError),
    ):
        with pytest.raises(error, match=name):
            linear_scan(**whole | {"state": torch.ones(2, 3), name: wrong})
