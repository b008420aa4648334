"""The audit of a run: `tt.audit`, `tt.reach` and `tt.settling_time` as it is trained.

They measure with the recordings and lanes of the run, its loss and its class weights, in evaluation
mode, which draws no masks. The results are kept in a file of the run, and printed as those
functions print them.
"""

import math
from dataclasses import dataclass

from throughtime.app.load import Run
from throughtime.app.model import make_loss, make_stream
from throughtime.app.settings import AuditOptions
from throughtime.diagnose import Audit, Reach, SettlingTime, audit, reach, settling_time

_STEPS = 6_400  # that are audited
_PASSES = 8  # to trace losses back; each takes one loss of every lane
_TOLERANCE = 0.1  # the largest acceptable bias


@dataclass(frozen=True)
class AuditReport:
    """The results of an audit and what it measured.

    Attributes:
        update: number of updates behind the weights.
        audit: the cost of each truncation.
        reach: how far the gradient goes back.
        settling: how long a cold start differs from the carried state.
    """

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
        choice = f"--stride {horizon}" if horizon else "--gradient exact, or audit longer horizons"
        return f"For a bias within {_TOLERANCE:g}, train with {choice}."


def audit_run(run: Run, options: AuditOptions) -> AuditReport:
    """Measure a run on its training split: seconds to minutes.

    Args:
        run: its model and settings; measured on the device of its net.
        options: what to measure: horizons, steps and lag.

    Raises:
        DataError: recordings that the model does not fit, or too few steps.
        RunError: the loss is code that is not trusted.
    """
    net, spec, lag = run.net, run.spec, options.max_lag
    config = run.files.with_own_code(run.config, ["loss"], trust_code=options.trust_code)
    recordings = run.recordings(split="train")
    stream = make_stream(recordings, spec, config, config.lanes, seed=config.seed)
    loss_fn, steps = make_loss(spec, net, config.loss), options.steps or min(_STEPS, stream.steps)
    anchors = min(64, _PASSES * config.lanes)
    cost = audit(net, stream, loss_fn, horizons=options.horizons, steps=steps)
    back = reach(net, stream, loss_fn, max_lag=lag, anchors=anchors, steps=steps)
    return AuditReport(spec.update, cost, back, settling_time(net, stream, span=lag, steps=steps))
