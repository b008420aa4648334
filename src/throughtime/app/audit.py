"""The audit of a run: `tt.audit`, `tt.reach`, `tt.settling_time` and `tt.trace` as it is trained.

They measure with the recordings and lanes of the run, its loss and its class weights. The results
are kept in a file of the run, and printed as those functions print them.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from throughtime.app.config import AuditOptions
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import make_loss, make_stream, one_thread, without_dropout
from throughtime.app.recordings import progress
from throughtime.carry.carried import Carried
from throughtime.diagnose import Audit, Reach, SettlingTime, audit, reach, settling_time
from throughtime.diagnose.trace import trace
from throughtime.errors import RunError, one_line
from throughtime.gradient import LossFn, Truncated
from throughtime.stream import Stream
from throughtime.stream.recording import Part
from throughtime.updates import updates

_STEPS = 6_400  # that are audited
_PASSES = 8  # to trace losses back; each takes one loss of every lane
_TRACED = 400  # steps


@dataclass(frozen=True)
class AuditReport:
    """The results of an audit and what it measured.

    Attributes:
        split: the split of the recordings.
        data: their path.
        update: number of updates behind the weights.
        tolerance: the largest acceptable bias.
        audit: the cost of each truncation.
        reach: how far the gradient goes back.
        settling: how long a cold start differs from the carried state.
        trace: the summary of the gradient of one update over the first steps of a recording.
    """

    split: str
    data: str
    update: int
    tolerance: float
    audit: Audit
    reach: Reach
    settling: SettlingTime
    trace: str = ""

    def __str__(self) -> str:
        """All results as they print themselves, and the advice."""
        parts = (self.audit, self.reach, self.settling, self.trace, self.advice())
        return "\n\n".join(str(part) for part in parts if part)

    def advice(self) -> str:
        """The window to train with."""
        horizon = self.audit.suggest(self.tolerance)
        measured = self.audit.norm and self.audit.noise < math.sqrt(0.5)
        if not (measured and self.reach.memory_used):
            return (
                "These figures cannot choose a window: the gradient is zero or mostly sampling"
                " noise, or the net does not use its past yet."
            )
        if horizon is None:
            return (
                f"Every audited horizon has a bias above {self.tolerance:g}: audit longer ones by"
                " --horizons, or train with the exact gradient, --gradient exact."
            )
        (row,) = (row for row in self.audit.rows if row.horizon == horizon)
        flags = f"--stride {row.stride} --horizon {horizon}"
        return f"Train with {flags}: its bias is {row.bias:.2g}, within {self.tolerance:g}."

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
        return asdict(self) | {"enough": self.audit.suggest(self.tolerance)}


def audit_run(
    run: Run,
    options: AuditOptions,
    data: Path | None = None,
    split: str | None = None,
) -> AuditReport:
    """Measure a run: seconds to minutes.

    Args:
        run: its model and settings; measured on the device of its net.
        options: what to measure.
        data: other recordings; default: those of the run.
        split: which of them; default: `train`, and for other data what `eval` would take.

    Raises:
        DataError: no such split, recordings that the model does not fit, or too few steps.
    """
    net, spec, config = run.net, run.spec, run.config
    split = split or ("train" if data is None else None)
    split, recordings = recordings_for(spec, config, data, split)
    as_trained = data is None and split == "train"
    lanes = config.lanes if as_trained else min(config.lanes, len(recordings))
    stream = make_stream(recordings, spec, config, options.lanes or lanes, seed=config.seed)
    without_dropout(net)
    loss_fn, steps = make_loss(spec, net, config.loss), options.steps or min(_STEPS, stream.steps)
    first = Part(recordings[0], 0, min(_TRACED, len(recordings[0])))
    anchors, lag = min(64, _PASSES * stream.lanes), options.max_lag
    with one_thread(spec, stream.lanes):
        progress("comparing horizons", 0, 0)
        how: Any = {"horizons": options.horizons, "stride": options.stride, "steps": steps}
        cost = audit(net, stream, loss_fn, **how)
        progress("tracing losses back", 0, 0)
        back = reach(net, stream, loss_fn, max_lag=lag, anchors=anchors, steps=steps)
        progress("comparing cold starts", 0, 0)
        settling = settling_time(net, stream, span=lag, steps=steps)
        trace_of = traced(net, make_stream([first], spec, config, 1, _TRACED), loss_fn)
    what = split, str(data or config.data), spec.update, options.tolerance
    return AuditReport(*what, cost, back, settling, trace_of)


def traced(net: Carried, stream: Stream, loss_fn: LossFn) -> str:
    """What `tt.trace` prints of one update over all steps of the stream; empty without a loss."""
    with trace(net) as watch:
        count = len([*updates(net, stream, loss_fn, gradient=Truncated(stream.steps))])
    net.zero_grad()
    return str(watch) if count else ""
