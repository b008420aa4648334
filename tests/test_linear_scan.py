"""The scan equals the loop over its steps: values, gradients of any order, resets, any gates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from examples.policies.rtrl import RTRL
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import DataError, StateError
from throughtime.kernels import scan
from throughtime.kernels.scan import linear_scan

Scan = Callable[..., Tensor]


def loop(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    """The oracle: what the words say, by plain autograd.

    Resets as `tt.state.reset` applies them.
    """
    gates, inputs = torch.broadcast_tensors(gates, inputs)
    h, states = state.expand(inputs.shape[1:]), list[Tensor]()
    start = torch.zeros_like(h) if initial is None else initial.expand_as(h)
    for t in range(len(inputs)):
        if resets is not None:
            h = tt.state.reset(h, start, resets[t])
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
    initial: Tensor | None

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
        inputs, state, initial = (
            torch.randn(*shape, *behind, dtype=dtype)
            for shape in ((steps, lanes), (lanes,), (lanes,))
        )
        resets = torch.rand(steps, lanes) < often if often else None
        return cls(gates, inputs, state, resets, initial if often else None)

    def leaves(self) -> list[Tensor]:
        return [
            leaf.clone().requires_grad_()
            for leaf in (self.gates, self.inputs, self.state, self.initial)
            if leaf is not None
        ]

    def run(self, method: Scan, leaves: list[Tensor]) -> Tensor:
        gates, inputs, state, *initial = leaves
        return method(gates, inputs, state, self.resets, initial=initial[0] if initial else None)


def deviation(method: Scan, case: Case) -> float:
    """How far outputs and gradients are from the loop's, relative to the largest entry of each."""
    torch.manual_seed(1)
    actual: list[list[Tensor]] = []
    weigh = torch.randn_like(case.run(loop, case.leaves()))
    for way in (method, loop):
        leaves = case.leaves()
        states = case.run(way, leaves)
        actual.append(
            [
                states.detach(),
                *torch.autograd.grad(
                    states, leaves, weigh, allow_unused=True, materialize_grads=True
                ),
            ]
        )
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
    st.integers(0, 2**16),
)
def test_the_scan_is_the_loop(
    steps: int, lanes: int, behind: tuple[int, ...], often: float, complex_: bool, seed: int
) -> None:
    case = Case.draw(steps, lanes, behind, often=often, complex_=complex_, seed=seed)
    assert deviation(linear_scan, case) < 1e-11


@given(st.integers(6, 60), st.integers(2, 5), st.sampled_from([0.0, 0.1]), st.booleans())
def test_the_scan_is_the_loop_for_any_length_of_block(
    steps: int, block: int, often: float, complex_: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "BLOCK", block)
        patch.setattr(scan, "LONG", 1)
        assert (
            deviation(linear_scan, Case.draw(steps, often=often, complex_=complex_, seed=steps))
            < 1e-11
        )


def no_gate_credit(gates: Tensor, *rest: Any, **more: Any) -> Tensor:
    return loop(gates.detach(), *rest, **more)


def late_credit(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    """The gate is blamed with the state after it, where the one before it was due."""
    states = loop(gates, inputs, state, resets, initial=initial)
    before = loop(gates.detach(), inputs, state, resets, initial=initial)
    return before + gates * states.detach() - (gates * states).detach()


def cut_credit(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    """Credit ends in the middle."""
    middle = len(gates) // 2
    halves = [slice(middle), slice(middle, None)]
    parts = [None if resets is None else resets[half] for half in halves]
    first = loop(gates[halves[0]], inputs[halves[0]], state, parts[0], initial=initial)
    return torch.cat(
        [
            first,
            loop(
                gates[halves[1]], inputs[halves[1]], first[-1].detach(), parts[1], initial=initial
            ),
        ]
    )


def unconjugated(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    """Complex credit through the gates as they are."""
    states = loop(gates, inputs, state, resets, initial=initial)
    return torch.complex(states.real, states.imag.detach()) if states.is_complex() else states


def resets_forgotten(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    del resets, initial
    return loop(gates, inputs, state)


def start_forgotten(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    del initial
    return loop(gates, inputs, state, resets)


def quotients(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    """By cumulative products, which underflow, and divide by gates that are zero."""
    del resets, initial
    products = gates.cumprod(0)
    return products * (state + (inputs / products).cumsum(0))


MUTANTS = (no_gate_credit, late_credit, cut_credit, resets_forgotten, start_forgotten, quotients)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_scan_differs_from_the_loop(mutant: Scan) -> None:
    assert not deviation(mutant, Case.draw(97, often=0.03)) < 1e-3


def test_gradients_without_conjugates_differ_from_the_loop() -> None:
    assert not deviation(unconjugated, Case.draw(97, complex_=True)) < 1e-3


@pytest.mark.covering
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's forward mode compiles with it
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
def test_gradients_of_first_and_second_order_are_those_of_finite_differences(
    way: str, complex_: bool
) -> None:
    case = Case.draw(8, 2, (1,), often=0.2, complex_=complex_)
    leaves = case.leaves()
    leaves[0] = leaves[0][:, :, :1].detach().requires_grad_()

    def run(*leaves: Tensor) -> Any:
        return case.run(linear_scan, list(leaves))

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
            None,
        )
        assert deviation(linear_scan, drawn) < 1e-12


@pytest.mark.usefixtures("way")
def test_the_scan_is_linear_in_inputs_and_state() -> None:
    a, b = Case.draw(61, seed=1), Case.draw(61, seed=2)
    both = linear_scan(a.gates, 2 * a.inputs - 3 * b.inputs, 2 * a.state - 3 * b.state)
    apart = 2 * linear_scan(a.gates, a.inputs, a.state) - 3 * linear_scan(
        a.gates, b.inputs, b.state
    )
    torch.testing.assert_close(both, apart, rtol=0, atol=1e-12)
    assert not torch.allclose(both, linear_scan(a.gates, 2 * a.inputs - 3 * b.inputs, a.state))


@given(st.integers(1, 99), st.sampled_from([0.0, 0.1]))
def test_two_halves_with_the_state_carried_are_the_whole(split: int, often: float) -> None:
    case = Case.draw(100, often=often)

    def halves(
        gates: Tensor,
        inputs: Tensor,
        state: Tensor,
        resets: Tensor | None = None,
        *,
        initial: Tensor | None = None,
    ) -> Tensor:
        parts = (resets, resets) if resets is None else (resets[:split], resets[split:])
        first = linear_scan(gates[:split], inputs[:split], state, parts[0], initial=initial)
        return torch.cat(
            [
                first,
                linear_scan(gates[split:], inputs[split:], first[-1], parts[1], initial=initial),
            ]
        )

    assert deviation(halves, case) < 1e-12


class Layer(nn.Module):
    """Turned inputs, a scan, and a learnt start."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.into = nn.Linear(3, 4), nn.Linear(3, 4)
        self.start = nn.Parameter(torch.randn(4))

    def initial_state(self, lanes: int) -> Tensor:
        return self.start.expand(lanes, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        states = linear_scan(1 + 0.1 * self.gate(x).tanh(), self.into(x), state)
        return states, states[-1]


def layer() -> Carried:
    torch.manual_seed(3)
    return tt.carry(Layer().double())


def test_resets_of_the_scan_are_those_of_carry() -> None:
    net, x, resets = layer(), torch.randn(70, 2, 3, dtype=torch.float64), torch.rand(70, 2) < 0.05
    module: Any = net.module
    y, _ = net(x, net.initial_state(2), resets)
    by_carry = torch.autograd.grad(y.square().sum(), list(net.parameters()))
    own = linear_scan(
        1 + 0.1 * module.gate(x).tanh(),
        module.into(x),
        module.initial_state(2),
        resets,
        initial=module.start,
    )
    torch.testing.assert_close(own, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(own.square().sum(), list(net.parameters())),
        by_carry,
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_nothing_crosses_a_reset(bad: float) -> None:
    """Neither a state that is no number any more, nor its gradient."""
    case = Case.draw(60)
    gates, inputs, state = (leaf.clone() for leaf in (case.gates, case.inputs, case.state))
    inputs[21, 0] = bad
    gates[22:29, 0] = 1e3  # and grow until the reset
    resets = torch.zeros(60, 2, dtype=torch.bool)
    resets[30, 0] = True
    leaves = [leaf.requires_grad_() for leaf in (gates, inputs, state)]
    states = linear_scan(gates, inputs, state, resets)
    fresh = loop(gates[30:, 0], inputs[30:, 0], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(states[30:, 0], fresh, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        states[:, 1], loop(gates[:, 1], inputs[:, 1], state[1]), rtol=0, atol=1e-12
    )
    to_gates, to_inputs, to_state = torch.autograd.grad(states[30:, 0].sum(), leaves)
    assert (
        to_inputs[:30].count_nonzero()
        == to_inputs[:, 1].count_nonzero()
        == to_state.count_nonzero()
        == 0
    )
    assert (
        to_gates[:20].count_nonzero() == 0
    )  # later ones stand beside states that are no numbers: zero times NaN, as in the loop
    assert to_gates[30:].isfinite().all()


def test_a_blame_that_is_no_number_crosses_no_reset() -> None:
    case = Case.draw(60)
    resets = torch.zeros(60, 2, dtype=torch.bool)
    resets[30] = True
    gates, inputs, state = leaves = case.leaves()
    weigh = torch.ones(60, 2, 3, dtype=torch.float64)
    weigh[40] = float("nan")
    grads = torch.autograd.grad(linear_scan(gates, inputs, state, resets), leaves, weigh)
    assert all(grad[:30].isfinite().all() for grad in grads)
    assert grads[1][30].isnan().all()


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


def test_a_thousand_small_gates_do_not_underflow() -> None:
    case = Case.draw(1000)
    small = Case(case.gates * 0.01, case.inputs, case.state, None, None)
    assert deviation(linear_scan, small) < 1e-12
    assert not deviation(quotients, small) < 1e-3


def test_gates_and_states_are_all_that_is_kept() -> None:
    case, kept = Case.draw(1000), dict[int, int]()
    leaves = case.leaves()

    def keep(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        states = linear_scan(*leaves)
    assert states.requires_grad
    assert sum(kept.values()) == case.gates.nbytes + case.inputs.nbytes + case.state.nbytes


def test_types_widen_as_in_arithmetic() -> None:
    gates, inputs, state = (
        torch.rand(60, 2),
        torch.randn(60, 2, dtype=torch.complex64),
        torch.zeros(2, dtype=torch.float64),
    )
    leaf = gates.clone().requires_grad_()
    states = linear_scan(leaf, inputs, state)
    assert states.dtype == torch.complex128
    assert torch.autograd.grad(states.abs().sum(), leaf)[0].dtype == torch.float32
    assert (
        linear_scan(gates.bfloat16(), inputs.real.bfloat16(), torch.zeros(2)).dtype == torch.float32
    )


def test_batches_of_scans_by_vmap() -> None:
    case = Case.draw(60, often=0.1)
    more = torch.randn(5, *case.inputs.shape, dtype=torch.float64)
    actual = torch.func.vmap(
        lambda inputs: linear_scan(case.gates, inputs, case.state, case.resets)
    )(more)
    torch.testing.assert_close(
        actual,
        torch.stack([loop(case.gates, one, case.state, case.resets) for one in more]),
        rtol=0,
        atol=1e-12,
    )
    jacobian = torch.func.jacrev(
        lambda state: linear_scan(case.gates, case.inputs, state, case.resets)[-1]
    )(case.state)
    expected = torch.autograd.functional.jacobian(
        lambda state: loop(case.gates, case.inputs, state, case.resets)[-1], case.state
    )
    torch.testing.assert_close(jacobian, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "gradient",
    [
        tt.Exact(chunk=7),
        tt.Truncated(stride=80),
        tt.Truncated(stride=9, horizon=200),
        RTRL(stride=80),
    ],
    ids=["exact", "whole", "windows", "rtrl"],
)
def test_every_policy_takes_a_net_of_scans(gradient: Any) -> None:
    net, x = layer(), torch.randn(80, 3, dtype=torch.float64)
    targets = torch.randn(80, 4, dtype=torch.float64)
    oracle, _ = net(x.unsqueeze(1), net.initial_state(1))
    expected = torch.autograd.grad(
        nn.functional.mse_loss(oracle[:, 0], targets), list(net.parameters())
    )
    stream = tt.Stream({"inputs": x, "targets": targets}, lanes=1, chunk=11, dtype=torch.float64)
    actual = [torch.zeros_like(p) for p in net.parameters()]
    for update in tt.updates(net, stream, nn.MSELoss(), gradient=gradient):
        for total, p in zip(actual, net.parameters(), strict=True):
            total.add_(torch.zeros_like(p) if p.grad is None else p.grad, alpha=update.steps / 80)
        net.zero_grad()
    torch.testing.assert_close(actual, list(expected), rtol=1e-9, atol=1e-9)


def test_a_module_of_scans_passes_the_laws_of_carrying() -> None:
    assert (
        max(law.deviation for law in tt.testing.check_carry(layer(), torch.randn(28, 2, 3))) < 1e-12
    )


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            {"gates": torch.ones(5, 2)},
            DataError,
            r"gates \(5, 2\) and inputs \(6, 2, 3\) do not broadcast",
        ),
        ({"gates": torch.ones(3), "inputs": torch.ones(3)}, DataError, "expected .T, B, ...."),
        (
            {"inputs": torch.ones(0, 2, 3), "gates": torch.ones(0, 2, 3)},
            DataError,
            "at least one step",
        ),
        ({"state": torch.ones(4, 3)}, StateError, r"state has shape \(4, 3\), expected \(2, 3\)"),
        (
            {"initial": torch.ones(2, 4)},
            StateError,
            r"initial has shape \(2, 4\), expected \(2, 3\)",
        ),
        (
            {"resets": torch.ones(6, 3, dtype=torch.bool)},
            DataError,
            r"resets are \(6, 3\) torch.bool, expected \(6, 2\)",
        ),
        ({"resets": torch.ones(6, 2)}, DataError, "torch.float32, expected .6, 2. torch.bool"),
        (
            {name: torch.ones(6, 2, 3).long() for name in ("gates", "inputs")}
            | {"state": torch.ones(2, 3).long()},
            DataError,
            "torch.int64",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    given: dict[str, Tensor], error: type[Exception], words: str
) -> None:
    whole: dict[str, Any] = {
        "gates": torch.ones(6, 2, 3),
        "inputs": torch.ones(6, 2, 3),
        "state": torch.ones(2, 3),
        **given,
    }
    with pytest.raises(error, match=words):
        linear_scan(**whole)


def test_resets_that_differ_within_a_vmap_are_refused() -> None:
    case = Case.draw(6)
    with pytest.raises(DataError, match="resets differ within a vmap"):
        torch.func.vmap(lambda resets: linear_scan(case.gates, case.inputs, case.state, resets))(
            torch.zeros(4, 6, 2, dtype=torch.bool)
        )


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="what torch 2.13 does")
def test_the_scan_operator_of_torch_blames_its_gates_wrongly() -> None:
    """The reason for our own scan.

    The operator behind `associative_scan(combine_mode="pointwise")` treats its operands as
    independent.
    """
    from torch._higher_order_ops.associative_scan import associative_scan_op  # no public name

    def torch_scan(gates: Tensor, inputs: Tensor, state: Tensor, *_: Any, **__: Any) -> Tensor:
        first = torch.cat([inputs[:1] + gates[:1] * state, inputs[1:]])
        return associative_scan_op(lambda a, b, c, d: [a * c, c * b + d], (gates, first), ())[1]

    case = Case.draw(16)
    gates, inputs, state = case.leaves()
    ours, theirs = linear_scan(gates, inputs, state), torch_scan(gates, inputs, state)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-12)
    right = torch.autograd.grad(ours.sum(), (gates, inputs))
    actual = torch.autograd.grad(theirs.sum(), (gates, inputs))
    torch.testing.assert_close(actual[1], right[1], rtol=0, atol=1e-12)
    assert (actual[0] - right[0]).abs().max() > 0.1 * right[0].abs().max()
    assert deviation(linear_scan, case) < 1e-12
