"""The input of every implementation of a case: the same recordings, weights and loss.

Shapes: `T` steps of a recording, `B` lanes, `D` input features, `C` classes.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from benchmarks.bench.cases import Case
from torch import Tensor, nn

RATE, NORM = 1e-3, 1.0
BYTES = 32e6  # of inputs at most
CHUNKS = 200  # of a recording at most; more are another epoch
RESETS = 0.01  # of all steps


@dataclass(frozen=True)
class Workload:
    """Recordings of equal length, one for each lane.

    Attributes:
        case: what they are for.
        inputs: `(T, B, D)`, or `(T, B)` words.
        targets: `(T, B)` classes.
    """

    case: Case
    inputs: Tensor
    targets: Tensor

    def modules(self, batch_first: bool = False) -> list[nn.Module]:
        """Embedding of words, recurrent layers and head, the same weights at every call."""
        case = self.case
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            words = [nn.Embedding(case.vocabulary, case.inputs)] if case.vocabulary else []
            layer = getattr(nn, case.cell)(
                case.inputs, case.hidden, case.layers, batch_first=batch_first
            )
            result = [*words, layer, nn.Linear(case.hidden, case.classes)]
        return [module.to(case.dtype) for module in result]

    def recordings(self, cuts: list[list[int]] | None = None) -> list[dict[str, Tensor]]:
        """What a `tt.Stream` plays; with `cuts`, where each lane begins another recording."""
        lanes = range(self.case.lanes)
        spans = [
            list(pairwise([0, *(cuts[lane] if cuts else []), len(self.inputs)])) for lane in lanes
        ]
        return [
            {"inputs": self.inputs[start:stop, lane], "targets": self.targets[start:stop, lane]}
            for lane in lanes
            for start, stop in spans[lane]
        ]


def workload_of(case: Case) -> Workload:
    """Random recordings, the same at every call, of a whole number of updates."""
    random = torch.Generator().manual_seed(1)
    bytes_of_a_step = case.lanes * (8 if case.vocabulary else case.inputs * case.dtype.itemsize)
    chunks = max(2, min(CHUNKS, int(BYTES / (bytes_of_a_step * case.steps))))
    steps = case.steps * (1 if case.kind == "exact" else chunks)
    if case.vocabulary:
        inputs = torch.randint(case.vocabulary, (steps, case.lanes), generator=random)
    else:
        inputs = torch.randn(steps, case.lanes, case.inputs, generator=random, dtype=case.dtype)
    return Workload(
        case, inputs, torch.randint(case.classes, (steps, case.lanes), generator=random)
    )


def cuts_of(workload: Workload) -> list[list[int]]:
    """Where each lane begins another recording: at random steps, one in a hundred."""
    random, steps = torch.Generator().manual_seed(2), len(workload.inputs)
    count = max(1, round(RESETS * steps))
    return [
        sorted((torch.randperm(steps - 1, generator=random)[:count] + 1).tolist())
        for _ in range(workload.case.lanes)
    ]


class Net(nn.Module):
    """A model as many write it: state in, state out."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        *words, self.layer, self.head = modules
        self.words = words[0] if words else None

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Outputs of all steps, and the state after the last."""
        y, after = self.layer(x if self.words is None else self.words(x), state)
        return self.head(y), after


def detach_state(state: Any) -> Any:
    """The state without its graph."""
    return state.detach() if isinstance(state, Tensor) else tuple(leaf.detach() for leaf in state)
