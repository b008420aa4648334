"""`throughtime selftest`: laws that compare a device with plain PyTorch on the CPU."""

import json
from typing import Any

import pytest
import torch
import typer
from torch.overrides import _get_current_function_mode_stack

import throughtime as tt
from throughtime.app import cli, selftest
from throughtime.app.selftest import LAWS, TOLERANCES, Setting, run_law
from throughtime.carry import Carried
from throughtime.errors import ConfigError

CPU = torch.device("cpu")
NO_NUMBERS = {"laws of carrying"}  # these raise


@pytest.mark.parametrize("name", list(LAWS))
def test_every_law_compares_numbers_and_holds_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, deviation = list[torch.Tensor](), selftest._deviation

    def compared(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
        numbers.extend(expected)
        return deviation(got, expected)

    monkeypatch.setattr(selftest, "_deviation", compared)
    result = run_law(name, Setting(CPU, torch.float64))
    assert result.holds, result
    assert result.deviation < 1e-12
    assert bool(numbers) != (name in NO_NUMBERS)
    assert name in NO_NUMBERS or any(bool(value.count_nonzero()) for value in numbers)


def test_single_precision_holds() -> None:
    for name in ("tt.Exact", "tt.nn.GRU, Truncated, horizon", "tt.predict"):
        result = run_law(name, Setting(CPU, torch.float32))
        assert result.holds, result
        assert result.tolerance == TOLERANCES[torch.float32]


def wrong_outputs(y: Any, after: Any) -> Any:
    return y * 1.001, after


def wrong_state(y: Any, after: Any) -> Any:
    return y, tt.state.map_leaves(lambda leaf: leaf * 0.9, after)


@pytest.mark.parametrize("change", [wrong_outputs, wrong_state])
@pytest.mark.parametrize(
    "name",
    ["nn.LSTM, Truncated, horizon", "nn.RNN, Exact", "tt.predict", "tt.evaluate", "tt.reach"],
)
def test_a_device_that_computes_something_else_is_noticed(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Carried.forward

    def on_the_device(net: Any, *arguments: Any) -> Any:
        results = forward(net, *arguments)
        return results if _get_current_function_mode_stack() else change(*results)

    monkeypatch.setattr(Carried, "forward", on_the_device)
    assert not run_law(name, Setting(CPU, torch.float64)).holds


def test_an_error_on_the_device_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Setting) -> Any:
        raise RuntimeError("no such kernel\nsecond line")

    monkeypatch.setitem(LAWS, "fails", fails)
    result = run_law("fails", Setting(CPU, torch.float64))
    assert str(result) == "FAILS  float64  fails: RuntimeError: no such kernel"


@pytest.fixture
def two_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "LAWS", {n: LAWS[n] for n in ("tt.evaluate", "tt.predict")})


@pytest.mark.usefixtures("two_laws")
def test_the_command_prints_laws_and_ends_with_their_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(typer.Exit) as success:
        cli.selftest("cpu", as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert success.value.exit_code == 0
    assert lines[-1] == "4 of 4 hold on cpu"
    assert sum(line.startswith("holds  float64") for line in lines) == 2
    monkeypatch.setitem(selftest.TOLERANCES, torch.float64, -1.0)
    with pytest.raises(typer.Exit) as failure:
        cli.selftest("cpu", as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert failure.value.exit_code == 1
    assert facts["passed"] is False
    assert [law["holds"] for law in facts["laws"]] == [False, False, True, True]
    assert facts["torch"] == torch.__version__
    assert {"throughtime", "python", "system", "kernels", "device", "name", "cudnn"} <= facts.keys()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("meta", "device=meta: holds no numbers"),
        ("cpux", "device=cpux: cannot be used on this machine"),
        ("xpu", "device=xpu: cannot be used on this machine"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, message: str) -> None:
    if device == "xpu" and torch.xpu.is_available():
        pytest.skip("there is such a device here")
    with pytest.raises(ConfigError, match=message):
        selftest.available_device(device)


def test_the_default_device_is_the_accelerator_or_the_cpu() -> None:
    expected = torch.accelerator.current_accelerator() or CPU
    assert selftest.available_device(None) == expected
