"""Which weights of a run its model file has: those of its best validation, or its last ones.

The best is that of the highest macro-F1 for classes, else of the lowest loss; the first of several
that are equal. Cost: one copy of the weights in memory and in each checkpoint.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from throughtime.app.config import Config
from throughtime.app.run_folder import to_cpu
from throughtime.errors import ConfigError

NOT_VALIDATED = (
    "no validation during training, so the last weights are kept, not the best (--valid-every and"
    " recordings held out choose the best)"
)


class ModelSelection:
    """The validations of a run so far: the best of them, its weights, and when to stop.

    Args:
        keep_best: whether to copy the weights of the best validation.
        patience: validations without a better one after which the run ends; `None`: never.

    Attributes:
        best: the update of the best validation; `None` before the first one with a score.
        score: of it, higher is better.
        last: the update of the last validation, 0 before the first.
        stale: validations since the best.
    """

    def __init__(self, *, keep_best: bool, patience: int | None = None) -> None:
        self.keep_best, self.patience = keep_best, patience
        self.best: int | None = None
        self.score, self.last, self.stale = -math.inf, 0, 0
        self._weights: Mapping[str, Tensor] = {}

    @classmethod
    def from_config(cls, config: Config, *, validates: bool) -> "ModelSelection":
        """The selection that the settings describe, of a run that validates or does not.

        Raises:
            ConfigError: patience without validation.
        """
        if config.patience is not None and not validates:
            raise ConfigError(
                f"--patience {config.patience} counts validations during training, and there are"
                " none: hold recordings out (--holdout, or a split valid), with --valid-every"
                " above 0"
            )
        return cls(keep_best=config.keep == "best" and validates, patience=config.patience)

    @property
    def exhausted(self) -> bool:
        """Whether the patience has ended."""
        return self.patience is not None and self.stale >= self.patience

    def add(self, update: int, score: float, net: nn.Module) -> None:
        """Add a validation of the net at an update; NaN is never better."""
        self.last, self.stale = update, self.stale + 1
        if score > self.score:
            self.best, self.score, self.stale = update, score, 0
            if self.keep_best:
                self._weights = to_cpu(dict(net.state_dict()))

    def kept(self, update: int, net: nn.Module) -> tuple[int, Mapping[str, Tensor]]:
        """The update and the weights to keep, where the net is that of `update`."""
        if self._weights and self.best is not None:
            return self.best, self._weights
        return update, net.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint needs."""
        return {
            "best": self.best,
            "score": None if self.best is None else self.score,
            "last": self.last,
            "stale": self.stale,
            "weights": dict(self._weights),
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over a `state_dict`."""
        self.best, self.last, self.stale = values["best"], values["last"], values["stale"]
        self.score = -math.inf if self.best is None else values["score"]
        self._weights = values["weights"]


def criterion(metrics: Iterable[str]) -> str:
    """The name of the score that selects, among those of the task."""
    return "macro_f1" if "macro_f1" in metrics else "loss"


def selection_score(row: Mapping[str, float]) -> float:
    """The score of a validation that selects, higher is better.

    Example:
        >>> selection_score({"loss": 0.5, "macro_f1": 0.7}), selection_score({"loss": 0.5})
        (0.7, -0.5)
    """
    name = criterion(row)
    return row[name] if name == "macro_f1" else -row[name]
