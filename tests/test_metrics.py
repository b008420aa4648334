"""Scores against the formulas written out, on pieces of any size."""

import copy
import math
from typing import cast

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from strategies import seeds
from throughtime.app.scores import MultiLabel
from throughtime.errors import ConfigError, DataError
from throughtime.metrics import Classification, Regression, as_metric

pieces = st.lists(st.sampled_from([1, 2, 5, 31, 97]), min_size=1, max_size=6)


@given(sizes=pieces, seed=seeds, classes=st.sampled_from([2, 3, 7]))
def test_classification_equals_the_formulas(sizes: list[int], seed: int, classes: int) -> None:
    draw = np.random.default_rng(seed)
    names = tuple(f"c{i}" for i in range(classes))
    score = tt.metrics.Classification(names)
    truth, guess = list[int](), list[int]()
    for size in sizes:
        outputs, targets = (
            draw.normal(size=(size, classes)),
            draw.integers(0, max(1, classes - 1), size),
        )
        outputs[:, -1] -= 1
        score.update(torch.from_numpy(outputs), torch.from_numpy(targets))
        truth += targets.tolist()
        guess += outputs.argmax(1).tolist()
    found = score.compute()
    assert found["accuracy"] == pytest.approx(np.mean(np.array(truth) == np.array(guess)))
    f1 = dict[str, float]()
    for i, name in enumerate(names):
        hit = sum(t == g == i for t, g in zip(truth, guess, strict=True))
        missed, false = truth.count(i) - hit, guess.count(i) - hit
        f1[name] = 2 * hit / (2 * hit + missed + false) if hit + missed + false else math.nan
        assert found[f"f1[{name}]"] == pytest.approx(f1[name], nan_ok=True)
    assert found["macro_f1"] == pytest.approx(np.nanmean(list(f1.values())))
    assert set(found) == {"accuracy", "macro_f1", *(f"f1[{name}]" for name in names)}


@given(
    sizes=pieces,
    seed=seeds,
    width=st.sampled_from([1, 2, 5]),
    offset=st.sampled_from([0.0, 3.0, 1e6]),
)
def test_regression_on_uneven_pieces_equals_numpy(
    sizes: list[int], seed: int, width: int, offset: float
) -> None:
    """The offset is what a sum of squares minus a squared sum would drown in."""
    draw = np.random.default_rng(seed)
    truth = draw.normal(size=(sum(sizes), width)) + offset
    guess = truth + draw.normal(size=truth.shape)
    score, begin = tt.metrics.Regression(), 0
    for size in sizes:
        rows = slice(begin, begin + size)
        targets = truth[rows, 0] if width == 1 else truth[rows]
        score.update(torch.from_numpy(guess[rows]), torch.from_numpy(targets))
        begin += size
    found = score.compute()
    error = ((guess - truth) ** 2).sum()
    spread = ((truth - truth.mean(0)) ** 2).sum()
    assert found["rmse"] == pytest.approx(np.sqrt(((guess - truth) ** 2).mean()))
    assert found["esr"] == pytest.approx(error / (truth**2).sum())
    if sum(sizes) > 1:
        assert found["r2"] == pytest.approx(1 - error / spread, rel=1e-6, abs=1e-6)
    else:
        assert math.isnan(found["r2"])


def test_scores_refuse_what_does_not_fit() -> None:
    two, none = torch.zeros(2, 2), torch.tensor([0, 0])
    for metric, outputs, targets in (
        (Classification(("a", "b")), two, torch.tensor([0, 5])),
        (Classification(("a", "b")), two * torch.nan, none),
        (Regression(), torch.zeros(3, 1), torch.zeros(3, 2)),
        (MultiLabel("ab"), two, two + 0.5),
        (MultiLabel("ab"), two * torch.nan, two),
    ):
        with pytest.raises(DataError):
            metric.update(outputs, targets)
    score = Regression()
    score.update(torch.zeros(0, 1), torch.zeros(0))
    score.update(torch.ones(2), torch.zeros(2))
    assert score.compute()["rmse"] == 1.0


@pytest.mark.parametrize(("outputs", "targets"), [((7,), (7, 1)), ((7, 1), (7,))])
def test_each_row_is_compared_with_its_own_target(
    outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    """`(N,)` beside `(N, 1)` does not broadcast to all pairs, also in a loop of one's own."""
    y, t = torch.randn(7), torch.randn(7)
    score = Regression()
    score.update(y.view(outputs), t.view(targets))
    assert score.count == 7
    assert score.compute()["rmse"] == pytest.approx((y - t).square().mean().sqrt().item())
    labels, rows = torch.arange(7) % 2, torch.randn(7, 2)
    classes = Classification(2)
    classes.update(rows, labels.view(targets))
    assert classes.confusion.sum() == 7
    right = (rows.argmax(1) == labels).double().mean().item()
    assert classes.compute()["accuracy"] == pytest.approx(right)


def test_metric_of_torchmetrics_gives_the_value_of_ours_and_stays_as_it_was() -> None:
    torch.manual_seed(0)
    net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 2)))
    sizes = (40, 31)
    data = [{"inputs": torch.randn(n, 3), "targets": torch.randint(2, (n,))} for n in sizes]
    data[0]["targets"][5:20] = -100  # do not count
    metric = torchmetrics.Accuracy("multiclass", num_classes=2, average="micro")
    first, again, ours = (
        tt.evaluate(net, data, metrics=m) for m in (metric, metric, Classification(2))
    )
    assert first == again
    assert metric.update_count == 0
    assert first.metrics == {"MulticlassAccuracy": pytest.approx(ours.metrics["accuracy"])}
    for name, own in first.recordings.items():
        assert own["MulticlassAccuracy"] == pytest.approx(ours.recordings[name]["accuracy"])


def test_classes_may_be_given_by_their_number() -> None:
    for classes in (2, cast("int", np.int64(2))):
        metric = Classification(classes)
        metric.update(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        assert metric.compute().keys() == {"accuracy", "macro_f1", "f1[0]", "f1[1]"}
    for wrong in (0, True, "ab", None, 2.0):
        with pytest.raises(ConfigError):
            Classification(wrong)  # type: ignore[arg-type]
    for wrong in ({}, Classification):  # no metrics
        with pytest.raises(ConfigError):
            as_metric(wrong)  # type: ignore[arg-type]


def test_a_metric_of_outputs_with_a_graph_keeps_no_graph() -> None:
    """As in a loop that has no `no_grad` around it: every chunk's graph would stay in memory."""
    weight = torch.ones((), requires_grad=True)
    score = Regression()
    for _ in range(2):
        score.update(weight * torch.randn(5, 1), weight * torch.randn(5, 1))
    values = (score.squared_error, score.squared_target, score.spread, score.mean)
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
    assert copy.deepcopy(score).compute() == score.compute()


def test_labels_are_scored_each_by_itself() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(200, 3), torch.randint(0, 2, (200, 3))
    score = MultiLabel(("a", "b", "c"))
    score.update(outputs[:77], targets[:77])
    score.update(outputs[77:], targets[77:].double())
    values, alone = score.compute(), list[dict[str, float]]()
    for name, column, labels in zip("abc", outputs.T, targets.T, strict=True):
        one = Classification(2)
        one.update(torch.stack([torch.zeros(200), column], 1), labels)
        alone.append(one.compute())
        assert values[f"f1[{name}]"] == pytest.approx(alone[-1]["f1[1]"])
        assert values[f"accuracy[{name}]"] == pytest.approx(alone[-1]["accuracy"])
    assert values["macro_f1"] == pytest.approx(np.mean([each["f1[1]"] for each in alone]))
    assert values["accuracy"] == pytest.approx(np.mean([each["accuracy"] for each in alone]))
