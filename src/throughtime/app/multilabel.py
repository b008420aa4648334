"""Scores of several labels side by side, each of them 0 or 1 at every step.

Shapes: `N` valid steps, `C` labels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from throughtime.errors import DataError, listed
from throughtime.metrics import Classification, Metrics


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
        >>> from throughtime.app.multilabel import MultiLabel
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
            values = torch.tensor(
                [score[key] for score in scores.values()], dtype=torch.float64, device="cpu"
            )
            metrics[mean] = values.nanmean().item()
            metrics |= {f"{own}[{name}]": score[key] for name, score in scores.items()}
        return metrics
