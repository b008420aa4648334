"""The results of a run's audit, the advice that follows from them, and their file."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from throughtime._files import write_atomically
from throughtime.app.config import Config
from throughtime.app.trace import RunTrace
from throughtime.diagnose import Audit, Reach
from throughtime.diagnose._slice import plain
from throughtime.diagnose.audit import Truncation
from throughtime.diagnose.reach import Decay
from throughtime.errors import RunError

_OPTIONAL = {"update", "trace", "decay", "burst", "edge"}  # fields whose `None` is a value


@dataclass(frozen=True)
class AuditReport:
    """The results of an audit and what it measured.

    Attributes:
        split: the split of the recordings.
        data: their path.
        update: number of updates behind the weights; `None` if unknown.
        epoch: steps of every lane in an epoch.
        tolerance: the largest acceptable bias.
        audit: the cost of each truncation.
        reach: how far the gradient goes back.
        trace: the gradient at every step of an excerpt; `None` if it was not traced.
    """

    split: str
    data: str
    update: int | None
    epoch: int
    tolerance: float
    audit: Audit
    reach: Reach
    trace: RunTrace | None = None

    @property
    def enough(self) -> Truncation | None:
        """The shortest truncation from which on no audited bias exceeds the tolerance."""
        horizon = self.audit.suggest(self.tolerance)
        return next((row for row in self.audit.rows if row.horizon == horizon), None)

    def own(self, config: Config) -> Truncation | None:
        """The truncation that the run was trained with, if it was audited."""
        if config.gradient != "truncated" or config.train_on == "windows":
            return None
        setting = (config.update_steps(), config.credit_steps())
        return next((row for row in self.audit.rows if (row.stride, row.horizon) == setting), None)

    def extent(self) -> str:
        """How much of the stream was measured, in words."""
        return extent_in_words(self.audit.steps, self.epoch, self.audit.lanes)

    def advice(self, config: Config) -> str:
        """The window to train with, and the bias of the run's own."""
        own = self.own(config)
        if own is None:
            return self._window(config)
        return (
            f"{self._window(config)} The run was trained with {_flags(own)}, whose bias is"
            f" {own.bias:.2g}."
        )

    def _window(self, config: Config) -> str:
        if not self.audit.norm:
            return "The gradient is zero everywhere, so it cannot say which window to take."
        if self.enough is None:
            return self._too_short()
        if not self.reach.memory_used:
            return (
                "These figures cannot choose a window, because the net does not use its past yet."
                " Train on, then audit again."
            )
        return self._long_enough(self.enough, config)

    def _long_enough(self, row: Truncation, config: Config) -> str:
        stride = config.update_steps()
        more_updates = config.gradient == "truncated" and stride is not None and stride < row.stride
        flags = _flags(row)
        if more_updates:
            flags += f", or --stride {stride} --horizon {row.horizon} for more updates"
        advice = f"Train with {flags}: a bias of {row.bias:.2g}, within the tolerance of"
        advice += f" {self.tolerance:g}."
        if row is self.audit.rows[0] and row.horizon > 1:
            advice += " It is the shortest audited window; a shorter one may be enough."
        return advice

    def _too_short(self) -> str:
        row = self.audit.rows[-1]
        longer = [str(n) for n in (4 * row.horizon, 16 * row.horizon) if 2 * n <= self.epoch]
        first = f"Audit longer ones, --horizons {','.join(longer)}, or train" if longer else "Train"
        return (
            f"No audited horizon is long enough: the longest, {row.horizon} steps, has a bias of"
            f" {row.bias:.2g}, above the tolerance of {self.tolerance:g}. {first} with the exact"
            " gradient, --gradient exact."
        )

    def warning(self) -> str:
        """The limits of the figures, as a sentence."""
        text = self.reach.warning()
        return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")

    def facts(self) -> dict[str, Any]:
        """Plain numbers for JSON, `None` where one is not finite."""
        row = self.enough
        enough = None if row is None else {"stride": row.stride, "horizon": row.horizon}
        return plain({**asdict(self), "enough": enough, "warning": self.warning()})

    def write(self, path: Path) -> None:
        """Write the facts as JSON, atomically."""
        write_atomically(path, json.dumps(self.facts(), indent=1, allow_nan=False).encode())

    @classmethod
    def read(cls, path: Path) -> "AuditReport":
        """Read the file that `write` wrote.

        Raises:
            RunError: the file holds something else.
        """
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            trace = _restore(facts.get("trace"), math.inf, "trace")
            return cls(
                facts["split"],
                facts["data"],
                facts["update"],
                facts["epoch"],
                facts["tolerance"],
                _audit(_restore(facts["audit"], math.inf)),
                _reach(_restore(facts["reach"], math.nan)),
                None if trace is None else RunTrace.from_plain(trace),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path}: not what `throughtime audit` wrote ({error!r}); remove it, or run audit"
                " again"
            ) from error


def extent_in_words(steps: int, epoch: int, lanes: int) -> str:
    """The measured part of the stream, in words.

    Example:
        >>> extent_in_words(6400, 20_000, 16), extent_in_words(500, 500, 1)
        ('the first 6,400 of 20,000 steps of 16 lanes', 'all 500 steps of 1 lane')
    """
    part = f"all {steps:,} steps" if steps == epoch else f"the first {steps:,} of {epoch:,} steps"
    return f"{part} of {lanes} lane{'' if lanes == 1 else 's'}"


def _flags(row: Truncation) -> str:
    horizon = "" if row.horizon == row.stride else f" --horizon {row.horizon}"
    return f"--stride {row.stride}{horizon}"


def _restore(value: Any, missing: float, name: str = "") -> Any:
    """The value before `plain` and JSON: tuples, and `missing` for numbers that were not finite."""
    if isinstance(value, list):
        return tuple(_restore(item, missing) for item in value)
    if isinstance(value, dict):
        return {key: _restore(item, missing, key) for key, item in value.items()}
    return missing if value is None and name not in _OPTIONAL else value


def _audit(values: dict[str, Any]) -> Audit:
    rows: Any = tuple(Truncation(**row) for row in values["rows"])
    return Audit(**(values | {"rows": rows}))


def _reach(values: dict[str, Any]) -> Reach:
    decay, lyapunov = values["decay"], values["lyapunov"]
    parts: dict[str, Any] = {
        "shares": {float(share): lag for share, lag in values["shares"].items()},
        "contexts": {int(steps): loss for steps, loss in values["contexts"].items()},
        "decay": None if decay is None else Decay(*decay),
        "lyapunov": -math.inf if math.isnan(lyapunov) else lyapunov,
    }
    return Reach(**(values | parts))
