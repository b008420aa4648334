"""Every law equals plain PyTorch on the CPU: on the mock device, and with compiled kernels."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mock_device import DEVICE, counted
from plain_laws import LAWS, Setting, deviation_of, numbers_of
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import ModelError, ThroughtimeError
from throughtime.testing import check_carry

LARGEST = {torch.float64: 1e-12, torch.float32: 1e-5}  # deviations


NO_NUMBERS = {"laws of carrying"}  # these raise


@pytest.mark.covering
@pytest.mark.parametrize("dtype", LARGEST, ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(LAWS))
def test_every_law_holds_and_is_computed_on_the_device(name: str, dtype: torch.dtype) -> None:
    with counted() as counts:
        deviation = deviation_of(name, Setting(DEVICE, dtype))
    assert deviation < LARGEST[dtype]
    assert counts.operators > 100


@pytest.mark.parametrize("name", list(LAWS))
def test_every_law_compares_numbers_and_holds_for_compiled_kernels(name: str) -> None:
    setting = Setting(torch.device("cpu"), torch.float64)
    assert deviation_of(name, setting) < 1e-12
    values = numbers_of(name, setting)
    assert bool(values) != (name in NO_NUMBERS)
    assert name in NO_NUMBERS or any(bool(value.count_nonzero()) for value in values)


def wrong_outputs(y: Any, after: Any) -> Any:
    return y * 1.001, after


def wrong_state(y: Any, after: Any) -> Any:
    return y, tt.state.map_leaves(lambda leaf: leaf * 0.9, after)


@pytest.mark.parametrize("change", [wrong_outputs, wrong_state])
@pytest.mark.parametrize(
    "name",
    ["nn.RNN, Exact", "tt.predict"],
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


def test_inputs_on_another_device_than_the_weights_are_named_as_that() -> None:
    class User(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0])

    net, x = tt.carry(User().to(DEVICE)), torch.randn(5, 2, 3)
    with pytest.raises(ModelError, match=r"inputs are on cpu, the weights of User on mock:0"):
        net(x, net.initial_state(lanes=2, like=x))
    assert check_carry(net, x)  # which moves the inputs


def test_a_net_on_the_device_is_exported_as_from_the_cpu(tmp_path: Path) -> None:
    inputs, numbers = torch.randn(200, 3), list[Tensor]()
    for device in (torch.device("cpu"), DEVICE):
        torch.manual_seed(0)
        net = tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2)).to(device))
        path = tmp_path / f"{device.type}.c"
        tt.export(net, path, inputs=inputs, steps=1000)
        tt.export(net, path.with_suffix(".onnx"), inputs=inputs, steps=1000)
        texts = re.findall(r"-?0x[0-9a-f.]+p[+-]?\d+", path.read_text(encoding="utf-8"))
        numbers.append(torch.tensor([float.fromhex(text) for text in texts]))
        assert all(weight.device == device for weight in net.parameters())
    assert len(numbers[0]) > 100  # the weights, and outputs that the file is checked by
    torch.testing.assert_close(numbers[1], numbers[0], rtol=1e-5, atol=1e-6)
