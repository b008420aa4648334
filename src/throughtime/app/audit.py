"""The audit of a run: the reach of its gradient, the cost of truncating it, its settling time.

The gradients are those of training: the recordings and lanes of the run, its loss and its class
weights. The results, with the advice that follows from them, are kept in a file of the run.
"""

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from throughtime._files import write_atomically
from throughtime.app.config import AuditOptions, Config
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import make_loss, one_thread, without_dropout
from throughtime.app.recordings import OnPhase
from throughtime.app.run_folder import from_plain, json_safe
from throughtime.app.trace import RunTrace, trace_run
from throughtime.diagnose import Audit, Reach, SettlingTime, audit, reach, settling_time
from throughtime.diagnose.audit import Truncation
from throughtime.errors import ConfigError, DataError, RunError, counted
from throughtime.stream import Stream

HORIZONS = (50, 200, 800)
LENGTHS = 8  # times the longest horizon: steps that are audited
ANCHORS = 64  # losses whose gradient is traced back
_MAX_PASSES = 8  # to trace them; each pass takes one loss of every lane
SHORTER_STRIDE = (
    "A shorter stride with the same horizon usually has less bias, makes more updates and takes"
    " more passes."
)
NOISE = (
    "|g| is small against its sampling noise ({:.2g} times |g|), as near a minimum: these relative"
    " biases are noise. Audit more steps, or the weights of an earlier update."
)
UNEQUAL_DATA = (
    "An update reads as many steps as its stride, one of tt.Exact() all of them. Compared after"
    " equal numbers of updates, rows have read unequal amounts of data."
)
_MORE_STEPS = "Take fewer --lanes, or longer recordings."


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
        if self.audit.noise >= math.sqrt(0.5):
            return f"These figures cannot choose a window. {NOISE.format(self.audit.noise)}"
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
        return f"{advice} {SHORTER_STRIDE} {UNEQUAL_DATA}"

    def _too_short(self) -> str:
        row = self.audit.rows[-1]
        longer = [str(n) for n in (4 * row.horizon, 16 * row.horizon) if 2 * n <= self.epoch]
        first = f"Audit longer ones, --horizons {','.join(longer)}, or train" if longer else "Train"
        return (
            f"No audited horizon is long enough: the longest, {counted(row.horizon, 'step')}, has a"
            f" bias of {row.bias:.2g}, above the tolerance of {self.tolerance:g}. {first} with the"
            " exact gradient, --gradient exact."
        )

    def warning(self) -> str:
        """The limits of the figures, as a sentence."""
        text = self.reach.warning().replace("max_lag", "--max-lag")
        return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")

    def facts(self) -> dict[str, Any]:
        """Plain numbers for JSON, `None` where one is not finite."""
        row = self.enough
        enough = None if row is None else {"stride": row.stride, "horizon": row.horizon}
        return json_safe({**asdict(self), "enough": enough, "warning": self.warning()})

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
            return from_plain(cls, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
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
        self.options, self.horizons = options, _horizons(options, config, self.stream)
        self.steps = min(options.steps or LENGTHS * self.horizons[-1], self.stream.steps)
        _check_shorter(self.horizons[-1], self.steps, self.stream)
        without_dropout(self.net)
        self.loss_fn = make_loss(self.spec, self.net, config.loss)
        self.first = recordings[0]

    def describe(self) -> str:
        """What will be measured."""
        options = self.options
        every = "each its own stride" if options.stride is None else f"stride {options.stride}"
        return (
            f"auditing {extent_in_words(self.steps, self.stream.steps, self.stream.lanes)} of split"
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
        with one_thread(when=self.spec.is_small(stream.lanes)):
            with _shown(on_phase, "comparing horizons"):
                costs = audit(
                    net, stream, loss_fn, self.horizons, stride=options.stride, steps=self.steps
                )
            with _shown(on_phase, "tracing losses back"):
                decay = reach(
                    net,
                    stream,
                    loss_fn,
                    max_lag=options.max_lag,
                    anchors=min(ANCHORS, _MAX_PASSES * stream.lanes),
                    steps=self.steps,
                )
            with _shown(on_phase, "comparing cold starts"):
                settling = settling_time(net, stream, span=options.max_lag, steps=self.steps)
            with _shown(on_phase, "tracing updates"):
                steps = trace_run(net, self.spec, self.first, loss_fn, self.config)
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


@contextmanager
def _shown(on_phase: OnPhase, name: str) -> Generator[None]:
    """A phase of unknown length."""
    on_phase(name, 0, 0)
    yield
    on_phase(name, 1, 1)


def _horizons(options: AuditOptions, config: Config, stream: Stream) -> tuple[int, ...]:
    """The given horizons, or the usual ones and the run's own if an epoch is twice as long."""
    if options.horizons is not None:
        return tuple(sorted(set(options.horizons)))
    run_horizon = config.credit_steps() if config.gradient == "truncated" else None
    least = options.stride or 1
    candidates = {*HORIZONS, *([] if run_horizon is None else [run_horizon])}
    fitting = sorted(h for h in candidates if h >= least and 2 * h <= stream.steps)
    if not fitting and stream.steps < 2 * least:
        raise DataError(
            f"a lane plays {counted(stream.steps, 'step')} in an epoch, too few to cut at a stride"
            f" of {least}. {_MORE_STEPS}"
        )
    return tuple(fitting or [stream.steps // 2])


def _check_shorter(longest: int, steps: int, stream: Stream) -> None:
    """Refuse a horizon that cuts nothing: its bias of zero would mean nothing."""
    if longest >= steps:
        more = (
            _MORE_STEPS
            if steps == stream.steps
            else f"Take more --steps: there are {stream.steps:,}."
        )
        raise ConfigError(
            f"horizon {longest:,} is not shorter than the {counted(steps, 'step')} audited, so it"
            f" would cut nothing. {more}"
        )
