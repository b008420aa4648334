"""Settings: written, read back, and refused by name."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from throughtime.app.cli import app
from throughtime.app.config import make_config
from throughtime.app.flags import as_flags, check_options, to_settings
from throughtime.app.values import read_toml
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hiden": 3}, "unknown key 'hiden'; did you mean 'hidden'?"),
        (
            {"task": "clasify"},
            "task='clasify': expected one of 'classify', 'multilabel', 'regress'",
        ),
        ({"lanes": "four"}, "lanes='four': expected a whole number"),
        ({"lanes": True}, "lanes=True: expected a whole number"),
        ({"lanes": 0}, "lanes=0: expected at least 1"),
        ({"lr": float("nan")}, "lr=nan: expected a finite number above 0"),
        ({"updates": 3, "epochs": 1}, "updates=3 and epochs=1 are both given"),
        ({"inputs": 3}, "inputs=3: expected a list of column names"),
        ({"data": None}, "'data' is missing"),
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
        ("'out' is missing, 'data' is missing", "train", "--out is missing, DATA is missing"),
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
        ConfigError, match=r"unknown key 'strid'.*unknown key 'hiden'.*'data' is missing"
    ):
        make_config({"task": "classify", "out": "o", "strid": 1, "hiden": 2})


def test_help_and_versions_need_no_torch_and_ranks_no_lightning() -> None:
    code = """
import contextlib, io, sys
from throughtime.app.cli import app, main
names = [info.name or info.callback.__name__ for info in app.registered_commands]
assert len(names) >= 6, names
commands = [[], *([name] for name in names)]
for words in (["--version"], *([*c, flag] for c in commands for flag in ("-h", "--help"))):
    sys.argv = ["throughtime", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    assert ("throughtime 0" if words == ["--version"] else "Usage:") in printed.getvalue(), words
    assert not {"torch", "numpy", "pyarrow", "pydantic"} & {*sys.modules}, words
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    ranks = "import sys, throughtime.app.distributed; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", ranks], check=True)


@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("train d --learning-rate 1", "--learning-rate: no such option; write --lr"),
        ("train d --learning_rate=1", "--learning_rate: no such option; write --lr"),
        ("train d --batch_size 1", "--batch_size: no such option; write --lanes"),
        ("train d --class_weights none", "--class_weights: no such option; write --class-weights"),
        ("train d --lanse 3", "--lanse: no such option; write --lanes"),
        ("train d -lr 3", "-lr: no such option; write --lr"),
        ("train d --LR 3", "--LR: no such option; write --lr"),
        ("train d --exact", "--exact: no such option; write --gradient exact"),
        ("audit r --batch-size 3", "--batch-size: no such option; write --lanes"),
        ("eval r --splits x", "--splits: no such option; write --split"),
    ],
)
def test_an_option_that_is_nearly_one_names_it(words: str, written: str) -> None:
    commands: Any = get_command(app)
    with pytest.raises(ConfigError) as refused:
        check_options(commands, words.split())
    assert str(refused.value) == written


@pytest.mark.parametrize(
    "words",
    [
        "train d --lr 1 --inputs=-3 --hand-off --no-hand-off -h --max-norm=2",
        "eval r --learning-rate 1",  # it has no such thing
        "doctor train.py --learning-rate 1",  # of the script
        "train -- --learning-rate",  # a file
        "--version",
        "",
    ],
)
def test_other_words_are_left_to_the_parser(words: str) -> None:
    check_options(get_command(app), words.split())


def test_words_of_settings_are_read_in_any_case() -> None:
    flags = {"gradient": "EXACT", "device": "CPU", "class_weights": "Balanced", "out": "RUNS"}
    lower = {"gradient": "exact", "device": "cpu", "class_weights": "balanced", "out": "RUNS"}
    assert to_settings(flags) == lower
    with pytest.raises(ConfigError, match=r"or FILE.py:Class; did you mean 'exact'\?"):
        make_config({"data": "d", "out": "o", "task": "classify", "gradient": "exat"})


def test_a_shell_completes_flags_and_their_words() -> None:
    completed = {
        "train --gradient ": {"truncated", "exact", "adaptive", "randomized"},
        "train --model ": {"lstm", "gru", "rnn"},
        "train --la": {"--lanes", "--layers"},
        "ev": {"eval"},
    }
    for words, expected in completed.items():
        line = f"throughtime {words}"
        request = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        done = subprocess.run(
            [sys.executable, "-m", "throughtime"],
            env={**os.environ, **request, "_THROUGHTIME_COMPLETE": "complete_bash"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert set(done.stdout.split()) == expected, words
