"""Scores of classes and of labels, and their names and numbers in tables.

Shapes: `N` valid steps, `C` labels or classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from throughtime.errors import DataError, listed
from throughtime.metrics import Classification, Metrics

METRIC_NAMES = {
    "rmse": "RMSE",
    "r2": "R²",
    "esr": "ESR",
    "macro_f1": "macro-F1",
}
MODEL = "model"
FORECASTS = {
    MODEL: "model",
    "persistence": "value now",
    "season": "value one season before",
}
_BINS, _LARGEST = 4096, 30.0  # of log-odds: 0.015 apart, which no ranking of a recording notices


class MultiLabel:
    """Accuracy and F1 of each of several labels, which are 0 or 1 side by side, and their means.

    A label is predicted where its output is above 0, as for `torch.nn.BCEWithLogitsLoss`. One that
    neither occurs nor is predicted has no F1 (NaN) and is left out of the macro mean.

    Args:
        labels: their names, in the order of the outputs, or their number.

    Raises:
        ConfigError: neither, or no label.
        DataError: a target that is neither 0 nor 1, or outputs that are NaN or of another number.

    Example:
        >>> import torch
        >>> from throughtime.app.scores import MultiLabel
        >>> score = MultiLabel(("speech", "music"))
        >>> score.update(torch.tensor([[2.0, -1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))
        >>> score.compute()["accuracy"], score.compute()["f1[music]"]
        (0.75, 1.0)
    """

    def __init__(self, labels: Sequence[str] | int) -> None:
        self.names = Classification(labels).names
        self.counts = torch.zeros(len(self.names), 4, dtype=torch.long, device="cpu")

    def new(self) -> "MultiLabel":
        """An empty one with the same labels."""
        return MultiLabel(self.names)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs and targets, both `(N, C)`."""
        true = targets.view_as(outputs)
        fits = outputs.shape[1:] == (len(self.names),) and not bool(outputs.isnan().any())
        if not fits or bool(((true != 0) & (true != 1)).any()):
            raise DataError(
                f"expected outputs (N, {len(self.names)}), a number for each of the labels"
                f" {listed(self.names, quoted=True)}, and targets of 0 and 1; got"
                f" {tuple(outputs.shape)}, NaN or other targets"
            )
        cases = 2 * true.long() + (outputs > 0)
        self.counts += one_hot(cases.cpu(), 4).sum(dim=0)

    def merge(self, other: "MultiLabel") -> None:
        """Add the counts of another, as of another rank."""
        self.counts += other.counts

    def compute(self) -> Metrics:
        """The values "accuracy", "macro_f1", and "accuracy[NAME]" and "f1[NAME]" of each label."""
        neither, false, missed, hits = self.counts.double().T
        accuracy = (neither + hits) / self.counts.sum(dim=1)
        f1 = 2 * hits / (2 * hits + false + missed)
        metrics: Metrics = {"accuracy": accuracy.nanmean().item(), "macro_f1": f1.nanmean().item()}
        for name, *values in zip(self.names, accuracy.tolist(), f1.tolist(), strict=True):
            metrics[f"accuracy[{name}]"], metrics[f"f1[{name}]"] = values
        return metrics


@dataclass(frozen=True)
class ClassRow:
    """Steps of a class, and its scores against all others."""

    steps: float
    precision: float
    recall: float
    f1: float
    auroc: float
    auprc: float


@dataclass(frozen=True)
class Scores:
    """What the report shows of the scores of a split; as `evaluate_run` names it."""

    split: str
    metrics: Mapping[str, float]
    recordings: Mapping[str, Mapping[str, float]]
    classes: Mapping[str, ClassRow] = field(default_factory=dict[str, ClassRow])
    confusion: Sequence[Sequence[int]] = ()


class ClassScores:
    """Precision, recall, F1, AUROC and AUPRC of each class against all others, and the confusion.

    Rankings are those of histograms of the log-odds, so memory does not grow with the steps. AUPRC
    is the average precision: the sum of precision times the gain in recall, without interpolation.

    Args:
        names: of the classes.

    Attributes:
        confusion: `(C, C)`, how often class i, the row, was predicted as class j.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, count = names, len(names)
        self.confusion = torch.zeros(count, count, dtype=torch.long, device="cpu")
        self._ranked = torch.zeros(2, count, _BINS, dtype=torch.long, device="cpu")

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs `(N, C)`, logits, and classes `(N,)`."""
        count, true = len(self._names), targets.long().flatten().cpu()
        logs = outputs.detach().double().cpu().log_softmax(dim=1)
        odds = (logs - (-torch.expm1(logs)).log()).clamp(-_LARGEST, _LARGEST)
        bins = ((odds + _LARGEST) * ((_BINS - 1) / (2 * _LARGEST))).round().long()
        each = torch.arange(count, device="cpu")
        rows = ((true[:, None] == each) * count + each) * _BINS + bins  # of others, of the class
        pairs = true * count + logs.argmax(dim=1)
        for total, index in ((self.confusion, pairs), (self._ranked, rows.flatten())):
            total.add_(torch.bincount(index, minlength=total.numel()).view_as(total))

    def compute(self) -> dict[str, ClassRow]:
        """By class; NaN where undefined."""
        confusion = self.confusion.double()
        right, true, named = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        others, own = self._ranked.double().flip(2)  # by falling odds
        false_hits, hits = others.cumsum(1), own.cumsum(1)
        columns = (
            true,
            right / named,
            right / true,
            2 * right / (true + named),
            (others * (hits - own / 2)).sum(1) / (hits[:, -1] * false_hits[:, -1]),
            (own * (hits / (hits + false_hits)).nan_to_num()).sum(1) / hits[:, -1],
        )
        return {
            name: ClassRow(*row)
            for name, row in zip(self._names, torch.stack(columns, dim=1).tolist(), strict=True)
        }

    def facts(self) -> dict[str, Any]:
        """The scores of each class and the confusion as plain values."""
        return {"classes": self.compute(), "confusion": self.confusion.tolist()}


def number_text(value: float) -> str:
    """Four digits or decimals and a minus sign; a dash for a number that is not finite."""
    if not math.isfinite(value):
        return "\u2013"
    form = "," if isinstance(value, int) else ".4f" if 1e-3 < abs(value) < 10 else ".4g"
    return format(value, form).replace("-", "\u2212")


def is_comparison(name: str) -> bool:
    """Whether a metric of a forecast is one of the comparison with the baselines."""
    return name.partition("/")[0] in {"compared", *FORECASTS} and "/" in name
