"""Wrong input to the command line: one line that says what to do, exit code 2, nothing written."""

import shlex
import shutil
from pathlib import Path

import pytest

from test_cli import ended, run

TODAY = [
    (
        "train {data} --task regress --config {wrong}",
        "unknown 'strides' (did you mean --stride?)",
    ),
    ("train --task regress", "DATA is missing: A file with one recording"),
    ("train {data}.gone.csv --task regress", "no such file"),
    ("train {data} --inputs x --targets lable", "it has ['x', 'label', 'note']"),
    ("train {data} --inputs x", "which columns are the targets? The file has x, label, note"),
    ("train {data} --inputs label --targets x", "the inputs holds text, such as ['high', 'low']"),
    ("train {data} --task regress --targets label --inputs x", "the targets holds text"),
    ("train {data} --inputs x --targets label --horizon 5", "horizon=5 is below stride=100"),
    (
        "train {data} --inputs x --targets label --gradient exact --horizon 5",
        "unexpected keyword argument 'horizon'. It takes (",
    ),
    ("train {data} --inputs x --targets label --gradient exact --stride 5", "argument 'stride'"),
    ("train --resume nowhere --lanes 2", "nowhere: no run there"),
    ("train --resume {run} --lr 1", "leave out --lr. Only --updates or --epochs may be given"),
    ("train {data} --inputs x --targets label --out {run}", "continue a run with --resume"),
    ("train {data} --learning-rate 1", "unknown '--learning-rate': no flag or key of TOML"),
    ("train {data} --weight_decay 1", "'--weight_decay' (did you mean --weight-decay?)"),
    ("train {data} -lr 3", "unknown '-lr' (did you mean --lr?)"),
    ("train {data} --lr", "Option '--lr' requires an argument; throughtime --help"),
    ("train {data} --hand-off=yes", "does not take a value; throughtime --help"),
    ("train {data} --exact", "unknown '--exact': no flag or key of TOML; see --help"),
    (
        "train --hiden 5 {data} --lernrate=3 --seed x",
        "unknown '--hiden' (did you mean --hidden?)",
        "unknown '--lernrate=3'",
        "--seed x: Input should be a valid integer",
    ),
    ("train {data} --lanes 0", "--lanes 0: Input should be greater than 0"),
    ("train {data} --updates 3 --epochs 1", "one of them says when to stop"),
    (
        "train {data} --inputs x --targets label --device quantum",
        "--device quantum: cannot be used on this machine; take",
    ),
    ("eval {data} {data}", "no run there"),
    (
        "eval {run} {data} --split tst",
        "no recordings in split 'tst'; there are train 1, valid 1: name one",
    ),
    ("eval {run} {data} --missing drop", "--missing drop: expected error or mask"),
    ("predict {run} {other}", "inputs ['x'] asked for, it has ['y']"),
    ("predict {run} {data} --out p.txt", "predictions are written as .npy or .csv"),
    ("predict {run} {data} --on-nan drop", "expected raise or hold or reset"),
]
NEW = [
    ("trian {data}", "No such command 'trian'", "throughtime --help lists"),
    ("train {data} {other}", "other.csv': no flag or key of TOML; see --help"),
    ("train {data} \N{EN DASH}lr 0.1", "unknown '\N{EN DASH}lr'", "see --help"),
    ("train {data} --lr 0,001", "--lr 0,001: Input should be a valid number"),
    ("train {data} --hidden 64,128", "--hidden 64,128: Input should be a valid integer"),
    ("train {data} --lr --hidden", "--lr --hidden: Input should be a valid number"),
    ("train {data} --updates 10k", "--updates 10k: Input should be a valid integer"),
    ("train {data} --model nets.py", "--model nets.py: expected lstm or gru or rnn"),
    ("train {data} --model nets.py:Net", "--model nets.py:Net: no such file nets.py"),
    ("train {data} --optimizer lion", "--optimizer lion: expected adam or adamw or sgd"),
    ("train {data} --inputs x --targets label --loss mse", "take --loss cross-entropy"),
    ("train {data} --inputs x --targets label --patience 2 --valid-every 0", "count validations"),
    ("train {data} --lr x --lanes 0 --seed -1", "--lanes 0: Input", "--lr x:", "--seed -1:"),
    ("train {data} --config {yaml}", "cannot be read as TOML", "lr = 0.1"),
    ("train {data} --config {sections}", "unknown 'training'"),
    ("train {data} --class-weights high:5", "expected none or balanced"),
    ("train {data} --optimiser adam", "'--optimiser' (did you mean --optimizer?)"),
    ("train https://host.org/data.csv", "no such file or folder"),
    ("train ''", "DATA : String should have at least 1 character"),
    ("eval {run}/model.safetensors", "no run there", "give the folder"),
    ("export {run}", "--out is missing: The file to write"),
    ("export {run} --out model.pt", ".onnx"),
    ("eval {old}", "written by another version of throughtime", "unknown 'dropout'"),
    ("train {data} --inputs x --targets label --loss {own}:Plain", "has no method __call__"),
    ("train {data} --inputs x --targets label --model {own}:Net", "--model own.py:Net: "),
    ("audit {run} --horizons 50;200", "--horizons 50;200: Input should be a valid integer"),
    ("doctor {data}.py", "no such file. Write throughtime doctor train.py"),
    ("eval {run} {data}x", "data.csvx: no such file or folder"),
    ("eval {run} --data {data}", "unknown '--data': no flag"),
    (
        "train {data} --inputs x --targets label --optimizer adam --weight-decay 1",
        "--weight-decay 1.0 belongs to --optimizer adamw",
    ),
    ("train {data} --stride 5 --gradient-arg stride=7", "--stride is given again by"),
    ("train {data} --inputs x --targets label --device meta", "--device meta: cannot be used"),
    ("train {data} --config {truths}", "--lanes True: Input", "--lr False: Input"),
    ("train {data} --config {table}", "--gradient-arg", "Input should be a valid tuple"),
    ("predict {run} {many} --out p.npy", "those of many recordings as .csv to a folder"),
    ("train {data} --gradient-arg a", "--gradient-arg a: expected NAME=VALUE as in TOML"),
    ("doctor --ignore TT000 {script}", "unknown ['TT000']"),
    ("train {data} --ahead 24-1", "--ahead 24-1: Input should be a valid integer"),
]

OWN = """
from torch import nn


class Plain:
    pass


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lstm, self.out, self.calls = nn.LSTM(inputs, 4), nn.Linear(4, outputs), 0

    def forward(self, x):
        self.calls += 1
        return self.out(self.lstm(x)[0]) * self.calls
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of two updates, its data, and files with faults."""
    folder = tmp_path_factory.mktemp("wrong")
    rows = "\n".join(f"{i % 7 / 7},{'high' if i // 30 % 2 else 'low'},{i}" for i in range(300))
    files = {
        "data": ("data.csv", f"x,label,note\n{rows}\n"),
        "other": ("other.csv", "y\n1\n"),
        "wrong": ("wrong.toml", "strides = 3\n"),
        "yaml": ("run.yaml", "lr: 0.1\n"),
        "sections": ("sections.toml", "[training]\nlr = 0.1\n"),
        "truths": ("truths.toml", "lanes = true\nlr = false\nhand_off = true\n"),
        "table": ("table.toml", "[gradient_arg]\ntolerance = 0.1\n"),
        "script": ("script.py", "pass\n"),
        "own": ("own.py", OWN),
    }
    for name, text in files.values():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "many").mkdir()
    for name in ("a.csv", "b.csv"):
        (folder / "many" / name).write_text("x\n1\n2\n", encoding="utf-8")
    columns = ("--inputs", "x", "--targets", "label", "--hidden", "4", "--lanes", "1")
    run("train", folder / "data.csv", *columns, "--updates", "2", "--out", folder / "run")
    shutil.copytree(folder / "run", folder / "old")
    with (folder / "old" / "config.toml").open("a", encoding="utf-8") as file:
        file.write("dropout = 0.1\n")
    return {
        "run": folder / "run",
        "old": folder / "old",
        "many": folder / "many",
        **{key: folder / name for key, (name, _) in files.items()},
    }


@pytest.mark.parametrize("case", [*TODAY, *NEW], ids=lambda case: case[0])
def test_wrong_input_gets_one_line_that_says_what_to_do(
    trained: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = trained["run"].parent
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    words, *texts = case
    code, printed, complained = ended(*shlex.split(words.format(**trained)))
    assert code == 2, printed + complained
    assert complained.startswith("error: ")
    assert complained.count("\n") == 1, complained
    assert len(complained) < 700
    for text in texts:
        assert text in complained
    assert not [*tmp_path.iterdir()]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_the_last_of_two_flags_counts_and_arguments_of_a_policy_add_up(tmp_path: Path) -> None:
    words = "--lanes x --lanes 0 --inputs a --inputs b,"
    _, _, complained = ended("train", tmp_path, *words.split())
    assert "--lanes 0:" in complained
    assert "--inputs b,:" in complained
    _, _, complained = ended("train", tmp_path, "--gradient-arg", "a=1", "--gradient-arg", "b=")
    assert "--gradient-arg a=1,b=:" in complained
