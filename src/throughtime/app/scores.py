"""Scores of classes and of labels, and their names and numbers in tables.

Shapes: `N` valid steps, `C` labels or classes.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from throughtime.errors import DataError, counted
from throughtime.metrics import Classification, Metrics

_MOST_ROWS = 12  # recordings, or classes of a confusion, in a table
_BINS, _LARGEST = 4096, 30.0  # of log-odds: 0.015 apart, which no ranking of a recording notices


class MultiLabel:
    """Accuracy and F1 of each of several labels, which are 0 or 1 side by side, and their means.

    A label is predicted where its output is above 0, as for `torch.nn.BCEWithLogitsLoss`. One that
    neither occurs nor is predicted has no F1 (NaN) and is left out of the macro mean.

    Args:
        labels: their names, in the order of the outputs.

    Raises:
        DataError: a target that is neither 0 nor 1, or outputs that are NaN.

    Example:
        >>> import torch
        >>> from throughtime.app.scores import MultiLabel
        >>> score = MultiLabel(("speech", "music"))
        >>> score.update(torch.tensor([[2.0, -1.0], [1.0, 1.0]]), torch.tensor([[1, 0], [0, 1]]))
        >>> score.compute()["accuracy"], score.compute()["f1[music]"]
        (0.75, 1.0)
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.names = labels
        self.counts = torch.zeros(len(labels), 4, dtype=torch.long, device="cpu")

    def new(self) -> "MultiLabel":
        """An empty one with the same labels."""
        return MultiLabel(self.names)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs and targets of 0 and 1, both `(N, C)`."""
        true = targets.view_as(outputs)
        if outputs.isnan().any() or not ((true == 0) | (true == 1)).all():
            raise DataError("labels are 0 or 1, and outputs numbers; got others, or NaN")
        cases = 2 * true.long() + (outputs > 0)
        self.counts += one_hot(cases.cpu(), 4).sum(dim=0)

    def compute(self) -> Metrics:
        """The values "accuracy", "macro_f1", and "accuracy[NAME]" and "f1[NAME]" of each label."""
        neither, false, missed, hits = self.counts.double().T
        accuracy = (neither + hits) / self.counts.sum(dim=1)
        f1 = 2 * hits / (2 * hits + false + missed)
        means = {"accuracy": accuracy.nanmean().item(), "macro_f1": f1.nanmean().item()}
        return means | by_name({"accuracy": accuracy, "f1": f1}, self.names)


def by_name(columns: Mapping[str, Tensor], names: Sequence[str]) -> Metrics:
    """The numbers of each column `(C,)` by its key and their names: `recall[beat]`."""
    return {
        f"{key}[{name}]": value
        for key, values in columns.items()
        for name, value in zip(names, values.tolist(), strict=True)
    }


@dataclass(frozen=True)
class Scores:
    """The scores of a split, as `scores-SPLIT.json` has them.

    Attributes:
        split: its name.
        update: of the weights.
        data: the path of the recordings.
        steps: that were scored.
        metrics: over all recordings together; of a forecast those of the baselines, too, and of
            classes those of `ClassScores`.
        recordings: metrics of each.
        confusion: of each true class, how often each class was predicted.
    """

    split: str
    update: int
    data: str
    steps: int
    metrics: Mapping[str, float]
    recordings: Mapping[str, Mapping[str, float]]
    confusion: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Any])

    def tables(self) -> Iterator[tuple[str, list[str], list[list[str]]]]:
        """Of each table the caption, the heads of the columns, and the rows of texts."""
        plain = [name for name in self.metrics if "[" not in name]
        named, advice = defaultdict[str, dict[str, float]](dict), ""
        for key, value in self.metrics.items():
            kind, bracket, name = key.partition("[")
            if bracket:
                named[name[:-1]][kind] = value
            if "skill" in kind and value < 0:
                advice = "; a skill below 0: try --difference, which learns the change from now"
        count = len(self.recordings)
        each = self.recordings if count <= _MOST_ROWS else {}
        yield (
            f"{counted(count, 'whole recording')} of '{self.split}', the state carried",
            ["recording", *plain],
            _texts({**each, "all steps together": self.metrics}, plain),
        )
        if named:
            kinds = [*next(iter(named.values()))]
            yield f"each class or target by itself{advice}", ["name", *kinds], _texts(named, kinds)
        if 0 < len(self.confusion) <= _MOST_ROWS:
            yield (
                "steps of each true class, a row, by the class that is predicted, a column",
                ["true class", *self.confusion],
                [[name, *map(number_text, row)] for name, row in self.confusion.items()],
            )


def _texts(rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> list[list[str]]:
    return [
        [name, *(number_text(row.get(column, math.nan)) for column in columns)]
        for name, row in rows.items()
    ]


class ClassScores:
    """Precision, recall, AUROC and AUPRC of each class against all others, and the confusion.

    Rankings are those of histograms of the log-odds, so memory does not grow with the steps. AUPRC
    is the average precision: the sum of precision times the gain in recall, without interpolation.

    Args:
        names: of the classes.

    Attributes:
        total: has the confusion.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.total = Classification(names)
        # steps of other classes and of the class, by the class and the odds of it
        self._ranked = torch.zeros(2, len(names), _BINS, dtype=torch.long, device="cpu")

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs `(N, C)`, logits, and classes `(N,)`."""
        self.total.update(outputs, targets)
        count = outputs.shape[1]
        odds = outputs.detach().double().cpu().softmax(dim=1).logit().clamp(-_LARGEST, _LARGEST)
        bins = ((odds + _LARGEST) * ((_BINS - 1) / (2 * _LARGEST))).round().long()
        true = one_hot(targets.long().flatten().cpu(), count)
        places = true, torch.arange(count, device="cpu"), bins
        self._ranked.index_put_(places, torch.ones_like(bins), accumulate=True)

    def compute(self) -> Metrics:
        """The values "precision[NAME]", "steps[NAME]" and so on; NaN where undefined."""
        confusion = self.total.confusion.double()
        right, true, named = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
        others, own = self._ranked.double().flip(2)  # by falling odds
        false_hits, hits = others.cumsum(1), own.cumsum(1)
        columns = {
            "precision": right / named,
            "recall": right / true,
            "auroc": (others * (hits - own / 2)).sum(1) / (hits[:, -1] * false_hits[:, -1]),
            "auprc": (own * (hits / (hits + false_hits)).nan_to_num()).sum(1) / hits[:, -1],
            "steps": true,
        }
        return by_name(columns, self.total.names)


def number_text(value: float) -> str:
    """Four digits, or a whole number; a dash for a number that is not finite."""
    if not math.isfinite(value):
        return "\u2013"
    return format(value, "," if isinstance(value, int) else ".4g")
