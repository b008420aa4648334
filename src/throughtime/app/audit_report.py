"""What the audit of a run found: which window to train with, and the file that keeps the figures."""

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


@dataclass(frozen=True)
class AuditReport:
    """What an audit found, and where it looked.

    Attributes:
        split: which recordings.
        data: where they are.
        update: updates that had made the model; `None` if nobody knows.
        epoch: steps of every lane that there are in an epoch.
        tolerance: the largest bias to put up with.
        audit: what the truncations cost.
        reach: how far the gradient goes.
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
        """The shortest truncation from which on no audited one has a bias above the tolerance."""
        horizon = self.audit.suggest(self.tolerance)
        return next((row for row in self.audit.rows if row.horizon == horizon), None)

    def own(self, config: Config) -> Truncation | None:
        """The truncation that the run was trained with, if it was audited."""
        if config.exact or config.train_on == "windows":
            return None
        setting = (config.stride, config.horizon or config.stride)
        return next((row for row in self.audit.rows if (row.stride, row.horizon) == setting), None)

    def looked_at(self) -> str:
        """How much of the stream the figures are of."""
        return places(self.audit.steps, self.epoch, self.audit.lanes)

    def advice(self, config: Config) -> str:
        """Which window to train with, and how good that of the run was."""
        own = self.own(config)
        return self._window(config) + (
            ""
            if own is None
            else f" The run was trained with {_flags(own)}, whose bias is {own.bias:.2g}."
        )

    def _window(self, config: Config) -> str:
        if not self.audit.norm:
            return "The gradient is zero everywhere, so it cannot say which window to take."
        if self.enough is None:
            return self._too_short()
        if not self.reach.memory_used:
            return (
                "No window can be chosen by these figures, since the net makes no use of its past"
                " yet: train on, then audit again."
            )
        return self._long_enough(self.enough, config)

    def _long_enough(self, row: Truncation, config: Config) -> str:
        often = not config.exact and config.stride < row.stride
        more = (
            f", or --stride {config.stride} --horizon {row.horizon} for more updates"
            if often
            else ""
        )
        shortest = (
            " It is the shortest audited: a shorter one may do as well."
            if row is self.audit.rows[0] and row.horizon > 1
            else ""
        )
        return (
            f"Train with {_flags(row)}{more}: a bias of {row.bias:.2g}, within the tolerance of"
            f" {self.tolerance:g}.{shortest}"
        )

    def _too_short(self) -> str:
        row = self.audit.rows[-1]
        longer = [str(n) for n in (4 * row.horizon, 16 * row.horizon) if 2 * n <= self.epoch]
        first = f"Audit longer ones, --horizons {','.join(longer)}, or train" if longer else "Train"
        return (
            f"No audited horizon is enough: the longest, {row.horizon} steps, has a bias of"
            f" {row.bias:.2g}, above the tolerance of {self.tolerance:g}. {first} with the exact"
            " gradient, --exact."
        )

    def warning(self) -> str:
        """What the figures do not say, as a sentence."""
        said = self.reach.warning()
        return said[0].upper() + said[1:] + ("" if said.endswith(".") else ".")

    def facts(self) -> dict[str, Any]:
        """Plain numbers for machines, `None` where one is not finite."""
        enough = (
            None
            if self.enough is None
            else {"stride": self.enough.stride, "horizon": self.enough.horizon}
        )
        return plain({**asdict(self), "enough": enough, "warning": self.warning()})

    def write(self, path: Path) -> None:
        """Keeps the facts, whole or not at all."""
        write_atomically(path, json.dumps(self.facts(), indent=1, allow_nan=False).encode())

    @classmethod
    def read(cls, path: Path) -> "AuditReport":
        """What `write` kept.

        Raises:
            RunError: the file holds something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            where = {
                name: content[name] for name in ("split", "data", "update", "epoch", "tolerance")
            }
            steps = content.get("trace")
            return cls(
                **where,
                audit=_audit(content["audit"]),
                reach=_reach(content["reach"]),
                trace=None if steps is None else RunTrace.read(steps),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path}: not what `throughtime audit` wrote ({error!r}); remove it, or run audit"
                " again"
            ) from error


def places(steps: int, epoch: int, lanes: int) -> str:
    """So many steps of so many lanes, in words.

    Example:
        >>> places(6400, 20_000, 16), places(500, 500, 1)
        ('the first 6,400 of 20,000 steps of 16 lanes', 'all 500 steps of 1 lane')
    """
    some = f"all {steps:,} steps" if steps == epoch else f"the first {steps:,} of {epoch:,} steps"
    return f"{some} of {lanes} lane{'' if lanes == 1 else 's'}"


def _flags(row: Truncation) -> str:
    return f"--stride {row.stride}" + (
        "" if row.horizon == row.stride else f" --horizon {row.horizon}"
    )


def _audit(content: Any) -> Audit:
    rows = (
        _infinite(row) | {"by_parameter": _infinite(row["by_parameter"])} for row in content["rows"]
    )
    return Audit(**(content | {"rows": tuple(Truncation(**row) for row in rows)}))


def _reach(content: Any) -> Reach:
    read = {
        "lags": tuple(content["lags"]),
        "seen": tuple(content["seen"]),
        "norms": _numbers(content["norms"]),
        "by_leaf": {name: _numbers(norms) for name, norms in content["by_leaf"].items()},
        "shares": {float(share): lag for share, lag in content["shares"].items()},
        "contexts": {int(steps): loss for steps, loss in content["contexts"].items()},
        "decay": None if content["decay"] is None else Decay(*content["decay"]),
        "lyapunov": -math.inf if content["lyapunov"] is None else content["lyapunov"],
    }
    return Reach(**(content | read))


def _infinite(content: Any) -> Any:
    """A bias that is not finite is infinite: the exact gradient is zero there."""
    return {name: math.inf if value is None else value for name, value in content.items()}


def _numbers(values: list[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)
