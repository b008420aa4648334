"""`tt.nn` is `torch.nn`: every argument, layout, state and way of use; and resets are lanes that
start anew.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import rnn

import throughtime as tt
from recurrences import (
    LAYERS,
    call_and_grad,
    every_layer,
    leaves_of,
    max_difference,
    needs_kernels,
    random_state,
    tolerance,
    twin_layers,
)
from throughtime.errors import DataError

pytestmark = needs_kernels


def fused_runs(layer: nn.Module, x: Tensor, hx: Any = None) -> bool:
    return tt.nn.backend(layer, x, hx).name == "fused"


@every_layer
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9)),
    options=st.fixed_dictionaries(
        {
            "num_layers": st.integers(1, 3),
            "bias": st.booleans(),
            "batch_first": st.booleans(),
            "bidirectional": st.booleans(),
            "dtype": st.sampled_from([torch.float32, torch.float64]),
        }
    ),
    special=st.booleans(),
    batched=st.booleans(),
    with_state=st.booleans(),
    often=st.sampled_from([None, 0.0, 0.3]),
)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_every_combination_is_torch_s(
    name: str,
    sizes: tuple[int, int, int, int],
    options: dict[str, Any],
    special: bool,
    batched: bool,
    with_state: bool,
    often: float | None,
) -> None:
    """`special`: an LSTM with a projection, an RNN with relu."""
    (steps, lanes, features, hidden), dtype = sizes, options["dtype"]
    more = {"LSTM": {"proj_size": hidden // 2}, "RNN": {"nonlinearity": "relu"}, "GRU": {}}
    plain, fused = twin_layers(name, features, hidden, **options, **more[name] if special else {})
    first = (lanes, steps) if options["batch_first"] else (steps, lanes)
    x = torch.randn(*(first if batched else (steps,)), features, dtype=dtype)
    hx = random_state(plain, lanes if batched else None) if with_state else None
    assert fused_runs(fused, x, hx)
    plain.double()
    if often is None:
        actual = call_and_grad(fused, x, hx)
        expected = call_and_grad(plain, x.double(), _double(hx))
    else:
        resets = torch.rand(x.shape[:-1]) < often
        actual = call_and_grad(fused, x, hx, resets)
        expected = call_and_grad(Alone(plain), x.double(), _double(hx), resets)
    assert max_difference(actual, expected) < tolerance(dtype)


def _double(hx: Any) -> Any:
    return None if hx is None else tt.state.map_leaves(Tensor.double, hx)


class Alone(nn.Module):
    """The oracle of resets: each recording alone through torch.nn, joined again by lane."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.batch_first = layer, layer.batch_first
        layer.batch_first = False
        ways = 1 + layer.bidirectional
        # of the state: the rows of the direction that starts at the first step
        self.ahead = (torch.arange(layer.num_layers * ways) % ways == 0).view(-1, 1, 1)

    def forward(self, x: Tensor, hx: Any, resets: Tensor) -> tuple[Tensor, Any]:
        batched = x.dim() == 3
        if not batched:
            x, resets = x.unsqueeze(1), resets.unsqueeze(1)
        elif self.batch_first:
            x, resets = x.transpose(0, 1), resets.T
        leaves = leaves_of(random_state(self.layer, x.shape[1]))
        leaves = [leaf * 0 for leaf in leaves] if hx is None else leaves_of(hx)
        leaves = [leaf if leaf.dim() == 3 else leaf.unsqueeze(1) for leaf in leaves]
        outputs, ends = list[Tensor](), list[list[Tensor]]()
        for b in range(x.shape[1]):
            parts = list[tuple[Tensor, list[Tensor]]]()
            starts = [t for t in resets[:, b].nonzero().flatten().tolist() if t]
            for start, stop in pairwise([0, *starts, len(x)]):
                first, last = start == 0 and not bool(resets[0, b]), stop == len(x)
                enters = torch.where(self.ahead, first, last)
                state = tuple(leaf[:, b : b + 1] * enters for leaf in leaves)
                y, end = self.layer(
                    x[start:stop, b : b + 1], state if len(state) == 2 else state[0]
                )
                parts.append((y, leaves_of(end)))
            outputs.append(torch.cat([y for y, _ in parts]))
            pairs = zip(parts[-1][1], parts[0][1], strict=True)
            ends.append([torch.where(self.ahead, last, first) for last, first in pairs])
        y, after = torch.cat(outputs, 1), [torch.cat(leaf, 1) for leaf in zip(*ends, strict=True)]
        if not batched:
            y, after = y.squeeze(1), [leaf.squeeze(1) for leaf in after]
        y = y.transpose(0, 1) if batched and self.batch_first else y
        return y, tuple(after) if len(after) == 2 else after[0]


@every_layer
@pytest.mark.parametrize("way", ["autocast", "mode", "bfloat16"])
def test_resets_are_the_same_where_torch_runs(name: str, way: str) -> None:
    """What the kernel does not take: torch's layer between resets, or the definition."""
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
    plain, fused = twin_layers(name, 4, 6, num_layers=2, dtype=dtype)
    x, resets = torch.randn(17, 3, 4, dtype=dtype), torch.rand(17, 3) < 0.3
    expected, _ = Alone(plain.float())(x.float(), None, resets)
    watched = nullcontext() if way == "bfloat16" else torch.overrides.BaseTorchFunctionMode()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"), watched:
        assert tt.nn.backend(fused, x).name == "torch.nn"
        y, state = fused(x, resets=resets)
    assert {t.dtype for t in (y, *leaves_of(state))} == {dtype}
    assert max_difference([y], [expected]) < (1e-5 if way == "mode" else 0.05)


@every_layer
def test_no_steps_and_no_lanes_hand_the_state_on(name: str) -> None:
    fused = LAYERS[name][1](4, 6, num_layers=2)
    for steps, lanes in ((0, 3), (5, 0), (0, 0)):
        x, hx = torch.randn(steps, lanes, 4), random_state(fused, lanes)
        y, end = fused(x, hx, torch.ones(steps, lanes, dtype=torch.bool))
        assert y.shape == (steps, lanes, 6)
        if steps == 0:
            assert all(map(torch.equal, leaves_of(end), leaves_of(hx)))


@every_layer
def test_dropout_between_layers_draws_as_torch_does(name: str) -> None:
    plain, fused = twin_layers(name, 4, 6, num_layers=3, dropout=0.5, dtype=torch.float64)
    x, actual = torch.randn(7, 3, 4, dtype=torch.float64), list[list[Tensor]]()
    for layer in (fused, plain):
        torch.manual_seed(5)
        actual.append(call_and_grad(layer, x))
    assert max_difference(*actual) < 1e-12
    assert max_difference(call_and_grad(fused, x), actual[0]) > 1e-3  # other draws
    assert max_difference(call_and_grad(fused.eval(), x), call_and_grad(plain.eval(), x)) < 1e-12


@every_layer
def test_what_does_not_fit_is_refused_as_torch_refuses_it(name: str) -> None:
    """The same exception, and the kernel never sees it."""
    plain, fused = twin_layers(name, 4, 6)
    good, state = torch.randn(5, 2, 4), random_state(plain, 2)
    cases: list[tuple[Any, Any]] = [
        (torch.randn(5, 2, 3), None),
        (torch.randn(4), None),
        (good.double(), None),
        (good, random_state(plain, 3)),
        (good, _double(state)),
    ]
    for x, hx in cases:
        with pytest.raises(Exception) as expected:  # noqa: PT011  # any
            plain(x, hx)
        with pytest.raises(type(expected.value)) as actual:
            fused(x, hx)
        assert str(actual.value) == str(expected.value)
    with torch.no_grad():
        fused.weight_hh_l0.data = torch.zeros(1, 1)
    assert tt.nn.backend(fused, good).name == "torch.nn"


@every_layer
def test_resets_that_do_not_fit_are_refused_with_the_line_to_write(name: str) -> None:
    fused = LAYERS[name][1](4, 6)
    x = torch.randn(5, 2, 4)
    for resets in (torch.zeros(2, 5, dtype=torch.bool), torch.zeros(5, 2)):
        with pytest.raises(DataError, match=r"resets are .*expected .*resets\.bool\(\)"):
            fused(x, None, resets)
    packed = rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    with pytest.raises(DataError, match="each packed sequence starts from its own state"):
        fused(packed, None, torch.zeros(5, 2, dtype=torch.bool))
