"""The command line on real files of each format: train, eval, predict, and what bad input gets."""

import csv
import html
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from examples.demo import BEST, CHANCE
from jinja2 import Environment, FileSystemBytecodeCache

import throughtime as tt
from throughtime.app.cli import main
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder

STEPS = 600


COMPILED = FileSystemBytecodeCache(os.environ["THROUGHTIME_CACHE"])


def leave_out_charts(patch: pytest.MonkeyPatch) -> None:
    """Of reports: they take a second for each command. The template is compiled once."""
    patch.setattr("throughtime.app.page.chart", lambda _, alt, *__: html.escape(alt))
    compiles = partial(Environment, bytecode_cache=COMPILED)
    patch.setattr("throughtime.app.page.Environment", compiles)


def ended(*arguments: str | Path, drawn: bool = False) -> tuple[int, str, str]:
    """Run the command line's entry point in this process: exit code, stdout and stderr."""
    printed, complained = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed),
        redirect_stderr(complained),
    ):
        patch.setattr(sys, "argv", ["throughtime", *map(str, arguments)])
        if not drawn:
            leave_out_charts(patch)
        with pytest.raises(SystemExit) as told:
            main()
    return int(told.value.code or 0), printed.getvalue(), complained.getvalue()


def run(*arguments: str | Path, ok: bool = True, drawn: bool = False) -> str:
    """What a command printed, or complained of."""
    code, printed, complained = ended(*arguments, drawn=drawn)
    assert (code == 0) == ok, printed + complained
    return printed if ok else complained


def words(text: str) -> list[str]:
    return text.split()


def signals() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    u = random.uniform(-0.5, 0.5, size=STEPS).astype(np.float32)
    y = np.zeros(STEPS, dtype=np.float32)
    for t in range(1, STEPS):
        y[t] = 0.9 * y[t - 1] + 0.1 * u[t]
    return u, y


def as_csv(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    rows = "\n".join(f"{i},{a},{b}" for i, (a, b) in enumerate(zip(u, y, strict=True)))
    (folder / "plant.csv").write_text(f"time,u,y\n{rows}\n", encoding="utf-8")
    return folder / "plant.csv", ["--inputs", "u", "--targets", "y"]


def as_folder(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    (folder / "many").mkdir()
    for i in (300, 400, 500):
        np.savez(folder / "many" / f"{i}.npz", inputs=u[:i], targets=y[:i])
    return folder / "many", []


def as_wav(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    for name in ("a", "b"):
        soundfile.write(folder / f"{name}_dry.wav", u, 8000, subtype="FLOAT")
        soundfile.write(folder / f"{name}_wet.wav", y, 8000, subtype="FLOAT")
    rows = "id,split,inputs,targets\na,train,a_dry.wav,a_wet.wav\nb,valid,b_dry.wav,b_wet.wav\n"
    (folder / "pairs.csv").write_text(rows, encoding="utf-8")
    return folder / "pairs.csv", []


SMALL = words("--task regress --hidden 4 --lanes 2 --stride 20 --updates 50 --lr 0.01")


@pytest.mark.parametrize("written", [as_csv, as_folder, as_wav])
def test_every_form_of_data_trains_and_is_scored(
    tmp_path: Path, written: Callable[[Path], tuple[Path, list[str]]]
) -> None:
    data, columns = written(tmp_path)
    said = run("train", data, *columns, *SMALL, "--out", tmp_path / "run")
    # plain lines of progress, where there is no terminal
    updates = re.findall(r"^update (\d+)/50  loss .* left  [\d,]+ steps/s", said, re.MULTILINE)
    assert updates == [f"{n}" for n in range(2, 51, 2)]
    assert "whole recording of 'valid', the state carried" in said
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert (rows[0]["kind"], rows[-1]["kind"]) == ("data", "valid")
    assert np.isfinite(rows[-1]["rmse"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A classifier of two text classes from a CSV, and its data."""
    folder = tmp_path_factory.mktemp("trained")
    random = np.random.default_rng(0)
    rows = "\n".join(
        f"{random.normal():.3f},{'high' if i // 30 % 2 else 'low'},{i}" for i in range(STEPS)
    )
    (folder / "data.csv").write_text(f"x,label,note\n{rows}\n", encoding="utf-8")
    settings = words("--inputs x --targets label --hidden 8 --lanes 2 --stride 20 --updates 30")
    run("train", folder / "data.csv", *settings, "--out", folder / "run")
    return folder / "run", folder / "data.csv"


def test_eval_prints_and_keeps_scores_by_recording(trained: tuple[Path, Path]) -> None:
    folder, data = trained
    said = run("eval", folder, data, "--split", "valid")
    assert "each class or target" in said
    assert "auroc" in said
    assert "true class" in said
    content = json.loads((folder / "scores-valid.json").read_text(encoding="utf-8"))
    assert content["steps"] == STEPS * 0.2
    assert "Scores: valid" in (folder / "report.html").read_text(encoding="utf-8")


def test_predict_writes_what_the_library_predicts(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, data = trained
    run("predict", folder, data, "--out", tmp_path / "p.npy")
    run("predict", folder, data, "--out", tmp_path / "p.csv")
    net, spec = load_model(folder / "model.safetensors")
    assert spec.classes == ("high", "low")
    x = np.array(
        [float(line.split(",")[0]) for line in data.read_text(encoding="utf-8").splitlines()[1:]],
        dtype=np.float32,
    )
    logits, _ = tt.predict(net, {"inputs": x})
    np.testing.assert_allclose(
        np.load(tmp_path / "p.npy"), logits.softmax(dim=1).numpy(), atol=1e-6
    )
    lines = (tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "step,class,p[high],p[low]"
    assert [line.split(",")[1] for line in lines[1:]] == [
        spec.classes[i] for i in logits.argmax(dim=1)
    ]


def test_scores_of_many_recordings_are_in_the_file_and_not_on_the_screen(tmp_path: Path) -> None:
    rows = ["id,split,inputs,label"]
    for i in range(27):
        np.save(tmp_path / f"{i}.npy", np.full(5, i))
        split = "train" if i < 2 else "valid" if i < 15 else "test"
        rows.append(f"clip{i},{split},{i}.npy,{'xy'[i % 2]}")
    data = tmp_path / "clips.csv"
    data.write_text("\n".join(rows), encoding="utf-8")
    said = run("train", data, *words("--hidden 4 --lanes 2 --updates 1 --out"), tmp_path / "run")
    assert "clip7" not in said
    assert "13 whole recordings of 'valid', the state carried" in said
    said = run("eval", tmp_path / "run", "--split", "test")
    assert "clip20" in said
    assert "12 whole recordings of 'test', the state carried" in said


@pytest.mark.parametrize("end", [(), ("--updates", "20"), ("--updates", "30")])
def test_an_end_that_the_run_has_passed_leaves_its_settings_as_they_are(
    trained: tuple[Path, Path], end: tuple[str, ...]
) -> None:
    before = (trained[0] / "config.toml").read_bytes()
    said = run("train", "--resume", trained[0], *end)
    assert f"model, metrics and report.html are in {trained[0]}" in said
    assert (trained[0] / "config.toml").read_bytes() == before


def test_eval_scores_what_was_held_out_unless_it_is_given_other_data(
    trained: tuple[Path, Path],
) -> None:
    folder, data = trained
    assert "'valid'" in run("eval", folder)
    assert "'all'" in run("eval", folder, data)
    whole = json.loads((folder / "scores-all.json").read_text(encoding="utf-8"))
    assert list(whole["recordings"]) == ["data.csv"]  # whole, nothing held out of it
    assert whole["steps"] == STEPS
    (folder / "metrics.jsonl").rename(folder / "kept")
    assert "has no log lines of training" in run("eval", folder, ok=False)
    (folder / "kept").rename(folder / "metrics.jsonl")


def test_a_saved_config_starts_the_same_run_again(tmp_path: Path) -> None:
    data, columns = as_csv(tmp_path)
    run("train", data, *columns, *SMALL, "--out", tmp_path / "first")
    run("train", "--config", tmp_path / "first" / "config.toml", "--out", tmp_path / "second")
    assert (tmp_path / "first" / "model.safetensors").read_bytes() == (
        tmp_path / "second" / "model.safetensors"
    ).read_bytes()


def test_every_command_takes_one_thread_for_small_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, columns = as_csv(tmp_path)
    taken = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    train = "train", data, *columns, "--lanes", "1", "--stride", "30", "--updates", "1"
    small = *train, "--hidden", "4", "--out"
    out = tmp_path / "run"
    for command in (
        (*small, out),
        ("train", "--resume", out, "--updates", "2"),
        ("eval", out),
        ("predict", out, data, "--out", tmp_path / "p.csv"),
    ):
        run(*command)
        assert taken == [1], command
        taken.clear()
    run(*train, "--hidden", "600", "--out", tmp_path / "large")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run(*small, tmp_path / "chosen")
    assert taken == []


@pytest.mark.slow
def test_the_demo_reaches_the_best_on_the_stream_and_draws_it(tmp_path: Path) -> None:
    """What windows reach is luck, and another processor's rounding is enough to change it.

    What the stream reaches is not.
    """
    demo = Path(__file__).parent.parent / "examples" / "demo.py"
    command = [sys.executable, str(demo), "--short", "--out", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    content = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    windows, stream = (network["accuracy"] for network in content["networks"])
    assert BEST - 0.03 < stream <= BEST + 0.01
    assert CHANCE - 0.1 < windows <= BEST + 0.01
    assert f"{windows:.3f}" in said
    assert f"{stream:.3f}" in said
    assert "<svg" in (tmp_path / "demo.svg").read_text(encoding="utf-8")


def test_a_missing_value_is_named_with_the_options_or_left_out(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, data = trained
    lines, gap = data.read_text(encoding="utf-8").splitlines(), tmp_path / "gap.csv"
    lines[1 + 204] = ",high,204"
    gap.write_text("\n".join(lines), encoding="utf-8")
    complained = run("eval", folder, gap, "--split", "all", ok=False)
    assert "has an input that is NaN or infinite" in complained
    assert complained.endswith("or mask them: missing='mask' (--missing mask)\n")
    complained = run("predict", folder, gap, "--out", tmp_path / "p.csv", ok=False)
    assert "step 204, column 'x' (row 204)" in complained
    assert complained.endswith(
        "(--missing mask); on_nan='hold' (--on-nan hold) leaves such steps out\n"
    )
    for choice in ("hold", "reset"):
        printed = run("predict", folder, gap, "--out", tmp_path / "p.csv", "--on-nan", choice)
        assert "1 without an answer" in printed
        with (tmp_path / "p.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows if not row["class"]] == ["204"]
        assert len(rows) == STEPS


def test_messages_about_very_many_columns_stay_short(tmp_path: Path) -> None:
    names = ",".join(f"c{i}" for i in range(2_000))
    (tmp_path / "a.csv").write_text(f"{names}\n" + f"{'1,' * 1_999}1\n" * 3, encoding="utf-8")
    said = run("train", tmp_path / "a.csv", "--targets", "x", "--out", tmp_path / "run", ok=False)
    assert said.startswith("error: ")
    assert "1,992 more" in said
    assert len(said) < 1000


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x: can't allocate memory: 8 TB")])
def test_no_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr("throughtime.app.train.build_model", build)
    data, columns = as_csv(tmp_path)
    said = run("train", data, *columns, "--out", tmp_path / "run", ok=False)
    assert said.startswith("error: out of memory")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such limit")
def test_a_command_may_open_as_many_files_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each array on disk keeps one open."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(sys, "argv", ["throughtime", "--version"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard, 256), hard))
    try:
        with pytest.raises(SystemExit):
            main()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
