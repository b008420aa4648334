"""Metrics of outputs against targets, updated chunk by chunk.

Sums stay on the device of the outputs; `compute` reads them.

Shapes: `N` valid steps, `C` classes or output columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from throughtime._device import real_type, send
from throughtime.errors import ConfigError, DataError, listed

__all__ = ["Classification", "MergeableMetric", "Metric", "Regression"]

_MERGED = {"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"}  # of torchmetrics
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
        """Add outputs `(N, C)` and targets: classes `(N,)`, numbers `(N, C)`, also if C is 1."""
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


class TorchMetric(Protocol):
    """A `torchmetrics.Metric` or `MetricCollection`, by its methods: it is never imported."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add outputs and targets."""
        ...

    def compute(self) -> Any:
        """A tensor, or tensors by name."""
        ...

    def reset(self) -> None:
        """Forget all updates."""
        ...

    def clone(self) -> "TorchMetric":
        """A copy."""
        ...

    def to(self, device: torch.device) -> "TorchMetric":
        """Itself, on another device."""
        ...


@dataclass
class TorchMetricAdapter:
    """A metric of torchmetrics as a `Metric`; a value of several numbers gets one name for each."""

    metric: TorchMetric
    _updated: bool = field(default=False, init=False)

    def new(self) -> "TorchMetricAdapter":
        metric = self.metric.clone()
        metric.reset()
        for part in metric.modules() if isinstance(metric, nn.Module) else ():
            if hasattr(
                part, "sync_on_compute"
            ):  # `merge` adds ranks up, and only where they differ
                setattr(part, "sync_on_compute", False)  # noqa: B010 (torchmetrics has no types)
        return TorchMetricAdapter(metric)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if not self._updated:
            self.metric = self.metric.to(outputs.device)
        self._updated = True
        self.metric.update(outputs, targets)

    def merge(self, other: "TorchMetricAdapter") -> None:
        if other._updated and not self._updated:
            self.metric = other.metric
        elif other._updated:
            for mine, theirs in zip(_parts(self.metric), _parts(other.metric), strict=True):
                mine.merge_state(theirs)
        self._updated = self._updated or other._updated

    @property
    def is_mergeable(self) -> bool:
        """Whether all state is summed, collected, or a largest or smallest value."""
        return all(
            hasattr(part, "merge_state")
            and len(list(part.modules())) == 1  # a metric around another keeps state in that one
            and not part.full_state_update
            and {getattr(f, "__name__", "") for f in part._reductions.values()} <= _MERGED
            for part in _parts(self.metric)
        )

    def __getstate__(self) -> dict[str, Any]:
        """On the CPU, for other ranks."""
        return self.__dict__ | {"metric": self.metric.clone().to(torch.device("cpu"))}

    def compute(self) -> Metrics:
        if not self._updated:  # torchmetrics would warn, and has no names yet
            return {}
        result = self.metric.compute()
        named = result if isinstance(result, Mapping) else {type(self.metric).__name__: result}
        values: Metrics = {}
        for name, value in named.items():
            numbers = torch.as_tensor(value, device="cpu")
            if numbers.dim() == 0:
                values[name] = numbers.item()
            else:
                rows = enumerate(numbers.flatten().tolist())
                values |= {f"{name}[{i}]": number for i, number in rows}
        return values


def _parts(metric: Any) -> list[Any]:
    """The metrics of a collection, each with a state of its own; or the metric itself."""
    values: Any = getattr(metric, "values", None)
    return [metric] if values is None else list(values(copy_state=True))


def is_mergeable(metric: Metric) -> bool:
    """Whether ranks can add up this metric."""
    if isinstance(metric, TorchMetricAdapter):
        return metric.is_mergeable
    return isinstance(metric, MergeableMetric)


def as_metric(metric: Metric | TorchMetric) -> Metric:
    """The metric itself, or an adapter for one of torchmetrics.

    Raises:
        ConfigError: it is neither.
    """
    if callable(getattr(metric, "new", None)) and not isinstance(metric, type):
        return cast("Metric", metric)
    if all(callable(getattr(metric, name, None)) for name in ("update", "compute", "clone")):
        return TorchMetricAdapter(cast("TorchMetric", metric))
    is_class = isinstance(metric, type)
    got = f"the class {metric.__name__}" if is_class else f"a {type(metric).__name__}"
    raise ConfigError(
        f"metrics is {got}, expected tt.metrics.Classification(classes), tt.metrics.Regression(), a"
        " torchmetrics.Metric, or an object with new(), update(outputs, targets) and compute()"
    )


@dataclass
class Classification:
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
    _counts: Tensor = field(init=False)  # (true, predicted), on the device of the outputs
    # on a device, until they are read: the largest negated target, target and whether any is NaN
    _extremes: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        classes: Any = self.classes  # checked here
        if isinstance(classes, (int, np.integer)) and not isinstance(classes, bool):
            classes = [*map(str, range(int(classes)))]
        if isinstance(classes, (str, bool)) or not isinstance(classes, Sequence) or not classes:
            raise ConfigError(
                f"classes={self.classes!r}, expected their number or their names:"
                " tt.metrics.Classification(2) or tt.metrics.Classification(['rest', 'beat'])"
            )
        self.names = tuple(classes)
        self._counts = torch.zeros(len(classes), len(classes), dtype=torch.long, device="cpu")

    @property
    def confusion(self) -> Tensor:
        """`(C, C)`: how often class i, the row, was predicted as class j; on the host.

        Raises:
            DataError: a target that is no class, or outputs that are NaN, in what was added.
        """
        if self._extremes is not None:
            least, largest, nan = self._extremes.tolist()
            self._check(-least, largest, nan=bool(nan))
        return self._counts.cpu()

    def new(self) -> "Classification":
        """An empty one with the same classes."""
        return Classification(self.names)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add outputs `(N, C)`, whose largest is the prediction, and classes `(N,)`."""
        n = len(self.names)
        if outputs.shape[-1] != n:
            raise DataError(
                f"the outputs have {outputs.shape[-1]} columns, expected one for each of the"
                f" classes {listed(self.names, quoted=True)}"
            )
        if not len(targets):
            return
        true = targets.long()
        least, largest = true.aminmax()
        nan = outputs.isnan().any()
        if outputs.is_cpu:
            self._check(int(least), int(largest), nan=bool(nan))
        else:
            self._add_extremes(torch.stack([-least, largest, nan.long()]))
            true = true.clamp(0, n - 1)
            self._counts = send(self._counts, outputs.device)
        pairs = (true * n + outputs.argmax(dim=-1)).flatten()
        self._counts.view(-1).index_add_(0, pairs, torch.ones_like(pairs))

    def _add_extremes(self, extremes: Tensor | None) -> None:
        if extremes is not None and self._extremes is not None:
            extremes = torch.maximum(self._extremes, extremes.to(self._extremes.device))
        self._extremes = self._extremes if extremes is None else extremes

    def _check(self, least: int, largest: int, *, nan: bool) -> None:
        """Refuse targets that are no class, and outputs that have none."""
        if not 0 <= least <= largest < len(self.names):
            raise DataError(
                f"targets run from {least} to {largest}, expected 0 to {len(self.names) - 1} for"
                f" {listed(self.names, quoted=True)}"
            )
        if nan:
            raise DataError("the outputs hold NaN: the model diverged; a NaN has no class")

    def __getstate__(self) -> dict[str, Any]:
        return _on_host(self.__dict__)

    def merge(self, other: "Classification") -> None:
        """Add the counts of another, as of another rank."""
        self._counts = self._counts + other._counts.to(self._counts.device)
        self._add_extremes(other._extremes)

    def compute(self) -> Metrics:
        """The values "accuracy", "macro_f1" and "f1[NAME]" for each class."""
        confusion = self.confusion
        right = confusion.diagonal().double()
        occurs, predicted = confusion.sum(1).double(), confusion.sum(0).double()
        f1 = (2 * right / (occurs + predicted)).tolist()
        seen = [value for value in f1 if not math.isnan(value)]
        return {
            "accuracy": (right.sum() / occurs.sum()).item(),
            "macro_f1": sum(seen) / len(seen) if seen else math.nan,
            **{f"f1[{name}]": value for name, value in zip(self.names, f1, strict=True)},
        }


@dataclass
class Regression:
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
        self.squared_error = self.squared_error + (y - t).square().sum()
        self.squared_target = self.squared_target + t.square().sum()
        mean = t.mean(0)
        self._grow(len(t), mean, (t - mean).square().sum())

    def _grow(self, n: int, mean: Tensor, spread: Tensor | float) -> None:
        """Chan, Golub & LeVeque's pairwise update: no cancellation however long the recording."""
        before = self.mean.to(mean.device) if self.count else torch.zeros_like(mean)
        step = mean - before
        between = step.square().sum() * self.count * n / (self.count + n)
        self.spread = self.spread + (spread + between)
        self.mean = before + step * n / (self.count + n)
        self.count += n

    def __getstate__(self) -> dict[str, Any]:
        return _on_host(self.__dict__)

    def merge(self, other: "Regression") -> None:
        """Add the sums of another, as of another rank."""
        if other.count:
            self.squared_error = self.squared_error + other.squared_error
            self.squared_target = self.squared_target + other.squared_target
            self._grow(other.count, other.mean, other.spread)

    def compute(self) -> Metrics:
        """The values "rmse", "r2" and "esr"."""
        values = self.count * max(1, len(self.mean))
        sums = self.squared_error, self.squared_target, self.spread
        error, target, spread = (float(total) for total in sums)
        return {
            "rmse": math.sqrt(error / values) if values and self.count else math.nan,
            "r2": 1 - error / spread if spread else math.nan,
            "esr": error / target if target else math.nan,
        }


def _on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a metric for other ranks."""
    return {name: v.cpu() if isinstance(v, Tensor) else v for name, v in values.items()}
