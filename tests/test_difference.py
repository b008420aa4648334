"""Outputs that are changes from the present: in carried nets, live nets and exported files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import throughtime as tt
from throughtime.deploy.session import Session
from throughtime.errors import ConfigError, ModelError

LEVEL = torch.tensor([20.0, -3.0, 0.0])


def walks(steps: int, lanes: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(steps, lanes, 3).cumsum(0) / 10 + LEVEL


def layered(layer: Any, outputs: int = 2) -> nn.Sequential:
    first = tt.nn.Standardise(3, steps=40)
    return nn.Sequential(first, layer, nn.Linear(layer.hidden_size, outputs))


@given(columns=st.lists(st.integers(0, 2), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_outputs_are_those_of_the_module_and_the_inputs_of_the_same_step(
    columns: list[int], seed: int
) -> None:
    """Mutants: the inputs of the step before, those of the first columns."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.GRU(3, 4), nn.Linear(4, len(columns))).double()
    x, plain = walks(30, 2).double(), tt.carry(inner)
    net = tt.carry(tt.nn.Difference(inner, columns=columns))
    assert max(law.deviation for law in tt.testing.check_carry(net, x[:28])) < 1e-9
    y, after = net(x, net.initial_state(2))
    changes, expected = plain(x, plain.initial_state(2))
    assert torch.equal(y, changes + x[..., columns])
    assert torch.equal(after["module"]["0"], expected["0"])
    before = changes[1:] + x[:-1, ..., columns]
    assert not torch.allclose(y[1:], before)


@pytest.mark.parametrize("name", ["net.onnx", "net.c"])
def test_exported_files_add_the_inputs_as_the_net_does(name: str, tmp_path: Path) -> None:
    x = walks(300)
    net = tt.carry(tt.nn.Difference(layered(nn.LSTM(3, 8)), columns=[0, 2]), x).eval()
    written = tt.export(net, tmp_path / name, inputs=x, steps=2_000)
    assert written.verification is not None
    assert written.verification.error < 1e-5
    expected, _ = tt.predict(net, x[:, 0])
    assert abs(expected - x[:, 0, [0, 2]]).max() < 10  # and the level is 20
    if name == "net.onnx":
        session = Session(tmp_path / name)
        steps = np.concatenate([session.step(row.numpy()) for row in x])
        np.testing.assert_allclose(steps, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_added_is_refused(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.LSTM(3, 8), nn.Linear(8, 2))
    for columns in ([], [-1], [True], [0.5]):
        with pytest.raises(ConfigError, match="expected for each output the index"):
            tt.nn.Difference(inner, columns=columns)  # pyright: ignore[reportArgumentType]
    x = walks(20)
    for columns, message in (([0], "1 columns, and its module 2"), ([0, 3], "input column 3")):
        net = tt.carry(tt.nn.Difference(inner, columns=columns))
        with pytest.raises(ModelError, match=message):
            net(x, net.initial_state(1))
    net = tt.carry(tt.nn.Difference(inner, columns=[0, 1]))
    for name in ("net.nam", "net.json"):
        with pytest.raises(ModelError, match=r"tt\.nn\.Difference"):
            tt.export(net, tmp_path / name, inputs=x)
