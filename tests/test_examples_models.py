"""The worked models learn with their state carried."""

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import throughtime as tt
from throughtime.carry import Carried

FOLDER = Path(__file__).parent.parent / "examples" / "models"
transformers.logging.set_verbosity_error()  # that the fast kernels are for GPUs


@dataclass(frozen=True)
class Example:
    """A file of examples/models: module, inputs, tolerance in float64 and the loss to reach."""

    name: str
    module: str
    inputs: Callable[[int], Tensor]
    bound: float
    tolerance: float = 1e-12

    def names(self) -> dict[str, Any]:
        return runpy.run_path(str(FOLDER / f"{self.name}.py"))

    def net(self) -> Carried:
        torch.manual_seed(5)
        made = self.names()[self.module]
        return tt.carry(made(2, 4) if self.name == "min_gru" else made()).double()


def symbols(steps: int) -> Tensor:
    return torch.randint(4, (steps, 2))


EXAMPLES = (
    Example("transformer_xl", "TransformerXL", symbols, 0.1),
    Example("min_gru", "MinGRU", lambda steps: torch.randn(steps, 2, 2, dtype=torch.float64), 0.06),
    Example(
        "spiking",
        "Spiking",
        lambda steps: (torch.rand(steps, 2, 2, dtype=torch.float64) < 0.4).double(),
        0.3,
    ),
    Example(
        "conv_lstm",
        "ConvLSTM",
        lambda steps: torch.rand(steps, 2, 1, 6, 6, dtype=torch.float64),
        0.9,
    ),
    Example(
        "state_space", "Mamba", symbols, 0.1, tolerance=2e-6
    ),  # it scans in float32 whatever the model
)


@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=[] if e.name == "min_gru" else pytest.mark.slow) for e in EXAMPLES],
    ids=lambda example: example.name,
)
def test_an_example_learns(example: Example) -> None:
    assert example.names()["main"]() < example.bound


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_chunks_of_an_example_are_the_whole(example: Example) -> None:
    torch.manual_seed(1)
    laws = tt.testing.check_carry(example.net(), example.inputs(28), tolerance=example.tolerance)
    assert {"whole", "reset", "lanes", "value", "credit"} < {law.name for law in laws}
