"""The command line on real files of each format: train, eval, predict, and what bad input gets."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import soundfile
import torch
from examples.demo import BEST, CHANCE, PULSES, generate
from pyarrow import parquet

import throughtime as tt
from throughtime.app.cli import main
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder

STEPS = 600


def ended(*arguments: str | Path) -> tuple[int, str, str]:
    """Run the command line's entry point in this process: exit code, stdout and stderr."""
    printed, complained = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed),
        redirect_stderr(complained),
    ):
        patch.setattr(sys, "argv", ["throughtime", *map(str, arguments)])
        with pytest.raises(SystemExit) as told:
            main()
    return int(told.value.code or 0), printed.getvalue(), complained.getvalue()


def run(*arguments: str | Path, ok: bool = True) -> str:
    """What a command printed, or complained of."""
    code, printed, complained = ended(*arguments)
    assert (code == 0) == ok, printed + complained
    return printed if ok else complained


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


def as_parquet(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    parquet.write_table(pa.table({"u": u, "y": y}), folder / "plant.parquet", row_group_size=100)
    return folder / "plant.parquet", ["--targets", "y"]


def as_npz(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    np.savez(folder / "plant.npz", inputs=u, targets=y)
    return folder / "plant.npz", []


def as_folder(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    (folder / "many").mkdir()
    for i in range(3):
        np.savez(
            folder / "many" / f"{i}.npz", inputs=u[: 300 + 100 * i], targets=y[: 300 + 100 * i]
        )
    return folder / "many", []


def as_wav(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    for name in ("a", "b"):
        soundfile.write(folder / f"{name}_dry.wav", u, 8000, subtype="FLOAT")
        soundfile.write(folder / f"{name}_wet.wav", y, 8000, subtype="FLOAT")
    rows = "id,split,inputs,targets\na,train,a_dry.wav,a_wet.wav\nb,valid,b_dry.wav,b_wet.wav\n"
    (folder / "pairs.csv").write_text(rows, encoding="utf-8")
    return folder / "pairs.csv", []


def as_npy(folder: Path) -> tuple[Path, list[str]]:
    u, y = signals()
    np.save(folder / "plant.npy", np.stack([u, y], axis=1))
    return folder / "plant.npy", ["--inputs", "0", "--targets", "1"]


SMALL = [
    "--task",
    "regress",
    "--hidden",
    "8",
    "--lanes",
    "2",
    "--stride",
    "20",
    "--updates",
    "40",
    "--lr",
    "0.01",
]


@pytest.mark.parametrize("written", [as_csv, as_parquet, as_npz, as_folder, as_wav, as_npy])
def test_every_format_trains_and_is_scored(
    tmp_path: Path, written: Callable[[Path], tuple[Path, list[str]]]
) -> None:
    data, columns = written(tmp_path)
    said = run("train", data, *columns, *SMALL, "--out", tmp_path / "run")
    assert "steps/s" in said
    assert "whole recording of 'valid', the state carried" in said
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert rows[0]["kind"] == "data"
    assert rows[-1]["kind"] == "valid"
    assert np.isfinite(rows[-1]["rmse"])
    assert (tmp_path / "run" / "report.html").stat().st_size > 5_000


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A classifier of two text classes from a CSV, and its data."""
    folder = tmp_path_factory.mktemp("trained")
    random = np.random.default_rng(0)
    rows = "\n".join(
        f"{random.normal():.3f},{'high' if i // 30 % 2 else 'low'},{i}" for i in range(STEPS)
    )
    (folder / "data.csv").write_text(f"x,label,note\n{rows}\n", encoding="utf-8")
    settings = [
        "--task",
        "classify",
        "--inputs",
        "x",
        "--targets",
        "label",
        "--hidden",
        "8",
        "--lanes",
        "2",
        "--stride",
        "20",
        "--updates",
        "30",
    ]
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
    for count, shown in ((12, True), (13, False)):
        rows = ["id,split,inputs,label"]
        for i in range(count + 2):
            np.save(tmp_path / f"{i}.npy", np.full(5, i))
            rows.append(f"clip{i},{'train' if i < 2 else 'valid'},{i}.npy,{'xy'[i % 2]}")
        data = tmp_path / "clips.csv"
        data.write_text("\n".join(rows), encoding="utf-8")
        said = run(
            "train",
            data,
            "--task",
            "classify",
            "--hidden",
            "4",
            "--lanes",
            "2",
            "--updates",
            "1",
            "--out",
            tmp_path / f"r{count}",
        )
        assert ("clip7" in said) == shown
        assert f"{count} whole recordings of 'valid', the state carried" in said


def test_resuming_a_finished_run_says_so_and_how_to_train_on(trained: tuple[Path, Path]) -> None:
    assert "already finished at update 30; to train on: throughtime train --resume" in run(
        "train", "--resume", trained[0]
    )


@pytest.mark.parametrize("end", ["20", "30"])
def test_an_end_that_the_run_has_passed_leaves_its_settings_as_they_are(
    trained: tuple[Path, Path], end: str
) -> None:
    before = (trained[0] / "config.toml").read_bytes()
    printed = run("train", "--resume", trained[0], "--updates", end)
    assert "already finished at update 30" in printed
    assert (trained[0] / "config.toml").read_bytes() == before


def test_predictions_never_replace_the_recording(trained: tuple[Path, Path]) -> None:
    folder, data = trained
    before = data.read_bytes()
    assert "is a recording itself" in run("predict", folder, data, "--out", data, ok=False)
    assert data.read_bytes() == before


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


def test_flags_win_over_the_config_file_and_both_are_kept(tmp_path: Path) -> None:
    data, _ = as_npz(tmp_path)
    (tmp_path / "run.toml").write_text(
        f'data = "{data}"\ntask = "regress"\nhidden = 7\nupdates = 5\nlanes = 1\n', encoding="utf-8"
    )
    run("train", "--config", tmp_path / "run.toml", "--hidden", "6", "--out", tmp_path / "run")
    config = RunFolder(tmp_path / "run").read_config()
    assert (config.hidden, config.updates, config.lanes, config.data) == (
        6,
        5,
        1,
        str(data.resolve()),
    )


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
    for threads, hidden, expected in ((None, 4, 1), ("2", 4, 0), (None, 600, 0)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        out = tmp_path / f"{threads}-{hidden}"
        size = ["--lanes", "1", "--hidden", str(hidden), "--stride", "300"]
        commands = (
            ("train", data, *columns, *size, "--updates", "1", "--out", out),
            ("train", "--resume", out, "--updates", "2"),
            ("eval", out),
            ("predict", out, data, "--out", tmp_path / "p.csv"),
        )
        for command in commands:
            taken.clear()
            run(*command)
            assert taken == [1] * expected, command


def test_the_demo_reaches_the_best_on_the_stream_and_draws_it(tmp_path: Path) -> None:
    """What windows reach is luck, and another processor's rounding is enough to change it.

    What the stream reaches is not.
    """
    demo = Path(__file__).parent.parent / "examples" / "demo.py"
    words = [sys.executable, str(demo), "--short", "--out", str(tmp_path)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    content = json.loads((tmp_path / "demo.json").read_text(encoding="utf-8"))
    windows, stream = (network["accuracy"] for network in content["networks"])
    assert BEST - 0.03 < stream <= BEST + 0.01
    assert CHANCE - 0.1 < windows <= BEST + 0.01
    assert f"{windows:.3f}" in said
    assert f"{stream:.3f}" in said
    assert "<svg" in (tmp_path / "demo.svg").read_text(encoding="utf-8")


def test_nobody_beats_the_best_of_the_demo_and_remembering_the_pulse_reaches_it() -> None:
    task = generate(200_000, 5)
    starts = np.flatnonzero(task.since == 0)
    sums = np.array([task.inputs[s : s + 10].sum() for s in starts.tolist()])
    assert np.array_equal(np.sign(sums), np.sign(PULSES)[(sums > 0).astype(int)])
    remembered = np.repeat(sums > 0, np.diff(np.append(starts, len(task.since))))
    assert (remembered == task.labels).mean() == pytest.approx(BEST, abs=0.003)


def test_the_module_is_the_command() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "throughtime", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.strip() == f"throughtime {tt.__version__}"


@pytest.mark.parametrize("field", ["", "inf"])
def test_predict_names_the_row_and_column_or_leaves_the_step_out(
    trained: tuple[Path, Path], tmp_path: Path, field: str
) -> None:
    folder, data = trained
    lines = data.read_text(encoding="utf-8").splitlines()
    lines[1 + 204] = f"{field},high,204"
    (tmp_path / "gap.csv").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "p.csv"
    complained = run("predict", folder, tmp_path / "gap.csv", "--out", out, ok=False)
    assert "step 204, column 'x' (row 204)" in complained
    assert "--on-nan hold" in complained
    for choice in ("hold", "reset"):
        printed = run("predict", folder, tmp_path / "gap.csv", "--out", out, "--on-nan", choice)
        assert "1 without an answer" in printed
        with out.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [row["step"] for row in rows if not row["class"]] == ["204"]
        assert len(rows) == STEPS


def csv_file(folder: Path, header: str, *, encoding: str = "utf-8", rows: int = 300) -> Path:
    random, path = np.random.default_rng(0), folder / "data.csv"
    width = header.count(",") + 1
    lines = [",".join(f"{v:.3f}" for v in random.normal(size=width)) for _ in range(rows)]
    path.write_text("\n".join([header, *lines]), encoding=encoding)
    return path


def train_on(path: Path, out: Path, *more: str, ok: bool = False) -> str:
    few = ("--updates", "2", "--lanes", "1", "--stride", "20")
    small = () if "--hidden" in more else ("--hidden", "4")
    return run("train", path, "--task", "regress", *few, *small, *more, "--out", out, ok=ok)


def test_advice_is_an_option_of_the_command(trained: tuple[Path, Path], tmp_path: Path) -> None:
    folder, data = trained
    gap = tmp_path / "gap.csv"
    lines = data.read_text(encoding="utf-8").splitlines()
    lines[3] = ",".join(["nan", *lines[3].split(",")[1:]])
    gap.write_text("\n".join(lines) + "\n", encoding="utf-8")
    complained = run("eval", folder, gap, "--split", "all", ok=False)
    assert "has an input that is NaN or infinite" in complained
    assert complained.endswith("or mask them: missing='mask' (--missing mask)\n")
    complained = run("predict", folder, gap, "--out", tmp_path / "p.csv", ok=False)
    assert complained.endswith(
        "(--missing mask); on_nan='hold' (--on-nan hold) leaves such steps out\n"
    )


def test_messages_about_very_many_columns_stay_short(tmp_path: Path) -> None:
    path = csv_file(tmp_path, ",".join(f"c{i}" for i in range(9_000)), rows=3)
    for more in ((), ("--targets", "x"), ("--inputs", "x", "--targets", "c1")):
        said = train_on(path, tmp_path / "run", *more)
        assert said.startswith("error: ")
        assert "8,992 more" in said
        assert len(said) < 1000


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x: can't allocate memory: 8 TB")])
def test_no_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def build(*_: object) -> None:
        raise error

    monkeypatch.setattr("throughtime.app.train.build_model", build)
    path = csv_file(tmp_path, "u,y")
    said = train_on(path, tmp_path / "run", "--inputs", "u", "--targets", "y")
    assert said.startswith("error: out of memory")
