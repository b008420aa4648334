"""Settings: written, read back, and refused by name."""

from pathlib import Path
from typing import Any

import pytest

from throughtime.errors import ConfigError
from throughtime.run.config import make_config, read_toml


def test_config_survives_its_own_toml(tmp_path: Path) -> None:
    config = make_config({"data": 'a "b" ü.csv', "task": "regress", "out": "x", "inputs": ["u", "v,w"], "horizon": 300, "lr": 1})
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert make_config(read_toml(path)) == config


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hiden": 3}, "unknown key 'hiden', did you mean 'hidden'?"),
        ({"task": "clasify"}, "task='clasify': expected one of 'classify', 'regress'"),
        ({"lanes": "four"}, "lanes='four': expected a whole number"),
        ({"lanes": True}, "lanes=True: expected a whole number"),
        ({"lanes": 0}, "lanes=0: expected at least 1"),
        ({"lr": float("nan")}, "lr=nan: expected a finite number above 0"),
        ({"updates": 3, "epochs": 1}, "updates and epochs are both given"),
        ({"inputs": 3}, "inputs=3: expected a list of column names"),
        ({"data": None}, "'data' is missing"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({"data": "d", "task": "classify", "out": "o"} | wrong)
    assert said in str(refused.value)


def test_all_wrong_settings_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'strid'.*unknown key 'hiden'.*'task' is missing"):
        make_config({"data": "d", "out": "o", "strid": 1, "hiden": 2})
