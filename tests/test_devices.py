"""One module asks for the kind of a device, and only the device in use is touched.

Laws of the numbers on another device than the CPU are in `tests/device`.
"""

from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import throughtime as tt
from throughtime.testing import check_no_leak


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs that no test may touch."""

    train_and_check()  # torch._dynamo lists torch's functions once, which must be the real ones

    def touched(*_: Any) -> NoReturn:
        raise AssertionError("a GPU was touched, and the net is on the CPU")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)


def stream() -> tt.Stream:
    recordings = [{"inputs": torch.randn(n, 3), "targets": torch.randn(n, 1)} for n in (30, 20)]
    return tt.Stream(recordings, lanes=2, chunk=10)


def train_and_check() -> None:
    layers = nn.LSTM(3, 4, 2, dropout=0.3), nn.Dropout(0.2), nn.Linear(4, 1)
    net = tt.carry(nn.Sequential(*layers))
    policies: list[Any] = [tt.Exact(), tt.Truncated(5, 15)]
    for policy in policies:
        losses = [u.loss for u in tt.updates(net, stream(), nn.MSELoss(), gradient=policy)]
        assert losses
    check_no_leak(stream(), net)


@pytest.mark.usefixtures("eight_gpus")
def test_a_net_on_the_cpu_touches_no_gpu() -> None:
    train_and_check()
