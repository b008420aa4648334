"""The audit of a run: `tt.audit`, `tt.reach`, `tt.settling_time` and `tt.trace` as it is trained.

They measure with the recordings and lanes of the run, its loss and its class weights. The results
are kept in a file of the run, and printed as those functions print them.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from throughtime.app.config import AuditOptions, Config
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import make_loss, one_thread, unbroken_stream, without_dropout
from throughtime.app.recordings import OnPhase
from throughtime.carry.carried import Carried
from throughtime.diagnose import Audit, Reach, SettlingTime, audit, reach, settling_time
from throughtime.diagnose.trace import trace
from throughtime.errors import ConfigError, RunError, counted, one_line
from throughtime.gradient import LossFn, Truncated
from throughtime.stream import Stream
from throughtime.stream.recording import Part
from throughtime.updates import updates

T = TypeVar("T")
_HORIZONS = (50, 200, 800)
_LENGTHS = 8  # times the longest horizon: steps that are audited
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


class AuditJob:
    """An audit of a run ready to start: everything is opened and checked, nothing is computed yet.

    Args:
        run: its model and settings; measured on the device of its net.
        options: what to measure.
        data: other recordings; default: those of the run.
        split: which of them; default: `train`, and for other data what `eval` would take.
        on_phase: called as recordings are opened.

    Raises:
        DataError: no such split, recordings that the model does not fit, or too few steps.
        ConfigError: horizons as long as the steps that are measured.
    """

    def __init__(
        self,
        run: Run,
        options: AuditOptions,
        data: Path | None = None,
        split: str | None = None,
        on_phase: OnPhase | None = None,
    ) -> None:
        self._run, self.options, self.net, config = run, options, run.net, run.config
        self.data = str(data or config.data)
        split = split or ("train" if data is None else None)
        self.split, recordings = recordings_for(run.spec, config, data, split, on_phase=on_phase)
        as_trained = data is None and self.split == "train"
        lanes = config.lanes if as_trained else min(config.lanes, len(recordings))
        self.stream = Stream(
            recordings,
            options.lanes or lanes,
            config.chunk_steps(),
            seed=config.seed,
            warm_up=config.warm_up,
            dtype=run.spec.torch_dtype,
            missing=config.missing,
        )
        self.horizons = _horizons(options, config, self.stream.steps)
        longest, epoch = self.horizons[-1], self.stream.steps
        self.steps = min(options.steps or _LENGTHS * longest, epoch)
        if longest >= self.steps:
            raise ConfigError(
                f"horizon {longest:,} is not shorter than the {counted(self.steps, 'step')} audited"
                f" of a lane ({epoch:,} in an epoch), so it would cut nothing: take shorter"
                " --horizons, more --steps, fewer --lanes, or longer recordings"
            )
        without_dropout(self.net)
        self.loss_fn = make_loss(run.spec, self.net, config.loss)
        first = Part(recordings[0], 0, min(_TRACED, len(recordings[0])))
        self._traced = unbroken_stream([first], run.spec, config, 1, _TRACED)

    def describe(self) -> str:
        """What will be measured."""
        lanes = f"{counted(self.stream.steps, 'step')} of {counted(self.stream.lanes, 'lane')}"
        horizons = ", ".join(map(str, self.horizons))
        return f"auditing {self.steps:,} of {lanes} of split '{self.split}': horizons {horizons}"

    def run(self, on_phase: OnPhase = lambda *_: None) -> AuditReport:
        """Measure: seconds to minutes; `on_phase` is called as each part begins and ends."""
        stream, options, spec = self.stream, self.options, self._run.spec

        def measured(name: str, measure: Callable[..., T], *arguments: Any, **more: Any) -> T:
            on_phase(name, 0, 0)
            result = measure(self.net, stream, *arguments, steps=self.steps, **more)
            on_phase(name, 1, 1)
            return result

        back = {"max_lag": options.max_lag, "anchors": min(64, _PASSES * stream.lanes)}
        loss_fn, horizons, stride = self.loss_fn, self.horizons, options.stride
        with one_thread(when=spec.is_small(stream.lanes)):
            return AuditReport(
                self.split,
                self.data,
                spec.update,
                options.tolerance,
                measured("comparing horizons", audit, loss_fn, horizons, stride=stride),
                measured("tracing losses back", reach, loss_fn, **back),
                measured("comparing cold starts", settling_time, span=options.max_lag),
                traced(self.net, self._traced, loss_fn),
            )


def _horizons(options: AuditOptions, config: Config, epoch: int) -> tuple[int, ...]:
    """The given horizons, or the usual ones and the run's own if an epoch is twice as long."""
    if options.horizons is not None:
        return tuple(sorted(set(options.horizons)))
    own = config.credit_steps() if config.gradient == "truncated" else None
    least = options.stride or 1
    usual = {*_HORIZONS, own or least}
    return tuple(sorted(h for h in usual if least <= h <= epoch // 2)) or (max(epoch // 2, least),)


def traced(net: Carried, stream: Stream, loss_fn: LossFn) -> str:
    """What `tt.trace` prints of one update over all steps of the stream; empty without a loss."""
    with trace(net) as watch:
        count = len([*updates(net, stream, loss_fn, gradient=Truncated(stream.steps))])
    net.zero_grad()
    return str(watch) if count else ""
