"""Several target columns of 0 and 1: labels, each with a probability of its own."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import throughtime as tt
from test_cli import run
from test_run import settings
from throughtime.app.data import open_dataset
from throughtime.app.model import make_loss
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.errors import ConfigError, DataError

LABELS = ("speech", "music")


def sounds(folder: Path, steps: int = 3000) -> tuple[Path, Any]:
    """Two labels that overlap, each with the sign of its own slow input."""
    draw = np.random.default_rng(0)
    labels = np.stack([np.repeat(draw.integers(0, 2, steps // 25), 25) for _ in LABELS], 1)
    x = (2 * labels - 1) + 0.8 * draw.normal(size=labels.shape)
    table = np.concatenate([x, labels], axis=1)
    path = folder / "sounds.csv"
    header = "u,v," + ",".join(LABELS)
    np.savetxt(path, table, ["%.4f", "%.4f", "%d", "%d"], ",", header=header, comments="")
    return path, labels


def train(data: Path, out: Path, *words: str) -> str:
    options = "--targets speech,music --hidden 8 --lanes 4 --stride 25 --updates 80 --lr 0.02"
    return run("train", data, *options.split(), *words, "--out", out)


def test_labels_are_learned_scored_and_predicted_on_the_command_line(tmp_path: Path) -> None:
    data, labels = sounds(tmp_path)
    said = train(data, tmp_path / "run")
    assert "each a label by itself: --task multilabel" in said
    assert "macro_f1" in said
    run("eval", tmp_path / "run")
    assert "f1[speech]" in (tmp_path / "run" / "scores-valid.json").read_text(encoding="utf-8")
    run("predict", tmp_path / "run", data, "--out", tmp_path / "p.csv")
    with (tmp_path / "p.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "p[speech]", "p[music]"]
    shares = np.array(rows, float)[:, 1:]
    assert shares.min() >= 0
    assert shares.max() <= 1
    assert abs(shares.sum(1) - 1).max() > 0.5  # a mutant: shares of classes that exclude each other
    trained = tt.load_run(tmp_path / "run")
    outputs, _ = tt.predict(trained.net, trained.recordings(data, targets=False)[0])
    np.testing.assert_allclose(shares, outputs.sigmoid(), atol=1e-5)
    held_out = slice(2400, 3000)
    assert ((shares > 0.5) == labels)[held_out].mean() > 0.9
    few = "--horizons", "10", "--max-lag", "10", "--steps", "60"
    assert "worst parameter" in run("audit", tmp_path / "run", *few)


def test_the_loss_is_that_of_each_label(tmp_path: Path) -> None:
    data, _ = sounds(tmp_path)
    values = settings(data, tmp_path / "run", targets=[*LABELS], task="multilabel")
    training = Training.begin(Config(**values))
    assert type(make_loss(training.spec, training.net)) is torch.nn.BCEWithLogitsLoss
    with pytest.raises(ConfigError, match="belongs to classes"):
        Config(**{**values, "class_weights": "balanced"})


def test_other_values_than_0_and_1_are_refused(tmp_path: Path) -> None:
    data, _ = sounds(tmp_path)
    lines = data.read_text(encoding="utf-8").splitlines()
    lines[8] = "0,0,0.5,1"
    data.write_text("\n".join(lines), encoding="utf-8")
    values = settings(data, tmp_path / "run", targets=[*LABELS], task="multilabel")
    with pytest.raises(DataError, match=r"the targets of step 7 must be 0 or 1, or NaN"):
        open_dataset(Config(**values))


def test_labels_in_python_and_of_later_rows(tmp_path: Path) -> None:
    data, labels = sounds(tmp_path)
    splits = tt.recordings(data, targets=LABELS)
    assert splits.classes == ()
    targets = splits["train"][0].read(0, 3000).targets
    assert np.array_equal(np.asarray(targets), labels)
    values = settings(data, tmp_path / "run", targets=[*LABELS], task="multilabel", ahead="1,5")
    spec = Training.begin(Config(**values)).spec
    assert spec.target_names == ("speech+1", "music+1", "speech+5", "music+5")
    assert spec.outputs == 4
