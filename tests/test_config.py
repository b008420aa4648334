"""Settings: declared once, written, read back, and refused by name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import elsewhere
from throughtime.app.settings import SHORT, Config, help_of, read_toml
from throughtime.errors import ConfigError, did_you_mean


def test_config_survives_its_own_toml(tmp_path: Path) -> None:
    config = Config(
        data='a "b" ü.csv',
        task="regress",
        out="x",
        inputs=["u", "v,w"],
        horizon=300,
        lr=1,
        optimizer="sgd",
        schedule="plateau",
        loss="huber",
    )
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert Config(**read_toml(path)) == config


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"task": "clasify"},
            "--task clasify: expected classify or multilabel or regress",
        ),
        ({"inputs": 3}, "--inputs 3: Input should be a valid tuple"),
        ({"inputs": [""]}, "--inputs : String should have at least 1 character"),
        (
            {"standardise": "first:0"},
            "--standardise first:0: expected split or recording or none or first:N",
        ),
        ({"data": None}, "DATA is missing: A file with one recording"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    settings = {"data": "d", "task": "regress", "out": "o"} | wrong
    with pytest.raises(ConfigError) as refused:
        Config(**settings)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"inputs": "u, v"}, ("u", "v")),
        ({"ahead": "24"}, (24,)),
        ({"ahead": 24}, (24,)),
        ({"ahead": "1-3"}, (1, 2, 3)),
        ({"ahead": "1, 6"}, (1, 6)),
        ({"gradient_arg": "min=20,max=40", "gradient": "adaptive"}, ("min=20", "max=40")),
        ({"lr": 1}, 1.0),
        ({"out": None}, "runs/d"),
        ({"stride": None}, 100),
        ({"stride": None, "gradient": "exact"}, None),
    ],
)
def test_settings_have_the_types_that_they_are_declared_with(
    given: dict[str, Any], value: object
) -> None:
    result = getattr(Config(**{"data": "d.csv"} | given), next(iter(given)))
    assert (type(result), result) == (type(value), value)


def test_all_wrong_settings_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        Config(task="x", strid=1, hiden=2, lanes=0, lr="a")
    message = str(refused.value)
    for part in ("'strid'", "'hiden'", "DATA is missing", "--task x", "--lanes 0", "--lr a"):
        assert message.count(part) == 1, message


def test_a_changed_copy_is_checked_as_well() -> None:
    config = Config(data="d", horizon=300)
    assert config.changed(updates=3).updates == 3
    for _ in range(2):  # pydantic builds its schema once
        with pytest.raises(ConfigError, match="--updates 0: Input should be greater than 0"):
            config.changed(updates=0)
    with pytest.raises(ConfigError, match="--class-weights belongs to classes"):
        Config(data="d", class_weights="balanced").changed(task="regress")


def test_every_setting_has_help() -> None:
    for name, about in Config.model_fields.items():
        assert len(help_of(about)) > 10, name
    assert {*SHORT} < {*Config.model_fields}


def test_help_and_versions_need_no_torch_and_training_no_matplotlib() -> None:
    code = """
import contextlib, io, sys
from throughtime.app.cli import commands, main
names = list(commands.commands)
assert len(names) >= 6, names
words_of = [[], *([name] for name in names)]
for words in (["--version"], *([*c, flag] for c in words_of for flag in ("-h", "--help"))):
    sys.argv = ["throughtime", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    assert ("throughtime 0" if words == ["--version"] else "Usage:") in printed.getvalue(), words
    assert not {"torch", "numpy", "pyarrow", "rich"} & {*sys.modules}, words
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    light = """
import sys
import throughtime.app.console, throughtime.app.train
assert not {'lightning', 'matplotlib'} & {*sys.modules}
import throughtime.app.page
assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules
"""
    assert elsewhere(light).code == 0


def test_only_what_is_near_is_suggested() -> None:
    assert did_you_mean("hiden", Config.model_fields) == "; did you mean 'hidden'?"
    assert did_you_mean("optimizer", ["delimiter", "horizon"]) == ""


def test_help_of_the_command_line_is_quick() -> None:
    """Seconds of processor as `throughtime --help` takes them; three times the goal at most."""
    resource = pytest.importorskip("resource")
    words = [sys.executable, "-m", "throughtime", "--help"]  # the module is the command
    spent: list[float] = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 1.2, spent
