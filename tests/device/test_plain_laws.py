"""Every law equals plain PyTorch on the CPU: on the mock device, and with compiled kernels."""

from typing import Any

import pytest
import torch
from mock_device import DEVICE, counted
from plain_laws import LAWS, Setting, deviation_of
from torch.overrides import _get_current_function_mode_stack

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import ThroughtimeError

LARGEST = {torch.float64: 1e-12, torch.float32: 1e-5}  # deviations


@pytest.mark.covering
@pytest.mark.parametrize("dtype", LARGEST, ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(LAWS))
def test_every_law_holds_and_is_computed_on_the_device(name: str, dtype: torch.dtype) -> None:
    with counted() as counts:
        deviation = deviation_of(name, Setting(DEVICE, dtype))
    assert deviation < LARGEST[dtype]
    assert counts.operators > 100


@pytest.mark.parametrize("name", ["tt.Truncated, jitter", "tt.Exact", "tt.Randomized"])
def test_a_default_device_changes_nothing(name: str) -> None:
    torch.set_default_device(DEVICE)
    try:
        assert deviation_of(name, Setting(DEVICE, torch.float64)) < 1e-12
    finally:
        torch.set_default_device(None)


def wrong_outputs(y: Any, after: Any) -> Any:
    return y * 1.001, after


def wrong_state(y: Any, after: Any) -> Any:
    return y, tt.state.map_leaves(lambda leaf: leaf * 0.9, after)


@pytest.mark.parametrize("change", [wrong_outputs, wrong_state])
@pytest.mark.parametrize(
    "name",
    ["nn.GRU, Exact", "tt.predict"],
)
def test_a_device_that_computes_something_else_is_noticed(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Carried.forward

    def on_the_device(net: Any, *arguments: Any) -> Any:
        results = forward(net, *arguments)
        return results if _get_current_function_mode_stack() else change(*results)

    monkeypatch.setattr(Carried, "forward", on_the_device)
    with pytest.raises((AssertionError, ThroughtimeError)):  # tt.Exact compares two passes
        assert deviation_of(name, Setting(torch.device("cpu"), torch.float64)) < 1e-8
