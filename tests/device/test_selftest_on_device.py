"""`throughtime selftest` on the mock device: every law equals plain PyTorch on the CPU."""

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from mock_device import DEVICE, counted
from torch import Tensor, nn

import throughtime as tt
from throughtime.app import cli, selftest
from throughtime.app.selftest import LAWS, Setting, run_law
from throughtime.errors import ConfigError, ModelError
from throughtime.testing import check_carry

LARGEST = {torch.float64: 1e-12, torch.float32: 1e-5}  # deviations


@pytest.mark.covering
@pytest.mark.parametrize("dtype", LARGEST, ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(LAWS))
def test_every_law_holds_and_is_computed_on_the_device(name: str, dtype: torch.dtype) -> None:
    with counted() as counts:
        result = run_law(name, Setting(DEVICE, dtype))
    assert result.holds, result
    assert result.deviation < LARGEST[dtype]
    assert counts.operators > 100


def test_the_command_takes_the_accelerator_by_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "LAWS", {"tt.predict": LAWS["tt.predict"]})
    with pytest.raises(typer.Exit) as success:
        cli.selftest(None, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert success.value.exit_code == 0
    assert (facts["device"], facts["name"], facts["devices"]) == ("mock", "mock", 2)
    assert [law["dtype"] for law in facts["laws"]] == ["float64", "float32"]
    with pytest.raises(ConfigError, match="device=mock:7: cannot be used on this machine"):
        cli.selftest("mock:7")


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
