"""Settings: declared once, written, read back, and refused by name."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from test_cli import ended
from throughtime.app.cli import new_settings
from throughtime.app.config import PANELS, Config, make_config
from throughtime.app.contradictions import LOSSES, SHORT
from throughtime.app.values import fields_of, nearest, read_toml, written
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
            "optimizer": "sgd",
            "momentum": 0.9,
            "schedule": "plateau",
            "loss": "huber",
        }
    )
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert make_config(read_toml(path)) == config


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hiden": 3}, "unknown key 'hiden'; did you mean 'hidden'?"),
        ({"task": "clasify"}, 'task = "clasify": expected classify, multilabel or regress'),
        ({"lanes": "four"}, 'lanes = "four": expected a whole number of at least 1'),
        ({"lanes": True}, "lanes = true: expected a whole number of at least 1"),
        ({"lr": True}, "lr = true: expected a finite number above 0"),
        ({"lanes": 0}, "lanes = 0: expected a whole number of at least 1"),
        ({"lr": float("nan")}, "lr = NaN: expected a finite number above 0"),
        ({"updates": 3, "epochs": 1}, "updates = 3 and epochs = 1 are both given"),
        ({"inputs": 3}, "inputs = 3: expected a list of column names"),
        ({"inputs": [""]}, 'inputs = [""]: expected a list of column names'),
        ({"model": "net.py"}, 'model = "net.py": expected lstm, gru, rnn or FILE.py:Class'),
        ({"series": ["w"]}, 'series = ["w"]: expected NAME=COLUMN, such as weight=w'),
        ({"ahead": "24-1"}, 'ahead = "24-1": expected rows of at least 1 in rising order'),
        ({"ahead": -3}, "ahead = -3: expected rows of at least 1 in rising order"),
        ({"inputs": ["{a}"], "exclude": ["{a}", "b"]}, '"b"]: {a} is among the inputs or targets'),
        ({"seed": 2**63}, "expected a whole number from 0 to below 2**63"),
        ({"standardise": "first:0"}, "expected split, recording, none or first:N"),
        ({"class_weights": "a:5"}, "expected none, balanced or a number above 0 for some"),
        ({"weight_decay": 0.1, "optimizer": "adam"}, 'optimizer = "adam": take adamw'),
        ({"momentum": 0.9}, "momentum = 0.9 belongs to --optimizer sgd: write that, or"),
        ({"schedule": "plateau", "lr_warmup": 2}, "a plateau counts validations, not updates"),
        ({"loss": "mae", "task": "classify"}, "take --loss cross-entropy"),
        ({"data": None}, "DATA is missing: A file with one recording"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    settings = {"data": "d", "task": "regress", "out": "o"} | wrong
    with pytest.raises(ConfigError) as refused:
        make_config(settings, flags=())
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"inputs": "u, v"}, ("u", "v")),
        ({"ahead": "24"}, 24),
        ({"ahead": "1-3"}, "1-3"),
        ({"workers": "2"}, 2),
        ({"workers": "thread"}, "thread"),
        ({"gradient_args": ["min=20"], "gradient": "adaptive"}, {"min": 20}),
        ({"logger": "wandb,mlflow"}, ("wandb", "mlflow")),
        ({"background_class": "0"}, "0"),
        ({"lr": 1}, 1.0),
        ({"out": None}, "runs/d"),
        ({"stride": None}, 100),
        ({"stride": None, "gradient": "exact"}, None),
    ],
)
def test_settings_have_the_types_that_they_are_declared_with(
    given: dict[str, Any], value: object
) -> None:
    result = getattr(make_config({"data": "d.csv"} | given), next(iter(given)))
    assert (type(result), result) == (type(value), value)


def test_a_setting_is_called_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('data = "d"\nlanes = 0\nhand_off = true\noffset = 3\n', encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        new_settings(file, {"hidden": "x"})
    head = f"{file}: lanes = 0: expected a whole number of at least 1"
    assert str(refused.value) in {
        f"--hidden x: expected a whole number of at least 1; {head.partition(': ')[2]}",
        f"{file}: --hidden x: expected a whole number of at least 1; {head.partition(': ')[2]}",
    }
    with pytest.raises(ConfigError, match=r"--offset 4 moves .* and hand_off = true passes"):
        new_settings(file, {"offset": "4", "lanes": "1"})
    assert written("hand_off", True, None) == "--hand-off"
    assert written("hand_off", False, None) == "--no-hand-off"
    assert written("inputs", ("u", "a b"), None) == "--inputs 'u,a b'"


def test_all_wrong_settings_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({"task": "x", "strid": 1, "hiden": 2, "lanes": 0, "lr": "a"}, flags=["lr"])
    message = str(refused.value)
    for part in ("'strid'", "'hiden'", "DATA is missing", "task = ", "lanes = 0", "--lr a"):
        assert message.count(part) == 1, message


def test_a_changed_copy_is_checked_as_well() -> None:
    config = make_config({"data": "d", "horizon": 300})
    assert replace(config, updates=3).updates == 3
    for _ in range(2):  # pydantic builds its schema once
        with pytest.raises(ConfigError, match="--updates 0: expected a whole number of at least 1"):
            replace(config, updates=0)
    with pytest.raises(ConfigError, match="--loss huber does not fit --task classify"):
        replace(make_config({"data": "d", "loss": "huber"}), task="classify")


def test_every_setting_has_help_and_a_group() -> None:
    for name, about in fields_of(Config).items():
        assert len(about.description) > 10, name
        assert "\n" not in about.description
    assert [*PANELS] == sorted(PANELS, key=[field.name for field in fields(Config)].index)
    assert {*SHORT} < {*fields_of(Config)}
    assert {task for tasks in LOSSES.values() for task in tasks} == {
        "classify",
        "multilabel",
        "regress",
    }


def test_help_and_versions_need_no_torch_and_ranks_no_lightning() -> None:
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
    ranks = "import sys, throughtime.app.distributed; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", ranks], check=True)


@pytest.mark.parametrize(
    ("words", "written_as"),
    [
        ("train d --learning-rate 1", "--learning-rate: no such option; write --lr"),
        ("train d --learning_rate=1", "--learning_rate: no such option; write --lr"),
        ("train d --class_weights none", "--class_weights: no such option; write --class-weights"),
        ("train d --lanse 3", "--lanse: no such option; write --lanes"),
        ("train d --LR 3", "--LR: no such option; write --lr"),
        ("audit r --batch-size 3", "--batch-size: no such option; write --lanes"),
        ("eval r --splits x", "--splits: no such option; write --split"),
        ("eval r --optimizer x", "--optimizer: no such option; throughtime eval --help lists them"),
        ("eval r --learning-rate 1", "--learning-rate: no such option; throughtime eval --help"),
    ],
)
def test_an_option_names_a_near_one_and_only_a_near_one(words: str, written_as: str) -> None:
    code, _, complained = ended(*words.split())
    assert code == 2
    assert complained.startswith(f"error: {written_as}")


def test_only_what_is_near_is_suggested() -> None:
    assert nearest("hiden", fields_of(Config)) == "; did you mean 'hidden'?"
    assert nearest("optimizer", ["delimiter", "horizon"]) == ""


def test_words_of_settings_are_read_in_any_case(tmp_path: Path) -> None:
    words = [
        "--gradient",
        "EXACT",
        "--device",
        "CPU",
        "--class-weights",
        "Balanced",
        "--out",
        "RUNS",
        "--lanes",
        "0",
    ]
    _, _, complained = ended("train", tmp_path, *words)
    assert complained == "error: --lanes 0: expected a whole number of at least 1\n"


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
            env={**os.environ, **request, "_THROUGHTIME_COMPLETE": "bash_complete"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert {line.partition(",")[2] for line in done.stdout.split()} == expected, words


def test_help_of_the_command_line_is_quick() -> None:
    """Seconds of processor as `throughtime --help` takes them; three times the goal at most."""
    resource = pytest.importorskip("resource")
    words = [sys.executable, "-m", "throughtime", "--help"]
    spent: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(words, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 1.2, spent
