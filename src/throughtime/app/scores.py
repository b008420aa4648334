"""Scores of classes and of labels, and the tables of scores in the report and on the terminal.

Shapes: `N` valid steps, `C` labels or classes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from throughtime.errors import DataError, listed
from throughtime.metrics import Classification, Metrics

Cell: TypeAlias = str | float

METRIC_NAMES = {
    "rmse": "RMSE",
    "r2": "R²",
    "esr": "ESR",
    "macro_f1": "macro-F1",
}
MODEL = "model"
_FORECASTS = {
    MODEL: "model",
    "persistence": "value now",
    "season": "value one season before",
}
_BINS, _LARGEST = 4096, 30.0  # of log-odds: 0.015 apart, which no ranking of a recording notices


class MultiLabel:
    """Accuracy and F1 of each of several labels, which are 0 or 1 side by side, and their means.

    Each label is a `Classification` of its own: it is predicted where its output is above 0, as for
    `torch.nn.BCEWithLogitsLoss`. A label that neither occurs nor is predicted has no F1 (NaN) and
    is left out of the macro mean.

    Args:
        labels: their names, in the order of the outputs, or their number.

    Raises:
        ConfigError: neither, or no label.
        DataError: a target that is neither 0 nor 1, or outputs that are NaN; as `Classification`.

    Example:
        >>> import torch
        >>> from throughtime.app.scores import MultiLabel
        >>> score = MultiLabel(("speech", "music"))
        >>> score.update(torch.tensor([[2.0, -1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))
        >>> score.compute()["accuracy"], score.compute()["f1[music]"]
        (0.75, 1.0)
    """

    def __init__(self, labels: Sequence[str] | int) -> None:
        self.columns = {name: Classification(2) for name in Classification(labels).names}

    def new(self) -> "MultiLabel":
        """An empty one with the same labels."""
        return MultiLabel([*self.columns])

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs and targets, both `(N, C)`."""
        if outputs.shape[-1] != len(self.columns):
            raise DataError(
                f"the outputs have {outputs.shape[-1]} columns, expected one for each of the labels"
                f" {listed(self.columns, quoted=True)}"
            )
        valid = targets.where(targets == targets.bool(), -1).view_as(outputs)
        for column, y, target in zip(self.columns.values(), outputs.T, valid.T, strict=True):
            column.update(torch.stack([-y, y], dim=1), target)

    def merge(self, other: "MultiLabel") -> None:
        """Add the counts of another, as of another rank."""
        for name, column in self.columns.items():
            column.merge(other.columns[name])

    def compute(self) -> Metrics:
        """The values "accuracy", "macro_f1", and "accuracy[NAME]" and "f1[NAME]" of each label."""
        scores = {name: column.compute() for name, column in self.columns.items()}
        metrics: Metrics = {}
        for mean, key, own in (("accuracy", "accuracy", "accuracy"), ("macro_f1", "f1[1]", "f1")):
            known = [score[key] for score in scores.values() if score[key] == score[key]]
            metrics[mean] = sum(known) / len(known) if known else math.nan
            metrics |= {f"{own}[{name}]": score[key] for name, score in scores.items()}
        return metrics


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

    def compute(self) -> dict[str, dict[str, float]]:
        """By class: its steps, precision, recall, F1, AUROC and AUPRC; NaN where undefined."""
        confusion = self.confusion.double()
        right, true, named = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        others, own = self._ranked.double().flip(2)  # by falling odds
        false_hits, hits = others.cumsum(1), own.cumsum(1)
        columns = {
            "steps": true,
            "precision": right / named,
            "recall": right / true,
            "f1": 2 * right / (true + named),
            "auroc": (others * (hits - own / 2)).sum(1) / (hits[:, -1] * false_hits[:, -1]),
            "auprc": (own * (hits / (hits + false_hits)).nan_to_num()).sum(1) / hits[:, -1],
        }
        return {
            name: {key: float(values[i]) for key, values in columns.items()}
            for i, name in enumerate(self._names)
        }

    def facts(self) -> dict[str, Any]:
        """The scores of each class and the confusion as plain values."""
        return {"classes": self.compute(), "confusion": self.confusion.tolist()}


@dataclass(frozen=True)
class DataTable:
    """Rows of text and numbers; the first cell of a row is its heading.

    Args:
        columns: the column headings.
        rows: one cell per column.
        caption: what the table shows.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """The rows as text."""
        return [tuple(map(_text, row)) for row in self.rows]


def _text(value: Cell) -> str:
    """Numbers with four digits or decimals and a minus sign; a dash for one that is not finite."""
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "\u2013"
    form = "," if isinstance(value, int) else ".4f" if 1e-3 < abs(value) < 10 else ".4g"
    return format(value, form).replace("-", "\u2212")


def score_tables(
    caption: str,
    names: Sequence[str],
    overall: Mapping[str, float],
    recordings: Mapping[str, Mapping[str, float]],
) -> list[DataTable]:
    """The metrics of these names, of each recording and of all steps; those of baselines."""
    rows = {**recordings, "all steps together": overall}
    cells = [[name, *(row[n] for n in names)] for name, row in rows.items()]
    columns = ["recording", *(METRIC_NAMES.get(n, n) for n in names)]
    return [DataTable(columns, cells, caption), *_baseline_table(overall)]


def is_comparison(name: str) -> bool:
    """Whether a metric of a forecast is one of the comparison with the baselines."""
    return name.partition("/")[0] in {"compared", *_FORECASTS} and "/" in name


def _baseline_table(metrics: Mapping[str, float]) -> Iterator[DataTable]:
    """Model and baselines of the metrics of a forecast, if there are some."""
    if "compared/steps" not in metrics:
        return
    kind = "accuracy" if "model/accuracy" in metrics else "rmse"
    rows: list[list[Cell]] = []
    for key, value in metrics.items():
        name, _, score = key.partition("/")
        if score.startswith(kind):
            target = score[len(kind) :]
            skill = metrics.get(f"{name}/skill{target}", math.nan)
            rows.append([_FORECASTS[name], target.strip("[]"), value, skill])
    steps = f"forecasts on the same {metrics['compared/steps']:,.0f} steps"
    caption = f"{METRIC_NAMES.get(kind, 'Accuracy')} of {steps}. A skill above 0: the model has"
    columns = ["forecast", "target", METRIC_NAMES.get(kind, kind), "skill of the model"]
    caption += " the smaller error"
    if any(isinstance(row[3], float) and row[3] < 0 for row in rows):
        caption += (
            "; below 0, try --difference, by which the net learns the change from now, more"
            " --updates, a smaller --lr, or inputs that lead the target"
        )
    yield DataTable(columns, rows, caption)
