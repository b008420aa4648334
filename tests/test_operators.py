"""torch.compile and torch.export pass over a fused layer as one operator, with its values and
gradients.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.testing import CompileCounterWithBackend

import throughtime as tt
from recurrences import (
    LayerCase,
    every_cell,
    every_layer,
    max_difference,
    needs_kernels,
    tolerance,
)
from throughtime.kernels.cells import Cell

pytestmark = [
    needs_kernels,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch"),  # the compiler's own
]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__()
        self.layer = getattr(tt.nn, name)(4, 6, num_layers=2, **kwargs)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, resets: Tensor | None = None) -> Tensor:
        y, _ = self.layer(x, None, resets)
        return self.head(y)


def value_and_gradients(net: Any, parameters: list[Tensor], *given: Any) -> list[Tensor]:
    y = net(*given)
    return [
        y,
        *torch.autograd.grad(
            (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), parameters
        ),
    ]


PRECISIONS = {
    "f64": (torch.float64, False),
    "f32": (torch.float32, False),
    "autocast": (torch.float32, True),
}
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
SIZES = ((5, 3), (17, 2), (4, 21))  # fewer and more lanes than autocast rounds from


def autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


@pytest.mark.covering
@every_layer
@every_precision
@pytest.mark.parametrize("lanes", [3, 9])
def test_exported_program_is_the_same_for_any_size(name: str, precision: str, lanes: int) -> None:
    dtype, rounds = PRECISIONS[precision]
    net = Net(name).to(dtype)
    free = {0: torch.export.Dim("T", min=2), 1: torch.export.Dim("B", min=2)}
    example = torch.randn(5, lanes, 4, dtype=dtype), torch.zeros(5, lanes, dtype=torch.bool)
    with autocast(rounds):
        program = torch.export.export(net, example, dynamic_shapes={"x": free, "resets": free})
    assert sum("throughtime.recurrent" in str(node.target) for node in program.graph.nodes) == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for size in SIZES:
        x, resets = torch.randn(*size, 4, dtype=dtype), torch.rand(*size) < 0.3
        with autocast(rounds):
            actual, expected = loaded(x, resets), net(x, resets)
        assert actual.dtype is expected.dtype
        assert max_difference([actual], [expected]) < tolerance(dtype)
        with autocast(rounds):  # the mutant: resets that do not arrive
            mutant = loaded(x, ~resets)
        assert max_difference([mutant], [expected]) > tolerance(dtype)


@pytest.mark.covering
@every_layer
@every_precision
def test_compiled_for_dynamic_sizes_it_is_compiled_once(name: str, precision: str) -> None:
    dtype, rounds = PRECISIONS[precision]
    net = Net(name).to(dtype)
    counter = CompileCounterWithBackend("aot_eager")
    with config.patch(allow_rnn=True, error_on_recompile=True):
        compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=counter)
        for size in SIZES:
            x, resets = torch.randn(*size, 4, dtype=dtype), torch.rand(*size) < 0.2
            with autocast(rounds):
                expected = value_and_gradients(net, list(net.parameters()), x, resets)
                actual = value_and_gradients(compiled, list(net.parameters()), x, resets)
            # under autocast the head's own gradients are rounded to bfloat16
            assert max_difference(actual, expected) < (0.02 if rounds else 10 * tolerance(dtype))
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes]
    assert any("throughtime.recurrent" in str(node.target) for node in nodes)


@pytest.mark.covering
@every_cell
@pytest.mark.parametrize("often", [0.3, 0.0])
def test_operator_obeys_the_laws_of_operators(cell: Cell, often: float) -> None:
    """Schema, aliasing, shapes of fake tensors, registered gradients: torch's own check."""
    data = LayerCase.draw(cell, 5, 2, 3, 4, often=often)
    given = cell.name, *data.leaves(), data.resets, True, False
    torch.library.opcheck(torch.ops.throughtime.recurrent.default, given)


def test_compiled_without_steps_or_lanes_the_state_passes() -> None:
    """A kernel would read and write what is not there."""
    layer = tt.nn.LSTM(4, 6)
    with config.patch(allow_rnn=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for steps, lanes in ((0, 2), (5, 0)):
            state = tuple(torch.randn(1, lanes, 6, requires_grad=True) for _ in "hc")
            y, ends = compiled(torch.randn(steps, lanes, 4), state)
            assert y.shape == (steps, lanes, 6)
            torch.testing.assert_close(ends, state)
            (2 * ends[0].sum() + 3 * ends[1].sum()).backward()
            for k, leaf in enumerate(state):
                torch.testing.assert_close(leaf.grad, torch.full_like(leaf, k + 2))
