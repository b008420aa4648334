"""Every law equals plain PyTorch on the CPU: on the mock device, and with compiled kernels."""

import pytest
import torch
from mock_device import DEVICE, counted
from plain_laws import LAWS, Setting, deviation_of

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
