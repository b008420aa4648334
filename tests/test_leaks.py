"""No recording's outputs depend on another's; every reset sets the initial state.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import (
    FEATURES,
    HIDDEN,
    Row,
    TensorState,
    inputs,
    lawless,
    named,
    recordings,
    some_nets,
)
from throughtime.carry import Carried
from throughtime.errors import DataError, LawError, ModelError
from throughtime.testing import check_no_leak

LENGTHS = [31, 7, 20, 5, 11]


def stream_of(lanes: int = 2, **options: Any) -> tt.Stream:
    return tt.Stream(recordings(LENGTHS), lanes, 7, **options)


@some_nets("lstm", "dict-state", "hides-layer")
def test_every_net_leaks_nothing_on_a_stream(row: Row) -> None:
    reports = check_no_leak(stream_of(), row.net())
    assert len(reports) == 3
    for report in reports:
        assert (report.deviation, report.others) == (0.0, 4)
        assert report.own_deviation > 1e-3
        assert report.followers > 0
        assert report.steps == sum(LENGTHS) - LENGTHS[int(report.recording[1:])]


class IgnoresResets(Carried):
    """A mutant: it never hears of resets."""

    def forward(
        self, x: Tensor, state: Any = None, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        del resets
        return super().forward(x, state)


class KeepsState(TensorState):
    """A mutant: besides the state that it returns it keeps a mean of what it saw."""

    mean = torch.zeros(FEATURES)  # of the class: what an object holds is put back after a call

    def initial_state(self, lanes: int) -> Tensor:
        return torch.zeros(lanes, HIDDEN, dtype=torch.float64)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        KeepsState.mean = 0.9 * self.mean.to(x) + 0.1 * x.detach().mean((0, 1))
        return super().forward(x + self.mean, state)


class MixesLanes(TensorState):
    """A mutant: subtracts the mean over lanes, as BatchNorm in training mode does."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(x - x.mean(1, keepdim=True), state)


def ignoring() -> Carried:
    net = named("tensor-state").net()
    return IgnoresResets(net.module, net.adapter)


def breaking(make: Callable[[], nn.Module]) -> Carried:
    return lawless(tt.carry(make().double()), inputs(3, 2))


MUTANTS: dict[str, tuple[Callable[[], Carried], int, str]] = {
    "ignores resets": (ignoring, 1, "It plays after it on a lane: a reset ignored"),
    "keeps a state": (lambda: breaking(KeepsState), 1, "a state kept in the module"),
    "mixes lanes": (lambda: breaking(MixesLanes), 5, "BatchNorm or another mean over lanes"),
}


@pytest.mark.parametrize(("make", "lanes", "cause"), list(MUTANTS.values()), ids=list(MUTANTS))
def test_leak_is_reported_with_recordings_position_size_and_cause(
    make: Callable[[], Carried], lanes: int, cause: str
) -> None:
    message = r"'r\d' leaks into 'r\d'.* move by .* first at its step \d+ \(lane \d, step"
    with pytest.raises(LawError, match=message) as e:
        check_no_leak(stream_of(lanes), make())
    assert cause in str(e.value)


class Blind(nn.Module):
    """A net that ignores its inputs."""

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x.new_zeros(*x.shape[:2], 1), x.new_zeros(x.shape[1], 1) if state is None else state


def test_a_check_without_meaning_is_refused() -> None:
    net = named("gru").net()
    with pytest.raises(ModelError, match=r"tt\.carry"):
        check_no_leak(stream_of(), nn.GRU(3, 4))  # pyright: ignore[reportArgumentType]
    with pytest.raises(LawError, match="change none of its own outputs"):
        check_no_leak(stream_of(), breaking(Blind))
    with pytest.raises(DataError, match="no other that it could leak"):
        check_no_leak(tt.Stream(recordings([9]), 3, 4), net)
    wrongs: list[dict[str, Any]] = [
        *({"recordings": names} for names in ([7], [])),
        {"recordings": ["r9"], "steps": 40},
        {"steps": 0},
    ]
    for options in wrongs:
        with pytest.raises(DataError, match="expected"):
            check_no_leak(stream_of(), net, **options)
