"""Metrics of outputs against targets, updated chunk by chunk.

Sums stay on the device of the outputs; `compute` reads them.

Shapes: `N` valid steps, `C` classes or output columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor, nn

from throughtime._device import real_type, send
from throughtime.errors import ConfigError, DataError, counted, listed

__all__ = ["Classification", "MergeableMetric", "Metric", "Regression"]

Metrics: TypeAlias = dict[str, float]


class Metric(Protocol):
    """A metric of outputs against targets: the protocol of your own, for `metrics=`.

    Example:
        >>> import torch, throughtime as tt
        >>> class Largest:
        ...     def __init__(self):
        ...         self.value = 0.0
        ...     def new(self):
        ...         return Largest()
        ...     def update(self, outputs, targets):
        ...         self.value = max(self.value, float((outputs - targets).abs().max()))
        ...     def compute(self):
        ...         return {"largest error": self.value}
        >>> net = tt.carry(torch.nn.GRU(3, 1))
        >>> data = {"inputs": torch.zeros(50, 3), "targets": torch.full((50, 1), 9.0)}
        >>> 8 < tt.evaluate(net, data, metrics=Largest()).metrics["largest error"] < 10
        True
    """

    def new(self) -> "Metric":
        """An empty one of the same kind."""
        ...

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs `(N, C)` and targets: classes `(N,)`, numbers `(N, C)`, also if C is 1.

        Of a net with several outputs they are in a tuple or a dict, as `tt.predict` returns them.
        """
        ...

    def compute(self) -> Metrics:
        """The values by name; NaN without any update."""
        ...


@runtime_checkable
class MergeableMetric(Metric, Protocol):
    """A metric that several ranks, each with its own recordings, can compute together.

    `merge` receives the metric of another rank, which travels pickled. `Classification` and
    `Regression` have it. A metric without it is refused on several ranks.

    Example:
        >>> from throughtime.metrics import MergeableMetric, Regression
        >>> isinstance(Regression(), MergeableMetric)
        True
    """

    def merge(self, other: Any) -> None:
        """Add the updates of another of the same kind."""
        ...


@dataclass
class TorchMetricAdapter:
    """A metric of torchmetrics as a `Metric`; a value of several numbers gets one name for each."""

    metric: Any
    _updated: bool = field(default=False, init=False)

    def new(self) -> "TorchMetricAdapter":
        metric = self.metric.clone()
        metric.reset()
        for part in metric.modules():
            part.sync_on_compute = False  # each rank has the same recordings
        return TorchMetricAdapter(metric)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if not self._updated:
            self.metric = self.metric.to(outputs.device)
        self._updated = True
        self.metric.update(outputs, targets)

    def compute(self) -> Metrics:
        if not self._updated:  # torchmetrics would warn, and has no names yet
            return {}
        result = self.metric.compute()
        named = result if isinstance(result, Mapping) else {type(self.metric).__name__: result}
        values: Metrics = {}
        for name, value in named.items():
            numbers = torch.as_tensor(value, device="cpu")
            for i, number in enumerate(numbers.flatten().tolist()):
                values[f"{name}[{i}]" if numbers.dim() else name] = number
        return values


def as_metric(metric: Metric | nn.Module) -> Metric:
    """The metric itself, or an adapter for one of torchmetrics.

    Raises:
        ConfigError: it is neither.
    """
    is_class = isinstance(metric, type)
    if callable(getattr(metric, "new", None)) and not is_class:
        return cast("Metric", metric)
    if isinstance(metric, nn.Module) and callable(getattr(metric, "clone", None)):
        return TorchMetricAdapter(metric)
    got = f"the class {metric.__name__}" if is_class else f"a {type(metric).__name__}"
    raise ConfigError(
        f"metrics is {got}, expected tt.metrics.Classification(classes), tt.metrics.Regression(), a"
        " torchmetrics.Metric, or an object with new(), update(outputs, targets) and compute()"
    )


class Sums:
    """Takes outputs in one tensor, and travels to other ranks on the host."""

    def __getstate__(self) -> dict[str, Any]:
        values = vars(self).items()
        return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in values}


@dataclass
class Classification(Sums):
    """Accuracy, macro-F1 and the F1 of each class, from the confusion matrix.

    A class that neither occurs nor is predicted has no F1 (NaN) and is left out of the macro mean.

    Args:
        classes: their names, in the order of the outputs, or their number: then the names are "0",
            "1" and so on.

    Attributes:
        names: of the classes.
        confusion: `(C, C)`, how often class i, the row, was predicted as class j.

    Raises:
        ConfigError: neither, or no class.
        DataError: a target is no class, or an output is NaN. The host does not wait for a device:
            of its targets and outputs this is known when results are read.

    Example:
        >>> import torch
        >>> from throughtime.metrics import Classification
        >>> score = Classification(("rest", "beat"))
        >>> score.update(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([0, 0]))
        >>> score.compute()["accuracy"]
        0.5
    """

    classes: Sequence[str] | int
    names: tuple[str, ...] = field(init=False)
    # (true, predicted), on the device of the outputs; the last row counts targets that are no
    # class, the last column outputs with a NaN
    _counts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        classes: Any = self.classes  # checked here
        if isinstance(classes, (int, Integral)) and not isinstance(classes, bool):
            classes = [*map(str, range(int(classes)))]
        if isinstance(classes, str) or not isinstance(classes, Sequence) or not classes:
            raise ConfigError(
                f"classes={self.classes!r}, expected their number or their names:"
                " tt.metrics.Classification(2) or tt.metrics.Classification(['rest', 'beat'])"
            )
        self.names = tuple(classes)
        size = len(classes) + 1
        self._counts = torch.zeros(size, size, dtype=torch.long, device="cpu")

    @property
    def confusion(self) -> Tensor:
        """`(C, C)`: how often class i, the row, was predicted as class j; on the host.

        Raises:
            DataError: a target that is no class, or outputs that are NaN, in what was added.
        """
        return self._check(self._counts.cpu())[:-1, :-1]

    def new(self) -> "Classification":
        """An empty one with the same classes."""
        return Classification(self.names)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs `(N, C)`, whose largest is the prediction, and classes `(N,)` or `(N, 1)`."""
        n = len(self.names)
        if outputs.shape[-1] != n:
            raise DataError(
                f"the outputs have {outputs.shape[-1]} columns, expected one for each of the"
                f" classes {listed(self.names, quoted=True)}"
            )
        if not len(targets):
            return
        true = targets.long().reshape(len(outputs))
        true = true.where((true >= 0) & (true < n), n)
        predicted = outputs.argmax(dim=-1).masked_fill(outputs.isnan().any(dim=-1), n)
        pairs = (true * (n + 1) + predicted).flatten()
        counts = torch.zeros_like(self._counts, device=outputs.device)
        counts.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
        if counts.is_cpu:
            self._check(counts)
        self._counts = counts + send(self._counts, outputs.device)

    def _check(self, counts: Tensor) -> Tensor:
        """Counts on the host, without targets that are no class and outputs that have none."""
        if wrong := int(counts[-1].sum()):
            raise DataError(
                f"{counted(wrong, 'target is', 'targets are')} no class, expected 0 to"
                f" {len(self.names) - 1} for {listed(self.names, quoted=True)}"
            )
        if counts[:, -1].any():
            raise DataError("the outputs hold NaN: the model diverged; a NaN has no class")
        return counts

    def merge(self, other: "Classification") -> None:
        """Add the counts of another, as of another rank."""
        self._counts = self._counts + other._counts.to(self._counts.device)

    def compute(self) -> Metrics:
        """The values "accuracy", "macro_f1" and "f1[NAME]" for each class."""
        confusion = self.confusion.double()
        occurs, predicted, right = confusion.sum(1), confusion.sum(0), confusion.diagonal()
        f1 = 2 * right / (occurs + predicted)
        return {
            "accuracy": (right.sum() / occurs.sum()).item(),
            "macro_f1": f1.nanmean().item(),
            **{f"f1[{name}]": value for name, value in zip(self.names, f1.tolist(), strict=True)},
        }


@dataclass
class Regression(Sums):
    """RMSE, R² and the error-to-signal ratio, over all columns together.

    R² compares with the mean of each column of these targets; ESR, usual in audio, with silence:
    the squared error over the squared target. Sums are in float64.

    Attributes:
        count: numbers compared so far.
        squared_error: the sum of squared errors.
        squared_target: the sum of squared targets.
        spread: the sum of squared deviations of the targets from the mean of their column.
        mean: of the targets, `(C,)`.

    Example:
        >>> import torch
        >>> from throughtime.metrics import Regression
        >>> score = Regression()
        >>> score.update(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]]))
        >>> round(score.compute()["rmse"], 4)
        1.4142
    """

    count: int = 0
    squared_error: Tensor | float = 0.0
    squared_target: Tensor | float = 0.0
    spread: Tensor | float = 0.0  # sum of squared deviations of the targets from their mean
    mean: Tensor = field(default_factory=lambda: torch.zeros(0, device="cpu"))

    def new(self) -> "Regression":
        """An empty one."""
        return Regression()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs and targets, both `(N, C)`."""
        if not len(targets):
            return
        wide = real_type(outputs)
        y = outputs.detach().to(wide).reshape(len(outputs), -1)
        t = targets.detach().to(wide).reshape(len(targets), -1)
        if y.shape != t.shape:
            raise DataError(
                f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)};"
                " expected one output for each target"
            )
        mean = t.mean(0)
        error, target, spread = (part.square().sum() for part in (y - t, t, t - mean))
        self.merge(Regression(len(t), error, target, spread, mean))

    def merge(self, other: "Regression") -> None:
        """Add the sums of another, as of another rank.

        By the pairwise update of Chan, Golub & LeVeque: no cancellation, however long the
        recording.
        """
        if not other.count:
            return
        total = self.count + other.count
        mean = self.mean.to(other.mean.device) if self.count else torch.zeros_like(other.mean)
        step = other.mean - mean
        self.squared_error = self.squared_error + other.squared_error
        self.squared_target = self.squared_target + other.squared_target
        between = step.square().sum() * self.count * other.count / total
        self.spread = self.spread + (other.spread + between)
        self.mean, self.count = mean + step * other.count / total, total

    def compute(self) -> Metrics:
        """The values "rmse", "r2" and "esr"."""
        values = self.count * max(1, len(self.mean))
        error, target, spread = map(float, (self.squared_error, self.squared_target, self.spread))
        return {
            "rmse": math.sqrt(error / values) if values else math.nan,
            "r2": 1 - error / spread if spread else math.nan,
            "esr": error / target if target else math.nan,
        }
