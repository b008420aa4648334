"""The command line takes data as they come: each form of labels, inputs and static features is the
plain recording it stands for.

Two runs are fed the same if their streams give the same steps; what a stream gives decides every
weight.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

import throughtime as tt
from test_cli import run
from test_run import finish, flags, settings, write_recordings
from throughtime.app.data import Statistics, open_dataset
from throughtime.app.evaluate import evaluate_run
from throughtime.app.load import load_run
from throughtime.app.model import load_model
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import StepArrays

NAMES = ("a", "b", "c")
ROWS = {"a": 403, "b": 257, "c": 330}
SPLITS = {"a": "train", "b": "train", "c": "valid"}
counter = itertools.count()


def signal(name: str, width: int = 2) -> Array:
    return np.random.default_rng(ord(name)).normal(size=(ROWS[name], width))


def write(folder: Path, manifest: str, rows: Sequence[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "recordings.csv").write_text("\n".join([manifest, *rows]) + "\n", encoding="utf-8")
    return folder


def write_table(path: Path, columns: dict[str, Sequence[object]]) -> str:
    lines = [
        ",".join(columns),
        *(
            ",".join("" if v is None else str(v) for v in row)
            for row in zip(*columns.values(), strict=True)
        ),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path.name


def per_step(
    folder: Path, targets: Mapping[str, Sequence[object]], inputs: dict[str, Array] | None = None
) -> Path:
    """The plain form: a matrix of inputs, a row of targets, the column `y`, for every step."""
    folder.mkdir(exist_ok=True)
    for name in NAMES:
        np.save(folder / f"{name}.npy", signal(name) if inputs is None else inputs[name])
        write_table(folder / f"{name}.csv", {"i": range(len(targets[name])), "y": targets[name]})
    return write(
        folder, "id,split,inputs,targets", [f"{n},{SPLITS[n]},{n}.npy,{n}.csv" for n in NAMES]
    )


Y = {"targets": ["y"]}


def chunks(data: Path, **more: Any) -> list[tuple[Tensor, ...]]:
    """What the training stream of a run gives, the targets that do not count left out."""
    out = data.parent / f"run{next(counter)}"
    training = Training.begin(
        Config(**settings(data, out, **{"updates": 1, "dtype": "float64", **more}))
    )
    played = [
        *training.stream,
        *tt.Stream(training.dataset.valid, 1, 50, seed=None, dtype=torch.float64),
    ]
    assert all(chunk.targets is not None for chunk in played)
    return [
        (c.inputs, c.mask, c.resets, *(() if c.targets is None else (c.targets[c.mask],)))
        for c in played
    ]


def fed_the_same(one: list[tuple[Tensor, ...]], other: list[tuple[Tensor, ...]]) -> bool:
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    assert any(int(x[1].sum()) for x in one)  # something counts
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def labels_of(name: str) -> list[str]:
    return [("rest", "beat", "pvc")[i // 7 % 3] for i in range(ROWS[name])]


SPANS = {
    "a": [(0, 30, "rest"), (30, 95, "beat"), (200, 403, "pvc")],
    "b": [(17, 18, "beat"), (99, 250, "rest")],
    "c": [(5, 300, "pvc")],
}


def spans_as_steps() -> dict[str, Sequence[object]]:
    found: dict[str, Sequence[object]] = {}
    for name, spans in SPANS.items():
        steps: list[str | None] = [None] * ROWS[name]
        for start, stop, label in spans:
            steps[start:stop] = [label] * (stop - start)
        found[name] = steps
    return found


def with_spans(folder: Path, moved: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    for name, spans in SPANS.items():
        np.save(folder / f"{name}.npy", signal(name))
        starts, stops, labels = zip(*spans, strict=True)
        write_table(
            folder / f"{name}.csv",
            {"start": starts, "stop": [s + moved * (s == 95) for s in stops], "label": labels},
        )
    return write(
        folder, "id,split,inputs,targets", [f"{n},{SPLITS[n]},{n}.npy,{n}.csv" for n in NAMES]
    )


def test_intervals_are_the_targets_of_the_steps_they_cover(tmp_path: Path) -> None:
    plain = chunks(per_step(tmp_path / "plain", spans_as_steps()), **Y)
    assert fed_the_same(plain, chunks(with_spans(tmp_path / "spans")))
    assert not fed_the_same(plain, chunks(with_spans(tmp_path / "moved", moved=1)))


@pytest.mark.parametrize("task", ["classify", "regress"])
def test_a_label_is_the_target_of_the_last_step_of_its_recording(tmp_path: Path, task: str) -> None:
    labels = (
        {"a": "x", "b": "y", "c": "x"} if task == "classify" else {"a": "1.5", "b": "-2", "c": "0"}
    )
    expected: dict[str, Sequence[object]] = {
        n: [labels[n] if i == ROWS[n] - 1 else None for i in range(ROWS[n])] for n in NAMES
    }
    plain = per_step(tmp_path / "plain", expected)
    labelled = write(
        plain.parent / "labelled",
        "id,split,inputs,label",
        [f"{n},{SPLITS[n]},../plain/{n}.npy,{labels[n]}" for n in NAMES],
    )
    assert fed_the_same(chunks(plain, task=task, **Y), chunks(labelled, task=task))


def test_whole_numbers_of_intervals_are_classes_or_numbers(tmp_path: Path) -> None:
    """In integers a missing label would be the class or the number -100."""
    folder = tmp_path / "spans"
    folder.mkdir()
    for name in NAMES:
        np.save(folder / f"{name}.npy", signal(name))
        np.savez(folder / f"{name}.npz", start=[5, 60], stop=[20, 90], label=[3, 7])
    write(folder, "id,split,inputs,targets", [f"{n},{SPLITS[n]},{n}.npy,{n}.npz" for n in NAMES])
    assert dict(open_dataset(Config(**settings(folder, tmp_path / "r"))).statistics.classes) == {
        "3": 30,
        "7": 60,
    }
    found = open_dataset(Config(**settings(folder, tmp_path / "r", task="regress"))).statistics
    assert found.targets.mean == pytest.approx([(30 * 3 + 60 * 7) / 90])
    assert found.without_target == ROWS["a"] + ROWS["b"] - 90


def test_files_side_by_side_are_one_file_with_their_columns(tmp_path: Path) -> None:
    plain = per_step(tmp_path / "plain", {n: labels_of(n) for n in NAMES})
    folder = tmp_path / "apart"
    folder.mkdir()
    for name in NAMES:
        left, right = signal(name).T
        np.save(folder / f"{name}_left.npy", left)
        write_table(folder / f"{name}_right.csv", {"v": [repr(float(value)) for value in right]})
        np.save(folder / f"{name}_right.npy", right)
    for right, names, swapped in (("csv", ("0", "v"), "v,0"), ("npy", ("1.0", "2.0"), "2.0,1.0")):
        rows = [f"{n},{SPLITS[n]},{n}_left.npy; {n}_right.{right},../plain/{n}.csv" for n in NAMES]
        write(folder, "id,split,inputs,targets", rows)
        assert fed_the_same(chunks(plain, **Y), chunks(folder, **Y))
        assert not fed_the_same(chunks(plain, **Y), chunks(folder, inputs=swapped.split(","), **Y))
        assert open_dataset(Config(**settings(folder, tmp_path / "r", **Y))).layout.inputs == names


def test_static_features_are_constant_columns(tmp_path: Path) -> None:
    age, weight = {"a": 63, "b": 41.5, "c": -2}, {"a": 1, "b": 2, "c": 3}
    plain = per_step(tmp_path / "plain", {n: labels_of(n) for n in NAMES})
    features = {n: np.array([age[n], weight[n]]) for n in NAMES}
    wide = {
        n: np.concatenate([signal(n), np.broadcast_to(features[n], (ROWS[n], 2))], axis=1)
        for n in NAMES
    }
    columns = per_step(tmp_path / "columns", {n: labels_of(n) for n in NAMES}, wide)
    rows = [f"{n},{SPLITS[n]},{n}.npy,{n}.csv,{weight[n]},{age[n]}" for n in NAMES]
    (plain / "recordings.csv").write_text(
        "id,split,inputs,targets,weight,age\n" + "\n".join(rows), encoding="utf-8"
    )
    assert fed_the_same(chunks(columns, **Y), chunks(plain, static=["age", "weight"], **Y))
    assert not fed_the_same(chunks(columns, **Y), chunks(plain, static=["weight", "age"], **Y))
    static = ["age", "weight"]
    one = finish(settings(plain, tmp_path / "r1", static=static, updates=5, **Y))
    _, spec = load_model(one.model)
    assert (spec.features, spec.layout.inputs, spec.layout.static) == (
        4,
        ("0", "1"),
        ("age", "weight"),
    )


def test_the_settings_of_a_stream_reach_it(tmp_path: Path) -> None:
    data = write_recordings(tmp_path / "data")
    more: dict[str, Any] = {"lanes": 5, "updates": None, "epochs": 2, "stride": 50}
    handed = Training.begin(Config(**settings(data, tmp_path / "handed", hand_off=True, **more)))
    assert handed.stream.hand_off
    handed.run()
    assert handed.stream._entering_state(handed.net) is not None
    cold = Training.begin(Config(**settings(data, tmp_path / "cold", **more)))
    cold.run()
    assert cold.stream._entering_state(cold.net) is None
    assert not all(
        torch.equal(a, b)
        for a, b in zip(cold.net.parameters(), handed.net.parameters(), strict=True)
    )


def write_sounds(folder: Path, rates: Sequence[int], targets: int = 8000) -> Path:
    folder.mkdir(exist_ok=True)
    for name, rate in zip(NAMES, rates, strict=True):
        soundfile.write(folder / f"{name}.wav", signal(name) / 10, rate)
        soundfile.write(
            folder / f"{name}_y.wav", signal(name)[:, 0] / 20, targets if name == "b" else rate
        )
    return write(
        folder, "id,split,inputs,targets", [f"{n},{SPLITS[n]},{n}.wav,{n}_y.wav" for n in NAMES]
    )


def test_all_files_of_a_run_have_one_rate(tmp_path: Path) -> None:
    good = write_sounds(tmp_path / "good", (8000, 8000, 8000))
    folder = finish(settings(good, tmp_path / "run", task="regress", updates=3))
    assert load_model(folder.model)[1].layout.rate == 8000
    for rates, targets, names in (
        ((8000, 8000, 16000), 8000, ("c", "a")),
        ((8000, 8000, 8000), 4000, ("b", "a")),
    ):
        bad = write_sounds(tmp_path / "bad", rates, targets)
        with pytest.raises(
            DataError, match=r"has (16000|4000) rows per second, .* has 8000; resample one of them"
        ) as refused:
            open_dataset(Config(**settings(bad, tmp_path / "no", task="regress")))
        assert all(f"recording '{name}'" in str(refused.value) for name in names)
    fast = write_sounds(tmp_path / "fast", (16000, 16000, 16000), 16000)
    with pytest.raises(
        DataError,
        match="has 16000 rows per second, what the model was trained on has 8000; resample",
    ):
        evaluate_run(load_run(folder.path), fast, "valid")
    assert "what the model was trained on has 8000" in run(
        "predict", folder.path, fast / "c.wav", "--out", tmp_path / "p.npy", ok=False
    )
    run("predict", folder.path, good / "c.wav", "--out", tmp_path / "p.npy")


def test_wide_recordings_are_surveyed_in_blocks_of_few_numbers() -> None:
    """As frames of audio: a piece of 65,536 steps would be as large as the recording."""
    reads: list[int] = []

    class Wide:
        name = "wide"

        def __len__(self) -> int:
            return 10_000

        def read(self, start: int, stop: int) -> StepArrays:
            reads.append((stop - start) * 800)
            return StepArrays(np.ones((stop - start, 800)), np.arange(start, stop) % 2)

    found = Statistics("classify", "error")
    found.add(Wide())
    assert found.classes["1"] == 5_000
    assert max(reads) <= 2**20
    assert found.inputs.count[0] == 10_000


@pytest.mark.parametrize(("task", "labels"), [("classify", "xyx"), ("regress", "132")])
def test_a_labelled_run_is_scored_and_reported(tmp_path: Path, task: str, labels: str) -> None:
    """The report draws its excerpt of signal even if nearly all steps have no target."""
    for name in NAMES:
        np.save(tmp_path / f"{name}.npy", signal(name))
    rows = [f"{n},{SPLITS[n]},{n}.npy,{label}" for n, label in zip(NAMES, labels, strict=True)]
    data, out = write(tmp_path, "id,split,inputs,label", rows), tmp_path / "run"
    run(*flags(settings(data, out, task=task, updates=3)))
    assert "1 step scored" in run("eval", out, "--split", "valid", drawn=True)
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")


def test_a_measured_rate_may_differ_from_a_written_one(tmp_path: Path) -> None:
    """Whichever comes first: clocks drift."""
    times = np.datetime64("2024-01-01", "us") + np.arange(300) * 10_100
    lines = (f"{time},{i % 5}\n" for i, time in enumerate(times))
    (tmp_path / "a.csv").write_text("time,0\n" + "".join(lines))
    soundfile.write(tmp_path / "b.wav", np.arange(300) / 300, 100)
    np.save(tmp_path / "y.npy", np.random.default_rng(0).normal(size=(300, 1)))
    np.save(tmp_path / "z.npy", np.random.default_rng(1).normal(size=(300, 1)))
    for names in (("a.csv", "b.wav"), ("b.wav", "a.csv")):
        rows = f"1,{names[0]},y.npy\n2,{names[1]},z.npy\n"
        (tmp_path / "m.csv").write_text("id,inputs,targets\n" + rows)
        assert len(tt.recordings(tmp_path / "m.csv", task="regress")["train"]) == 2
