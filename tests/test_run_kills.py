"""Runs killed at random moments, and runs on a full disk: nothing is lost.

`THROUGHTIME_KILLS=5` kills each of the ten runs five times; the default is once.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from processes import elsewhere, torchrun
from test_run import (
    COMMAND,
    _lines,
    command,
    finish,
    flags,
    limited,
    settings,
    write_recordings,
)
from test_run import stop_at as stop_run_at
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import Config
from throughtime.app.train import Training

KILLS = int(os.environ.get("THROUGHTIME_KILLS", "1"))
PATIENCE = 300.0
RUNS: dict[str, dict[str, Any]] = {
    "stream": {},
    "horizon": {"horizon": 25, "model": "gru", "layers": 2},
    "epochs": {"epochs": 12 * KILLS, "updates": None, "warm_up": 5},
    "exact": {"gradient": "exact", "cut_every": 25, "stride": None},
    "last": {"model": "{masked}", "layers": 2, "dtype": "float64", "keep": "last"},
    "float64": {"dtype": "float64", "weight_decay": 0.1},
    "hand-off": {"hand_off": True, "lanes": 3},
    "schedule": {"task": "regress", "schedule": "cosine"},
    "ranks": {"lanes": 4, "horizon": 25},
    "ranks exact": {"lanes": 4, "gradient": "exact", "cut_every": 25, "stride": None},
}


MASKED = """
from torch import nn


class Masked(nn.Module):
    def __init__(self, inputs, outputs, layers):
        super().__init__()
        self.gru = nn.GRU(inputs, 8, layers, dropout=0.5)
        self.out = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, outputs))

    def forward(self, x, state=None):
        y, state = self.gru(x, state)
        return self.out(y), state
"""


def started(words: list[str], name: str) -> "subprocess.Popen[Any]":
    """The command, on two ranks if the name says so, in a group of processes of its own."""
    two = [*torchrun(2), "-m", "throughtime"] if name.startswith("ranks") else command()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*two, *words], env=environment, start_new_session=True, **quiet)


def killed(process: "subprocess.Popen[Any]", folder: RunFolder, draw: random.Random) -> bool:
    """Whether the process was killed, and not over before, at a random moment of its training."""
    before = folder.metrics.stat().st_mtime_ns if folder.metrics.exists() else 0
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if folder.metrics.exists() and folder.metrics.stat().st_mtime_ns != before:
            break
        time.sleep(0.01)
    time.sleep(draw.uniform(0.0, 2.5))
    over = process.poll() is not None
    if not over:
        # the ranks that torchrun starts have sessions of their own, and would train on
        subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return not over


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path: Path, name: str) -> None:
    data = write_recordings(tmp_path / "data", (4000, 2500, 300))
    values = {"updates": 500 * KILLS, "valid_every": 50, "checkpoint_every": 0.2, **RUNS[name]}
    masked = tmp_path / "masked.py"
    masked.write_text(MASKED, encoding="utf-8")
    values["model"] = str(values.get("model", "lstm")).format(masked=f"{masked}:Masked")
    whole, folder = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "killed")
    assert started(arguments(settings(data, whole.path, **values)), name).wait(PATIENCE) == 0
    words = arguments(settings(data, folder.path, **values))
    draw, kills = random.Random(name), 0
    while kills < KILLS:
        kills += killed(started(words, name), folder, draw)
        words = ["train", "--resume", str(folder.path)]
        if folder.checkpoint.exists() and _is_finished(folder):
            break
    assert kills
    print(f"{name}: {kills} kills")
    assert started(words, name).wait(PATIENCE) == 0
    assert folder.model.read_bytes() == whole.model.read_bytes()
    assert _lines(folder) == _lines(whole)


def arguments(values: dict[str, Any]) -> list[str]:
    """The settings as flags; one that is true has no value."""
    named = {key: value for key, value in values.items() if value not in (None, True)}
    return flags(named) + [f"--{k.replace('_', '-')}" for k, v in values.items() if v is True]


def _is_finished(folder: RunFolder) -> bool:
    saved = folder.read_checkpoint()
    return saved is not None and saved["done"]["finished"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.2, 0.4, 0.6, 0.9, 0.999])
def test_on_a_full_disk_nothing_is_lost(tmp_path: Path, share: float) -> None:
    """The system refuses files above a share of the size of the checkpoint.

    A share of 0 would refuse the messages as well, which the process writes to a file.
    """
    data = write_recordings(tmp_path / "data")
    values = settings(data, tmp_path / "run", hidden=32)
    whole = finish(values | {"out": str(tmp_path / "whole")})
    folder = stop_run_at(Training.begin(Config(**values)), 30).folder
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    size = int(share * folder.checkpoint.stat().st_size)
    commands = {
        folder: ["train", "--resume", str(folder.path)],
        RunFolder(tmp_path / "new"): flags(values | {"out": str(tmp_path / "new")}),
    }
    for words in commands.values():
        full = limited(size, *words)
        assert full.code == 2, full.errors
        assert "File too large" in full.errors
        assert "Traceback" not in full.errors
    log = before.pop("metrics.jsonl")
    assert (folder.path / "metrics.jsonl").read_bytes()[: len(log)] == log
    assert {name: (folder.path / name).read_bytes() for name in before} == before
    assert not list(folder.path.glob("*.tmp"))
    for out, words in commands.items():
        free = elsewhere(COMMAND, *words)
        assert free.code == 0, free.errors
        assert out.model.read_bytes() == whole.model.read_bytes()
        assert _lines(out) == _lines(whole)
