"""The user's own module as FILE.py:Class: trained, resumed, evaluated from the run's copy."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from test_cli import ended, run
from test_run import finish, flags, goes_on, settings, write_recordings
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import ConfigError, ModelError, RunError, ThroughtimeError

CODE = '''
"""Modules as people write them."""
import torch
from torch import nn


class Explicit(nn.Module):
    """Batch first, the state an argument and a result."""

    def __init__(self, inputs, outputs, hidden=3, layers=1):
        super().__init__()
        self.rnn = nn.GRU(inputs, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x, state=None):
        y, state = self.rnn(x, state)
        return self.out(torch.relu(y)), state


class Hidden(nn.Module):
    """Drops the state of its layer; batch norm has buffers that training changes."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.lstm = nn.LSTM(inputs, 7)
        self.norm = nn.LayerNorm(7)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))
        self.out = nn.Linear(7, outputs)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.out(self.drop(self.norm(y)))


class Cell(nn.Module):
    """Loops over time by hand."""

    def __init__(self, *, outputs, inputs, hidden):
        super().__init__()
        self.hidden = hidden
        self.cell = nn.GRUCell(inputs, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x, h=None):
        if h is None:
            h = x.new_zeros(x.shape[1], self.hidden)
        rows = []
        for step in x:
            h = self.cell(step, h)
            rows.append(self.out(h))
        return torch.stack(rows), h


class Any(Explicit):
    def __init__(self, **sizes):
        super().__init__(**sizes)


class Vocabulary(nn.Module):
    def __init__(self, inputs, vocabulary, width):
        super().__init__()


class Narrow(Explicit):
    def __init__(self, inputs, hidden):
        super().__init__(inputs, hidden, hidden)


class Weightless(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()

    def forward(self, x, h=None):
        h = x.new_zeros(x.shape[1], 3) if h is None else h
        rows = []
        for step in x:
            h = h * 0.5 + step.sum(1, keepdim=True)
            rows.append(h)
        return torch.stack(rows), h


class Backwards(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.rnn = nn.GRU(inputs, 4, bidirectional=True)
        self.out = nn.Linear(8, outputs)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class Fails(nn.Module):
    def __init__(self, inputs):
        raise ValueError("no GPU here")


class Plain:
    def __init__(self, inputs):
        pass


def function(inputs):
    return Explicit(inputs, 3)
'''


SIZES: dict[str, dict[str, Any]] = {
    "Explicit": {"hidden": 5, "layers": 2},
    "Hidden": {},
    "Cell": {"hidden": 5},
    "Any": {"hidden": 5, "layers": 2},
}


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "nets.py"
    path.parent.mkdir()
    path.write_text(CODE, encoding="utf-8")
    return path


def scored(folder: RunFolder, split: str = "valid") -> str:
    run("eval", folder.path, "--split", split)
    return (folder.path / f"scores-{split}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "task"), list(zip(SIZES, ["classify", "regress"] * 2, strict=True))
)
def test_a_module_of_ones_own_is_trained_resumed_and_scored(
    tmp_path: Path, code: Path, name: str, task: str
) -> None:
    more: dict[str, Any] = {"model": f"{code}:{name}", "task": task, "updates": 12, "lr": 0.01}
    whole = goes_on(tmp_path, 7, **more, keep="last", **SIZES[name])
    net, spec = load_model(whole.model)
    assert spec.model == f"nets.py:{name}"
    layer = next(m for m in net.modules() if isinstance(m, (torch.nn.RNNBase, torch.nn.GRUCell)))
    assert layer.input_size == 2
    assert layer.hidden_size == (7 if name == "Hidden" else 5)
    assert getattr(layer, "num_layers", 1) == SIZES[name].get("layers", 1)
    assert spec.update == 12


def test_a_run_finds_its_module_again_from_its_own_copy(
    tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_recordings(tmp_path / "data")
    monkeypatch.chdir(code.parent)
    values = settings(data, tmp_path / "run", model="nets.py:Explicit", updates=5, keep="last")
    folder = finish(values)
    assert folder.read_config().model == "nets.py:Explicit"
    before = scored(folder)
    code.write_text(CODE.replace("torch.relu(y)", "0 * y"), encoding="utf-8")
    assert scored(folder) == before
    Training.resume(folder.path, updates=6).run()
    assert folder.read_config().model == "nets.py:Explicit"
    code.unlink()
    moved = RunFolder(Path(shutil.move(folder.path, tmp_path / "moved")))
    run("predict", moved.path, data / "0_x.npy", "--out", tmp_path / "p.npy")
    assert np.load(tmp_path / "p.npy").shape == (400, 3)
    audit = run("audit", moved.path, "--horizons", "10", "--steps", "40", "--max-lag", "10")
    assert "worst parameter" in audit
    page = moved.report.read_text(encoding="utf-8")
    assert f"nets.py:Explicit (SHA-256 {load_model(moved.model)[1].sha256})" in page
    Training.resume(moved.path, updates=7).run()
    copy = moved.path / "nets.py"
    copy.write_text(CODE + "\n# edited\n", encoding="utf-8")
    with pytest.raises(RunError, match=r"nets\.py: the code of the model is missing or has"):
        load_model(moved.model)
    with pytest.raises(RunError, match=r"nets\.py: its class Explicit is code that you have not"):
        Training.resume(moved.path)
    with pytest.raises(RunError, match="has changed since the checkpoint: code of model was"):
        Training.resume(moved.path, trust_code=True).run()
    copy.unlink()
    with pytest.raises(RunError, match=r"nets\.py: the code of the model is missing or has"):
        load_model(moved.model)


@pytest.mark.parametrize(
    ("name", "error", "output"),
    [
        ("nets.py:Missing", ConfigError, "nets.py defines no class Missing"),
        ("nets.py:function", ConfigError, "nets.py defines no class function"),
        ("other.py:Net", ConfigError, "no such file"),
        ("nets.py:Plain", ConfigError, "Plain: is no torch.nn.modules.module.Module"),
        (
            "nets.py:Vocabulary",
            ConfigError,
            "missing 2 required positional arguments: 'vocabulary' and 'width'",
        ),
        ("nets.py:Fails", ConfigError, "Fails fails with ValueError: no GPU here"),
        (
            "nets.py:Narrow",
            ConfigError,
            "returns (5, 1, 64) for 5 steps of 1 lane, expected (5, 1,",
        ),
        ("nets.py:Weightless", ConfigError, "has no weights, so there is nothing to train"),
        ("nets.py:Backwards", ModelError, "layer 'rnn' is bidirectional"),
        (
            "lstn",
            ConfigError,
            "--model lstn: expected lstm or gru or rnn or FILE.py:Class",
        ),
        ("imports.py:Net", ConfigError, "it is loaded by its path alone"),
    ],
)
def test_a_module_that_cannot_be_trained_is_refused_with_what_to_change(
    tmp_path: Path, code: Path, name: str, error: type[ThroughtimeError], output: str
) -> None:
    (code.parent / "imports.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    data = write_recordings(tmp_path / "data")
    model = str(code.parent / name) if ".py" in name else name
    with pytest.raises(error) as refused:
        Training.begin(Config(**settings(data, tmp_path / "run", model=model)))
    assert output in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": "{code}:Hidden", "layers": 3}, "constructor names no layers, which"),
        (
            {"loss": "{code}:Unweighted", "class_weights": "balanced"},
            "constructor names no weight, which",
        ),
    ],
)
def test_a_setting_that_a_class_of_ones_own_does_not_take_is_refused(
    tmp_path: Path, code: Path, more: dict[str, Any], said: str
) -> None:
    with code.open("a", encoding="utf-8") as file:
        file.write("\n\nclass Unweighted(nn.CrossEntropyLoss):\n    def __init__(self):\n")
        file.write("        super().__init__()\n")
    data = write_recordings(tmp_path / "data")
    more = {k: v.format(code=code) if isinstance(v, str) else v for k, v in more.items()}
    with pytest.raises(ConfigError) as refused:
        Training.begin(Config(**settings(data, tmp_path / "run", **more)))
    assert said in str(refused.value)


def test_an_error_in_code_of_ones_own_is_one_line_that_names_its_last_line(
    tmp_path: Path, code: Path
) -> None:
    with code.open("a", encoding="utf-8") as file:
        file.write("\n\nclass Wrong(Explicit):\n    def forward(self, x, state=None):\n")
        file.write("        y, state = super().forward(x, state)\n")
        file.write("        if torch.is_grad_enabled() and self.training and x.shape[1] > 7:\n")
        file.write("            y = y @ y\n        return y, state\n")
    number = code.read_text(encoding="utf-8").splitlines().index("            y = y @ y") + 1
    values = settings(write_recordings(tmp_path / "data"), tmp_path / "run")
    code_, _, said = ended(*flags(values | {"model": f"{code}:Wrong"}))
    assert code_ == 2, said
    assert said.count("\n") == 1
    assert f"{code}, line {number}: RuntimeError: " in said
    assert said.endswith("; mend your code there\n")
