"""Metrics of several ranks, each with its own recordings, are those of one process with all."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

import throughtime as tt
from processes import in_processes
from throughtime.carry import Carried
from throughtime.errors import DataError
from throughtime.metrics import Classification, Regression

LENGTHS = (40, 25, 53, 19, 31)
CLASSES: dict[str, Any] = {"task": "multiclass", "num_classes": 3}


def recordings(kind: str) -> list[dict[str, Any]]:
    """Some steps without a target; classes whose frequencies differ between recordings."""
    random = np.random.default_rng(5)
    rows: list[dict[str, Any]] = []
    for i, length in enumerate(LENGTHS):
        inputs = random.normal(size=(length, 2)).astype(np.float32)
        masked = random.random(length) < 0.3
        targets = np.minimum(random.integers(0, 3 + i, length), 2)
        targets[:9], masked[:9] = np.arange(9) % 3, False  # every class occurs
        if kind == "class":
            labels = np.where(masked, -100, targets)
        else:
            labels = np.where(masked, np.nan, inputs[:, 0] + 10 * i).astype(np.float32)
        rows.append({"inputs": inputs, "targets": labels, "name": f"r{i}"})
    return rows


def metrics() -> dict[str, tuple[str, Any]]:
    return {
        "classification": ("class", Classification(3)),
        "regression": ("number", Regression()),
    }


def net_for(kind: str) -> Carried:
    torch.manual_seed(3)
    width = 3 if kind == "class" else 1
    return tt.carry(torch.nn.Sequential(torch.nn.GRU(2, 6), torch.nn.Linear(6, width)))


def work(rank: int, _: object) -> Iterator[tuple[str, Any]]:
    del rank
    for name, (kind, metric) in metrics().items():
        net, stream = net_for(kind), tt.Stream(recordings(kind), lanes=2, chunk=9, seed=None)
        shares = tt.evaluate(net, stream, metrics=metric)
        whole = tt.evaluate(net, recordings(kind), metrics=metric)
        yield name, (shares.metrics, shares.recordings, whole.metrics, whole.recordings)
    for name, metric in (("own", Own()), ("torchmetrics", torchmetrics.Accuracy(**CLASSES))):
        stream = tt.Stream(recordings("class"), lanes=2, chunk=9, seed=None)
        try:
            tt.evaluate(net_for("class"), stream, metrics=metric)
        except DataError as error:
            yield f"refused {name}", str(error)


def nothing() -> None:
    """Before there is a group."""


def test_two_ranks_score_as_one_process() -> None:
    reports = in_processes(2, nothing, work)
    for report in reports:
        for name in ("own", "torchmetrics"):
            refusal = report[f"refused {name}"]
            assert "cannot be added up over ranks: give them a method merge" in refusal
    for name, (kind, metric) in metrics().items():
        alone = tt.evaluate(net_for(kind), recordings(kind), metrics=metric)
        assert len(alone.recordings) == len(LENGTHS)
        for report in reports:
            shares, by_recording, whole, whole_by_recording = report[name]
            assert shares == pytest.approx(alone.metrics, rel=1e-5, nan_ok=True), name
            assert whole == pytest.approx(alone.metrics, rel=1e-6, nan_ok=True), name
            assert by_recording.keys() == alone.recordings.keys()
            for recording, own in alone.recordings.items():
                assert by_recording[recording] == pytest.approx(own, rel=1e-5, nan_ok=True)
                assert whole_by_recording[recording] == pytest.approx(own, rel=1e-6, nan_ok=True)


def test_an_evaluation_leaves_the_metric_as_it_was() -> None:
    """States are new for each evaluation, and steps without a target do not count."""
    metric = torchmetrics.Accuracy(**CLASSES, average="micro")
    first, again = (
        tt.evaluate(net_for("class"), recordings("class"), metrics=metric) for _ in range(2)
    )
    assert first == again
    assert int(getattr(metric, "update_count", getattr(metric, "_update_count", 0))) == 0
    own = tt.evaluate(net_for("class"), recordings("class"), metrics=Classification(3))
    assert list(first.metrics.values()) == pytest.approx([own.metrics["accuracy"]])


class Own:
    """A metric as in the documentation of the protocol, without `merge`."""

    def new(self) -> "Own":
        return Own()

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        del outputs, targets

    def compute(self) -> dict[str, float]:
        return {"zero": 0.0}
