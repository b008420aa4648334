"""Standardisation by the first steps of a recording, as they arrive, and by whole recordings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import throughtime as tt
from test_cli import run
from throughtime.deploy.session import Session
from throughtime.errors import ModelError
from throughtime.nn.affine import Standardise

SCALE, LEVEL = torch.tensor([5.0, 0.1, 100.0]), torch.tensor([1000.0, -3.0, 0.0])


def sensors(steps: int, lanes: int = 1) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(steps, lanes, 3) * SCALE + LEVEL


@given(steps=st.integers(1, 12), length=st.integers(1, 20), seed=st.integers(0, 99))
def test_a_step_is_standardised_by_the_steps_so_far(steps: int, length: int, seed: int) -> None:
    """Mutants: a step by those before it alone, statistics that go on after `steps` steps."""
    x = torch.from_numpy(np.random.default_rng(seed).normal(7, 3, (length, 2, 3)))
    y, state = Standardise(3, steps=steps).double()(x)
    for t in range(length):
        seen = x[: min(t + 1, steps)]
        deviation = seen.std(0, correction=0)
        expected = (x[t] - seen.mean(0)) / torch.where(deviation > 0, deviation, 1)
        torch.testing.assert_close(y[t], expected, rtol=1e-9, atol=1e-9)
    assert state["count"].tolist() == [[min(length, steps)]] * 2


def test_a_column_that_does_not_change_is_zero() -> None:
    y, _ = Standardise(1, steps=9)(torch.full((20, 1, 1), 1e6))
    assert y.abs().max() == 0


def test_chunks_and_resets_give_what_each_recording_alone_gives() -> None:
    net = tt.carry(nn.Sequential(Standardise(3, steps=10), nn.GRU(3, 5))).double()
    laws = tt.testing.check_carry(net, sensors(28, 2).double())
    assert max(law.deviation for law in laws) < 1e-9


@pytest.mark.parametrize("name", ["net.onnx", "net.c", "net.js"])
def test_exported_files_count_as_the_net_does(name: str, tmp_path: Path) -> None:
    """Each file is verified against the net; ONNX and a live net also step by step."""
    x = sensors(300)
    net = nn.Sequential(Standardise(3, steps=40), nn.GRU(3, 4, num_layers=2), nn.Linear(4, 2))
    net = tt.carry(net, x).eval()
    written = tt.export(net, tmp_path / name, inputs=x, steps=2_000)
    assert written.verification is not None
    assert written.verification.error < 1e-5
    if name == "net.onnx":
        expected, _ = tt.predict(net, x[:, 0])
        for live in (tt.Predictor(net), Session(tmp_path / name)):
            steps = np.concatenate([np.asarray(live.step(row.numpy())) for row in x])
            np.testing.assert_allclose(steps, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def offsets(tmp_path_factory: Any) -> Path:
    """Recordings with levels and scales of their own, far apart, and anomalies within them."""
    folder, draw = tmp_path_factory.mktemp("offsets"), np.random.default_rng(0)
    lines = ["id,split,inputs"]
    for i in range(20):
        state = np.zeros(900, int)
        begin = draw.integers(450, 650)
        state[begin : begin + 200] = 1
        x = draw.normal(size=(900, 3)) * 0.5 + state[:, None] * np.array([1.5, -1.5, 1.0])
        x = x * np.exp(draw.normal(size=3) * 0.3) + draw.normal(size=3) * 20
        rows = [f"{u:.4f},{v:.4f},{w:.4f},{s}" for (u, v, w), s in zip(x, state, strict=True)]
        (folder / f"r{i}.csv").write_text("\n".join(["u,v,w,anomaly", *rows]))
        lines.append(f"r{i},{'train' if i < 12 else 'valid' if i < 15 else 'test'},r{i}.csv")
    (folder / "recordings.csv").write_text("\n".join(lines))
    return folder


def test_whole_recordings_are_no_inputs_of_a_live_net(offsets: Path, tmp_path: Path) -> None:
    options = ("--targets", "anomaly", "--updates", "2", "--standardise", "recording")
    run("train", offsets, *options, "--out", tmp_path / "run")
    net = tt.load_run(tmp_path / "run").net
    with pytest.raises(ModelError, match="Train it with --standardise first:400"):
        tt.Predictor(net).step(np.zeros((1, 3)))
    said = run("export", tmp_path / "run", "--out", tmp_path / "net.onnx", ok=False)
    assert "Train it with --standardise first:400" in said
    run("predict", tmp_path / "run", offsets / "r19.csv", "--out", tmp_path / "p.npy")
    said = run("train", offsets, *options[:-1], "last:3", "--out", tmp_path / "no", ok=False)
    assert "--standardise last:3: expected split, recording, none or first:N" in said
