"""The audit of a run: `tt.audit`, `tt.reach` and `tt.settling_time` as it is trained.

They measure with the recordings and lanes of the run, its loss and its class weights. The results
are kept in a file of the run, and printed as those functions print them.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from throughtime.app.config import AuditOptions
from throughtime.app.load import Run
from throughtime.app.model import make_loss, make_stream, without_dropout
from throughtime.diagnose import Audit, Reach, SettlingTime, audit, reach, settling_time
from throughtime.errors import RunError, one_line

_STEPS = 6_400  # that are audited
_PASSES = 8  # to trace losses back; each takes one loss of every lane
_TOLERANCE = 0.1  # the largest acceptable bias


@dataclass(frozen=True)
class AuditReport:
    """The results of an audit and what it measured.

    Attributes:
        split: the split of the recordings.
        data: their path.
        update: number of updates behind the weights.
        audit: the cost of each truncation.
        reach: how far the gradient goes back.
        settling: how long a cold start differs from the carried state.
    """

    split: str
    data: str
    update: int
    audit: Audit
    reach: Reach
    settling: SettlingTime

    def __str__(self) -> str:
        """All results as they print themselves, and the advice."""
        parts = (self.audit, self.reach, self.settling, self.advice())
        return "\n\n".join(map(str, parts))

    def advice(self) -> str:
        """The window to train with."""
        horizon = self.audit.suggest(_TOLERANCE)
        measured = self.audit.norm and self.audit.noise < math.sqrt(0.5)
        if not (measured and self.reach.memory_used):
            return (
                "These figures cannot choose a window: the gradient is zero or mostly sampling"
                " noise, or the net does not use its past yet."
            )
        if horizon is None:
            return (
                f"Every audited horizon has a bias above {_TOLERANCE:g}: audit longer ones by"
                " --horizons, or train with the exact gradient, --gradient exact."
            )
        return f"Train with --stride {horizon}: its bias is within {_TOLERANCE:g}."

    @classmethod
    def read(cls, path: Path) -> "AuditReport":
        """Read the file of an audit.

        Raises:
            RunError: the file holds something else.
        """
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValueError) as error:
            raise RunError(
                f"{path}: not what `throughtime audit` wrote ({one_line(error)}); remove it, or run"
                " audit again"
            ) from error

    def facts(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self) | {"enough": self.audit.suggest(_TOLERANCE)}


def audit_run(run: Run, options: AuditOptions) -> AuditReport:
    """Measure a run: seconds to minutes.

    Args:
        run: its model and settings; measured on the device of its net.
        options: what to measure: recordings, default: the split `train` of the run, and for other
            data what `eval` would take; horizons, steps and lag.

    Raises:
        DataError: no such split, recordings that the model does not fit, or too few steps.
        RunError: the loss is code that is not trusted.
    """
    net, spec, data = run.net, run.spec, options.data
    config = run.files.with_own_code(run.config, ["loss"], trust_code=options.trust_code)
    split = options.split or ("train" if data is None else None)
    split, recordings = run.in_split(data, split)
    as_trained = data is None and split == "train"
    lanes = config.lanes if as_trained else min(config.lanes, len(recordings))
    stream = make_stream(recordings, spec, config, lanes, seed=config.seed)
    loss_fn, steps = make_loss(spec, net, config.loss), options.steps or min(_STEPS, stream.steps)
    without_dropout(net)
    anchors, lag = min(64, _PASSES * lanes), options.max_lag
    cost = audit(net, stream, loss_fn, horizons=options.horizons or None, steps=steps)
    back = reach(net, stream, loss_fn, max_lag=lag, anchors=anchors, steps=steps)
    settling = settling_time(net, stream, span=lag, steps=steps)
    return AuditReport(split, str(data or config.data), spec.update, cost, back, settling)
