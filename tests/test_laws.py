"""`check_carry` passes on every carried net and fails on every mutant."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies import (
    HIDDEN,
    HidesLayer,
    Rotation,
    Row,
    TensorState,
    apart,
    inputs,
    named,
    remembering,
    some_nets,
    weights,
)
from throughtime.carry import Carried
from throughtime.errors import LawError
from throughtime.testing import check_carry

LAWS = [
    *("repeat", "value", "inputs", "memory", "causal", "lanes"),
    *("shape", "whole", "credit", "reset"),
]


@some_nets("lstm", "sequential", "hides-cell", "namedtuple-state", "learnt-start")
def test_check_carry_passes_on_what_carry_makes(row: Row) -> None:
    before = weights(net := row.net())
    laws = check_carry(net, inputs(28, 3))
    assert [law.name for law in laws] == LAWS
    assert max(law.deviation for law in laws) < 1e-12
    assert apart(weights(net), before) == 0


class HiddenBeside(TensorState):
    """Keeps part of its state in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        beside = (
            self.memory
            if self.memory is not None and self.memory.shape[0] == x.shape[1]
            else self.zeros(x)
        )
        y, h = super().forward(x, state)
        self.memory = h.detach()
        return y + beside.sum(1, keepdim=True), h


class NormalisesTime(HidesLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class LooksAhead(HidesLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.cat([x[1:], torch.zeros_like(x[:1])]))


class SeesTheLastStep(HidesLayer):
    """A causal convolution without a state: wrong in chunks and after a reset."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.cat([torch.zeros_like(x[:1]), x[:-1]]))


class MixesLanes(HidesLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class ChangesInPlace(TensorState):
    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, h = super().forward(x, state)
        if state is not None and not state.requires_grad:
            state.copy_(h.detach())
        return y, h


class IgnoresInputs(HidesLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.zeros_like(x))


class DropsInEvaluation(HidesLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x))


class IgnoresItsState(Rotation):
    """Continues from an attribute that `initial_state` zeroes: wrong for one lane alone."""

    def initial_state(self, lanes: int) -> Tensor:
        self.memory = self.turn.new_zeros(lanes, HIDDEN)
        return self.memory.clone()

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, h = self.play(x, self.memory + 0 * state)
        self.memory = h.detach()
        return y, h


MUTANTS: list[tuple[type[nn.Module], str]] = [
    (DropsInEvaluation, "two equal calls in evaluation mode give different outputs"),
    (IgnoresInputs, "its outputs do not depend on its inputs"),
    (HiddenBeside, "depends on attributes beside its state"),
    (NormalisesTime, "changes the outputs of earlier steps"),
    (LooksAhead, "changes the outputs of earlier steps"),
    (SeesTheLastStep, "do not give what one call gives"),
    (IgnoresItsState, "cannot be carried"),
    (MixesLanes, "the inputs of one lane change another lane"),
    (ChangesInPlace, "a call changes the state that it gets, in place"),
]


@pytest.mark.parametrize(("make", "law"), MUTANTS)
def test_check_carry_fails_on_mutants(make: type[nn.Module], law: str) -> None:
    with pytest.raises(LawError, match=law):
        check_carry(remembering(make()), inputs(28, 3))


def test_check_carry_fails_where_resets_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Carried.forward

    def forward(net: Carried, x: Tensor, state: Any, _: Tensor | None = None) -> Any:
        return plain(net, x, state)

    monkeypatch.setattr(Carried, "forward", forward)
    with pytest.raises(LawError, match=r"^reset: a lane that is reset"):
        check_carry(named("lstm").net(), inputs(28, 3))
