"""Settings: written, read back, and refused by name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from throughtime.app.cli import as_flags
from throughtime.app.config import make_config, read_toml
from throughtime.errors import ConfigError


def test_config_survives_its_own_toml(tmp_path: Path) -> None:
    config = make_config(
        {
            "data": 'a "b" ü.csv',
            "task": "regress",
            "out": "x",
            "inputs": ["u", "v,w"],
            "horizon": 300,
            "lr": 1,
        }
    )
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert make_config(read_toml(path)) == config


def test_ranks_that_share_the_lanes_evenly_are_taken() -> None:
    config = make_config(
        {
            "data": "d",
            "task": "classify",
            "out": "o",
            "strategy": "ddp",
            "devices": 4,
            "nodes": 2,
            "lanes": 16,
        }
    )
    assert (config.strategy, config.devices, config.nodes, config.lanes) == ("ddp", 4, 2, 16)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hiden": 3}, "unknown key 'hiden', did you mean 'hidden'?"),
        ({"task": "clasify"}, "task='clasify': expected one of 'classify', 'regress'"),
        ({"lanes": "four"}, "lanes='four': expected a whole number"),
        ({"lanes": True}, "lanes=True: expected a whole number"),
        ({"lanes": 0}, "lanes=0: expected at least 1"),
        ({"lr": float("nan")}, "lr=nan: expected a finite number above 0"),
        ({"updates": 3, "epochs": 1}, "updates=3 and epochs=1 are both given"),
        ({"inputs": 3}, "inputs=3: expected a list of column names"),
        ({"data": None}, "'data' is missing"),
        ({"strategy": "fsdp"}, "strategy='fsdp': expected one of 'single', 'ddp'"),
        ({"devices": 2}, "devices=2: several processes need strategy='ddp'"),
        ({"devices": 2, "nodes": 3}, "devices=2 and nodes=3: several processes need"),
        ({"strategy": "ddp", "devices": 0}, "devices=0: expected at least 1"),
        (
            {"strategy": "ddp", "devices": 2, "nodes": 2, "lanes": 6},
            "expected a multiple of 4, such as 4 or 8",
        ),
        (
            {"strategy": "ddp", "devices": 3, "lanes": 2},
            (
                "each of 3 ranks (devices=3 on each of nodes=1) plays the same number: expected a"
                " multiple of 3, such as 3"
            ),
        ),
        (
            {"strategy": "ddp", "device": "cuda:1"},
            (
                "device='cuda:1' with strategy='ddp': expected 'cpu', or 'cuda' and each process"
                " takes its own GPU"
            ),
        ),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({"data": "d", "task": "classify", "out": "o"} | wrong)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("message", "arguments", "shown"),
    [
        ("lanes=0: expected at least 1", "train d --lanes 0", "--lanes 0: expected at least 1"),
        ("max_norm=-1.0 and lr=0.0", "train d --lr 0", "--max-norm -1.0 and --lr 0.0"),
        ("offset=3, and hand_off=True passes", "train d", "--offset 3, and --hand-off passes"),
        ("'task' is missing, 'data' is missing", "train", "--task is missing, DATA is missing"),
        ("r.toml: lanes=0", "train --config r.toml", "r.toml: lanes=0"),
        ("r/config.toml: lanes=0", "train --resume=r", "r/config.toml: lanes=0"),
        ("age=63 and 'note' is missing", "predict r d", "age=63 and 'note' is missing"),
    ],
)
def test_settings_in_messages_are_flags_unless_a_file_sets_them(
    message: str, arguments: str, shown: str
) -> None:
    assert as_flags(message, arguments.split()) == shown


def test_all_wrong_settings_are_listed_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'strid'.*unknown key 'hiden'.*'task' is missing"
    ):
        make_config({"data": "d", "out": "o", "strid": 1, "hiden": 2})


def test_help_needs_no_torch_and_ranks_no_lightning() -> None:
    code = "import sys, throughtime.app.cli; assert not {'torch', 'numpy', 'rich'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
    ranks = "import sys, throughtime.app.distributed; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", ranks], check=True)
