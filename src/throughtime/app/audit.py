"""The audit of a run: how far back its gradient reaches, and what truncating it costs.

The gradients are those of training: the recordings and lanes of the run, its loss and its class
weights.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from throughtime.app.audit_report import AuditReport, extent_in_words
from throughtime.app.checkpoint import load_checkpoint
from throughtime.app.config import Config
from throughtime.app.dataset import ClassRecording, recordings_for
from throughtime.app.evaluate import default_split, with_missing
from throughtime.app.model import ModelSpec, check_device, load_model, make_loss, one_thread
from throughtime.app.run_folder import RunFolder
from throughtime.app.statistics import collect_statistics
from throughtime.app.trace import trace_run
from throughtime.carry.carried import Carried
from throughtime.diagnose import audit, reach
from throughtime.errors import ConfigError, DataError
from throughtime.gradient import LossFn, schedule
from throughtime.stream import Recording, Stream

HORIZONS = (50, 200, 800)
LENGTHS = 8  # times the longest horizon: steps that are audited
ANCHORS = 64  # losses whose gradient is traced back
_MAX_PASSES = 8  # to trace them; each pass takes one loss of every lane
_MORE_STEPS = "Take fewer --lanes, or longer recordings."


@dataclass(frozen=True)
class AuditOptions:
    """What to measure; `None` means what the run and its data suggest.

    Attributes:
        horizons: steps; default: 50, 200, 800 and the run's own, if an epoch is twice as long.
        stride: steps between two updates; default: each horizon is its own stride.
        steps: of every lane; default: eight times the longest horizon.
        lanes: recordings played at the same time; default: as in training, fewer where other
            recordings are fewer.
        max_lag: how far back the gradient is traced.
        tolerance: the largest acceptable bias.
    """

    horizons: tuple[int, ...] | None = None
    stride: int | None = None
    steps: int | None = None
    lanes: int | None = None
    max_lag: int = 1000
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        for name in ("stride", "steps", "lanes", "max_lag"):
            value = getattr(self, name)
            if value is not None:
                schedule.check_whole(name, value, 1)
        if not 0 < self.tolerance < 1:
            raise ConfigError(
                f"tolerance={self.tolerance}: expected a relative bias between 0 and 1"
            )
        for horizon in self.horizons or ():
            schedule.check_whole("horizons", horizon, 1)
            schedule.check_horizon(horizon if self.stride is None else self.stride, horizon)


@dataclass(frozen=True, eq=False)
class AuditJob:
    """An audit ready to run: everything is opened and checked, nothing is computed yet.

    Attributes:
        net: the run's model.
        spec: its description.
        stream: recordings, at the start of an epoch.
        loss_fn: that of training.
        options: what to measure.
        horizons: steps, the shortest first.
        steps: of every lane.
        split: of the recordings.
        first: the first of them, whose gradient is shown step by step.
        data: the path of the recordings.
        update: updates that made the model, if known.
        config: of the run.
    """

    net: Carried
    spec: ModelSpec
    stream: Stream
    loss_fn: LossFn
    options: AuditOptions
    horizons: tuple[int, ...]
    steps: int
    split: str
    first: Recording
    data: Path
    update: int | None
    config: Config

    def describe(self) -> str:
        """What will be measured."""
        options = self.options
        every = "each its own stride" if options.stride is None else f"stride {options.stride}"
        return (
            f"auditing {extent_in_words(self.steps, self.stream.steps, self.stream.lanes)} of split"
            f" '{self.split}': horizons {', '.join(map(str, self.horizons))}, {every}; credit"
            f" traced back through at most {min(options.max_lag, self.steps):,} steps"
        )

    def run(self) -> AuditReport:
        """Measure: seconds to minutes."""
        net, stream, loss_fn, options = self.net, self.stream, self.loss_fn, self.options
        with one_thread(when=self.spec.is_small(stream.lanes)):
            costs = audit(
                net, stream, loss_fn, self.horizons, stride=options.stride, steps=self.steps
            )
            decay = reach(
                net,
                stream,
                loss_fn,
                max_lag=options.max_lag,
                anchors=min(ANCHORS, _MAX_PASSES * stream.lanes),
                steps=self.steps,
            )
            steps = trace_run(net, self.spec, self.first, loss_fn, self.config)
        return AuditReport(
            self.split,
            str(self.data),
            self.update,
            stream.steps,
            options.tolerance,
            costs,
            decay,
            steps,
        )


def open_audit(
    folder: RunFolder,
    options: AuditOptions,
    data: Path | None = None,
    split: str | None = None,
    device: str | None = None,
    missing: str | None = None,
) -> AuditJob:
    """Open the model and the recordings of a run, or other recordings.

    Args:
        folder: of the run.
        options: what to measure.
        data: other recordings; default: those of the run.
        split: which of them; default: `train`, and for other data what `eval` would take.
        device: where to compute; default: the CPU.
        missing: how to treat inputs that are NaN or infinite; default: as in training.

    Raises:
        RunError: the folder holds no run that reached a checkpoint.
        DataError: no such split, recordings that the model does not fit, or too few steps.
        ConfigError: horizons as long as the steps that are measured, or no such device.
    """
    config = replace(with_missing(folder.read_config(), missing), device=device or "cpu")
    check_device(config.device)
    net, spec = load_model(folder.model)
    net.to(config.device)
    split = split or ("train" if data is None else default_split(data, config))
    path = data or Path(config.data)
    recordings = recordings_for(spec, path, split, config.holdout)
    lanes = (
        config.lanes if data is None and split == "train" else min(config.lanes, len(recordings))
    )
    stream = Stream(
        recordings,
        options.lanes or lanes,
        config.chunk_steps(),
        seed=config.seed,
        warm_up=config.warm_up,
        dtype=spec.torch_dtype,
        missing=config.missing,
    )
    horizons = _horizons(options, config, stream)
    steps = min(options.steps or LENGTHS * horizons[-1], stream.steps)
    _check_shorter(horizons[-1], steps, stream)
    update = None
    if folder.checkpoint.is_file():
        update = load_checkpoint(folder.checkpoint)["counts"][0]
    loss_fn = make_loss(config, spec, net, _class_counts(config, spec))
    return AuditJob(
        net,
        spec,
        stream,
        loss_fn,
        options,
        horizons,
        steps,
        split,
        recordings[0],
        path,
        update,
        config,
    )


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
            f"a lane plays {stream.steps} steps in an epoch, too few to cut at a stride of {least}."
            f" {_MORE_STEPS}"
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
            f"horizon {longest:,} is not shorter than the {steps:,} steps audited, so it would cut"
            f" nothing. {more}"
        )


def _class_counts(config: Config, spec: ModelSpec) -> Counter[str]:
    """How often each class occurs in the training split, for balanced class weights."""
    if not spec.classes or config.class_weights != "balanced":
        return Counter()
    try:
        train = recordings_for(spec, Path(config.data), "train", config.holdout)
        sources = [r.source if isinstance(r, ClassRecording) else r for r in train]
        return collect_statistics(sources, classify=True).classes
    except DataError as error:
        raise DataError(
            "class_weights='balanced' counts the training recordings of the run, which cannot be"
            f" read: {error}"
        ) from error
