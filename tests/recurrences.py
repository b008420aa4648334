"""Shared by the tests of recurrent layers: one layer's tensors, gradients of a loss, differences.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.kernels.cells import CELLS, Cell, Weights
from throughtime.kernels.library import library, why_missing
from throughtime.kernels.reference import States

every_cell = pytest.mark.parametrize("cell", CELLS.values(), ids=str)
both_types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
needs_kernels = pytest.mark.skipif(library() is None, reason=str(why_missing()))
Run = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference that counts as equal."""
    return 1e-12 if dtype == torch.float64 else 1e-5


@dataclass(frozen=True)
class LayerCase:
    """The inputs of one layer.

    The recurrent weights rotate the state and let it persist, so no gradient is too small to count.
    """

    cell: Cell
    tensors: list[Tensor | None]  # x, h, c, and the weights in the order of Weights
    resets: Tensor | None

    @classmethod
    def draw(
        cls,
        cell: Cell,
        steps: int,
        lanes: int,
        inputs: int,
        hidden: int,
        *,
        bias: bool = True,
        projection: int = 0,
        often: float = 0.0,
    ) -> "LayerCase":
        torch.manual_seed(steps * 1000 + lanes * 100 + hidden)
        rows, outputs = len(cell.gates) * hidden, projection or hidden
        square = torch.empty(hidden, outputs, dtype=torch.float64)
        rotations = [nn.init.orthogonal_(square.clone()) for _ in cell.gates]
        b_ih = torch.randn(rows, dtype=torch.float64) * 0.3 if bias else None
        if b_ih is not None and cell.retention_gate:
            b_ih[hidden : 2 * hidden] += 2.0  # the gate keeps its past
        tensors = [
            torch.randn(steps, lanes, inputs, dtype=torch.float64),
            torch.randn(lanes, outputs, dtype=torch.float64),
            torch.randn(lanes, hidden, dtype=torch.float64) if "c" in cell.states else None,
            torch.randn(rows, inputs, dtype=torch.float64) * 0.4,
            torch.cat(rotations),
            b_ih,
            torch.randn(rows, dtype=torch.float64) * 0.3 if bias else None,
            None,
        ]
        if projection:
            tensors[-1] = nn.init.orthogonal_(torch.empty(projection, hidden, dtype=torch.float64))
        return cls(cell, tensors, torch.rand(steps, lanes) < often if often else None)

    def to(self, dtype: torch.dtype) -> "LayerCase":
        return LayerCase(
            self.cell, [None if t is None else t.to(dtype) for t in self.tensors], self.resets
        )

    def leaves(self) -> list[Tensor | None]:
        return [None if t is None else t.clone().requires_grad_() for t in self.tensors]

    def run(self, run: Run, leaves: Sequence[Tensor | None]) -> list[Tensor]:
        x, states, weights = split(leaves)
        y, ends = run(self.cell, x, states, weights, self.resets)
        return [y, *ends]


def split(leaves: Sequence[Tensor | None]) -> tuple[Tensor, States, Weights]:
    """Inputs, states and weights from the list of `LayerCase.tensors`."""
    x, h, c, *weights = leaves
    assert x is not None
    assert h is not None
    return x, (h,) if c is None else (h, c), Weights(*weights)  # pyright: ignore[reportArgumentType]


def loss_grads(results: Sequence[Tensor], leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of a loss that weights every output and the last state differently."""
    losses = [
        (t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) + 0.1 * t * t).sum()
        for t in results
    ]
    given = [t for t in leaves if t is not None]
    return list(torch.autograd.grad(torch.stack(losses).sum(), given, materialize_grads=True))


def max_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, each tensor's relative to its own largest entry (at least 1).

    Infinite if shapes differ.
    """
    if [t.shape for t in actual] != [t.shape for t in expected]:
        return float("inf")
    pairs = [
        (a.detach().double(), b.detach().double())
        for a, b in zip(actual, expected, strict=True)
        if b.numel()
    ]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def run_and_grad(given: LayerCase, run: Run) -> list[Tensor]:
    """Everything: outputs, state, gradients."""
    leaves = given.leaves()
    results = given.run(run, leaves)
    return [*results, *loss_grads(results, leaves)]


LAYERS: dict[str, tuple[Any, Any]] = {
    "LSTM": (nn.LSTM, tt.nn.LSTM),
    "GRU": (nn.GRU, tt.nn.GRU),
    "RNN": (nn.RNN, tt.nn.RNN),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def twin_layers(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A layer of torch.nn and one of tt.nn with the same weights."""
    plain, fused = (cls(*args, **kwargs) for cls in LAYERS[name])
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def leaves_of(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else list(state)


def call_and_grad(
    layer: Any, x: Tensor, hx: Any = None, resets: Tensor | None = None, weights: Any = None
) -> list[Tensor]:
    """Outputs, state, and the gradients of inputs, state and parameters."""
    x = x.clone().requires_grad_()
    hx = [] if hx is None else [leaf.clone().requires_grad_() for leaf in leaves_of(hx)]
    entering = tuple(hx) if len(hx) == 2 else hx[0] if hx else None
    y, state = layer(x, entering) if resets is None else layer(x, entering, resets)
    results = [y, *leaves_of(state)]
    weights = layer.parameters() if weights is None else weights
    return [*results, *loss_grads(results, [x, *hx, *weights])]


def random_state(layer: nn.RNNBase, lanes: int | None) -> Any:
    """A random state that fits."""
    ways = layer.num_layers * (1 + layer.bidirectional)
    rows = (ways,) if lanes is None else (ways, lanes)
    dtype = next(layer.parameters()).dtype
    h = torch.randn(*rows, layer.proj_size or layer.hidden_size, dtype=dtype)
    return (
        (h, torch.randn(*rows, layer.hidden_size, dtype=dtype)) if isinstance(layer, nn.LSTM) else h
    )
