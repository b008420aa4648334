"""The audit of a run: the reach of its gradient, the cost of truncating it, its settling time.

The gradients are those of training: the recordings and lanes of the run, its loss and its class
weights. The results, with the advice that follows from them, are kept in a file of the run.
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
from throughtime.app.model import make_loss, one_thread, without_dropout
from throughtime.app.recordings import OnPhase
from throughtime.app.trace import RunTrace, trace_run
from throughtime.diagnose import Audit, Reach, SettlingTime, audit, reach, settling_time
from throughtime.diagnose.audit import Truncation
from throughtime.errors import ConfigError, RunError, counted, one_line
from throughtime.stream import Stream

T = TypeVar("T")
_HORIZONS = (50, 200, 800)
_LENGTHS = 8  # times the longest horizon: steps that are audited
_ANCHORS = 64  # losses whose gradient is traced back
_MAX_PASSES = 8  # to trace them; each pass takes one loss of every lane
_SHORTER_STRIDE = (
    "A shorter stride with the same horizon usually has less bias, makes more updates and takes"
    " more passes. Compared after equal numbers of updates, rows have read unequal amounts of data."
)
_NOISE = (
    "These figures cannot choose a window. |g| is small against its sampling noise ({:.2g} times"
    " |g|), as near a minimum: these relative biases are noise. Audit more steps, or the weights of"
    " an earlier update."
)


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
        settling: how long a cold start differs from the carried state.
        trace: the gradient at every step of an excerpt; `None` if it was not traced.
    """

    split: str
    data: str
    update: int | None
    epoch: int
    tolerance: float
    audit: Audit
    reach: Reach
    settling: SettlingTime
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

    def advice(self, config: Config) -> str:
        """The window to train with, and the bias of the run's own."""
        row, last, own = self.enough, self.audit.rows[-1], self.own(config)
        if not self.audit.norm:
            text = "The gradient is zero everywhere, so it cannot say which window to take."
        elif self.audit.noise >= math.sqrt(0.5):
            text = _NOISE.format(self.audit.noise)
        elif row is None:
            text = (
                "No audited horizon is long enough: the longest,"
                f" {counted(last.horizon, 'step')}, has a bias of {last.bias:.2g}, above the"
                f" tolerance of {self.tolerance:g}. Audit longer ones by --horizons, or train with"
                " the exact gradient, --gradient exact."
            )
        elif not self.reach.memory_used:
            text = (
                "These figures cannot choose a window, because the net does not use its past yet."
                " Train on, then audit again."
            )
        else:
            text = (
                f"Train with {_flags(row)}: a bias of {row.bias:.2g}, within the tolerance of"
                f" {self.tolerance:g}. {_SHORTER_STRIDE}"
            )
        trained = "" if own is None else f" The run was trained with {_flags(own)}, whose bias is"
        return text + (f"{trained} {own.bias:.2g}." if own is not None else "")

    def warning(self) -> str:
        """The limits of the figures, as a sentence."""
        text = self.reach.warning().replace("max_lag", "--max-lag")
        return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")

    def facts(self) -> dict[str, Any]:
        """Plain numbers."""
        row = self.enough
        enough = None if row is None else {"stride": row.stride, "horizon": row.horizon}
        return {**asdict(self), "enough": enough, "warning": self.warning()}

    @classmethod
    def read(cls, path: Path) -> "AuditReport":
        """Read the file of the facts.

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


def extent(steps: int, epoch: int, lanes: int) -> str:
    """The measured part of the stream, in words.

    Example:
        >>> extent(6400, 20_000, 16), extent(500, 500, 1)
        ('the first 6,400 of 20,000 steps of 16 lanes', 'all 500 steps of 1 lane')
    """
    part = f"all {counted(steps, 'step')}"
    if steps != epoch:
        part = f"the first {steps:,} of {counted(epoch, 'step')}"
    return f"{part} of {counted(lanes, 'lane')}"


def _flags(row: Truncation) -> str:
    horizon = "" if row.horizon == row.stride else f" --horizon {row.horizon}"
    return f"--stride {row.stride}{horizon}"


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
        self.net, self.spec, self.config = run.net, run.spec, run.config
        config, lanes, self.data = run.config, run.config.lanes, data or run.config.data
        split = split or ("train" if data is None else None)
        self.split, recordings = recordings_for(run.spec, config, data, split, on_phase=on_phase)
        if data is not None or self.split != "train":
            lanes = min(lanes, len(recordings))
        self.stream = Stream(
            recordings,
            options.lanes or lanes,
            config.chunk_steps(),
            seed=config.seed,
            warm_up=config.warm_up,
            dtype=self.spec.torch_dtype,
            missing=config.missing,
        )
        self.options, self.horizons = options, _horizons(options, config, self.stream.steps)
        self.steps = min(options.steps or _LENGTHS * self.horizons[-1], self.stream.steps)
        longest, epoch = self.horizons[-1], self.stream.steps
        if longest >= self.steps:
            more = f"take more --steps, of {epoch:,}, or" if self.steps < epoch else "take"
            raise ConfigError(
                f"horizon {longest:,} is not shorter than the {counted(self.steps, 'step')} audited"
                f" of a lane, so it would cut nothing: {more} shorter --horizons, fewer --lanes, or"
                " longer recordings"
            )
        without_dropout(self.net)
        self.loss_fn = make_loss(self.spec, self.net, config.loss)
        self.first = recordings[0]

    def describe(self) -> str:
        """What will be measured."""
        options = self.options
        every = "each its own stride" if options.stride is None else f"stride {options.stride}"
        return (
            f"auditing {extent(self.steps, self.stream.steps, self.stream.lanes)} of split"
            f" '{self.split}': horizons {', '.join(map(str, self.horizons))}, {every}; credit"
            f" traced back through at most"
            f" {counted(min(options.max_lag, self.steps), 'step')}"
        )

    def run(self, on_phase: OnPhase = lambda *_: None) -> AuditReport:
        """Measure: seconds to minutes.

        Args:
            on_phase: called as each of the four parts begins and ends.
        """
        net, stream, loss_fn, options = self.net, self.stream, self.loss_fn, self.options

        def measured(name: str, measure: Callable[..., T], *arguments: Any, **more: Any) -> T:
            on_phase(name, 0, 0)
            result = measure(net, *arguments, **more)
            on_phase(name, 1, 1)
            return result

        size: dict[str, Any] = {"steps": self.steps}
        with one_thread(when=self.spec.is_small(stream.lanes)):
            costs = measured(
                "comparing horizons",
                audit,
                stream,
                loss_fn,
                self.horizons,
                stride=options.stride,
                **size,
            )
            size["max_lag"] = options.max_lag
            anchors = min(_ANCHORS, _MAX_PASSES * stream.lanes)
            decay = measured("tracing losses back", reach, stream, loss_fn, anchors=anchors, **size)
            size["span"] = size.pop("max_lag")
            settling = measured("comparing cold starts", settling_time, stream, **size)
            steps = measured(
                "tracing updates", trace_run, self.spec, self.first, loss_fn, self.config
            )
        return AuditReport(
            self.split,
            str(self.data),
            self.spec.update,
            stream.steps,
            options.tolerance,
            costs,
            decay,
            settling,
            steps,
        )


def _horizons(options: AuditOptions, config: Config, epoch: int) -> tuple[int, ...]:
    """The given horizons, or the usual ones and the run's own if an epoch is twice as long."""
    if options.horizons is not None:
        return tuple(sorted(set(options.horizons)))
    own = config.credit_steps() if config.gradient == "truncated" else None
    least = options.stride or 1
    usual = {*_HORIZONS, own or least}
    return tuple(sorted(h for h in usual if least <= h <= epoch // 2)) or (max(epoch // 2, least),)
