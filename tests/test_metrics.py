"""Scores against the formulas written out, on pieces of any size."""

import math

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
from throughtime.metrics import Classification, Regression

pieces = st.lists(st.sampled_from([1, 2, 5, 31, 97]), min_size=1, max_size=6)


@given(sizes=pieces, seed=seeds, classes=st.sampled_from([2, 3, 7]))
def test_classification_equals_the_formulas(sizes: list[int], seed: int, classes: int) -> None:
    torch.manual_seed(seed)
    names = tuple(f"c{i}" for i in range(classes))
    score, parts = tt.metrics.Classification(names), list[torch.Tensor]()
    for size in sizes:
        outputs, truth = torch.randn(size, classes), torch.randint(max(1, classes - 1), (size,))
        outputs[:, -1] -= 1
        score.update(outputs, truth)
        parts.append(torch.stack([truth, outputs.argmax(1)]))
    truth, guess = torch.cat(parts, 1).numpy()
    expected, f1 = {"accuracy": (truth == guess).mean()}, list[float]()
    for i, name in enumerate(names):
        hit, either = ((truth == i) & (guess == i)).sum(), (truth == i).sum() + (guess == i).sum()
        f1.append(2 * hit / either if either else math.nan)
        expected[f"f1[{name}]"] = f1[-1]
    expected["macro_f1"] = np.nanmean(f1)
    assert score.compute() == pytest.approx(expected, nan_ok=True)


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
        (MultiLabel(("a", "b")), two, two + 0.5),
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
    metric = Classification(2)
    metric.update(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
    assert metric.compute().keys() == {"accuracy", "macro_f1", "f1[0]", "f1[1]"}
    for wrong in (0, "ab"):
        with pytest.raises(ConfigError):
            Classification(wrong)


def test_labels_are_scored_each_by_itself() -> None:
    outputs, targets = torch.randn(200, 2), torch.randint(0, 2, (200, 2))
    score = MultiLabel(("a", "b"))
    other = score.new()
    score.update(outputs[:77], targets[:77])
    other.update(outputs[77:], targets[77:].double())
    score.merge(other)
    values = score.compute()
    for name, column, labels in zip("ab", outputs.T, targets.T, strict=True):
        one = Classification(2)
        one.update(torch.stack([torch.zeros(200), column], 1), labels)
        alone = one.compute()
        assert values[f"f1[{name}]"] == pytest.approx(alone["f1[1]"])
        assert values[f"accuracy[{name}]"] == pytest.approx(alone["accuracy"])
    for name, own in (("macro_f1", "f1"), ("accuracy", "accuracy")):
        assert values[name] == pytest.approx((values[f"{own}[a]"] + values[f"{own}[b]"]) / 2)
