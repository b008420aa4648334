"""The audit of a run: how far the gradient of its model goes on its recordings, and what cutting it
costs.

The model is looked at where its gradients come from: the recordings and lanes of training, its loss
and class weights.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from throughtime.app.assess import adjusted, recordings_for, usual_split
from throughtime.app.audit_report import AuditReport, extent_in_words
from throughtime.app.checkpoint import load_checkpoint
from throughtime.app.config import Config
from throughtime.app.data import Labelled
from throughtime.app.folder import Folder
from throughtime.app.model import Spec, load_model, loss_of
from throughtime.app.prepared import check_device
from throughtime.app.survey import survey
from throughtime.app.threads import one_thread, small
from throughtime.app.trace import trace_run
from throughtime.carry.carried import Carried
from throughtime.diagnose import audit, reach
from throughtime.errors import ConfigError, DataError
from throughtime.gradient import LossFn, schedule
from throughtime.stream import Recording, Stream

HORIZONS = (50, 200, 800)
LENGTHS = 8  # so many times the longest horizon are looked at
ANCHORS, SETS = (
    64,
    8,
)  # losses that are traced back, and passes at most: each pass takes one of every lane
_MORE_STEPS = "Take fewer --lanes, or longer recordings."


@dataclass(frozen=True)
class Question:
    """What to look at; `None` means what the run and its data suggest.

    Attributes:
        horizons: steps; default: 50, 200, 800 and the run's own, as far as an epoch is twice as
            long.
        stride: steps between two updates; default: each horizon is its own.
        steps: how many steps of every lane; default: eight times the longest horizon.
        lanes: recordings played side by side; default: as in training, or fewer where other
            recordings are fewer.
        max_lag: how far back the gradient is traced.
        tolerance: the largest bias to put up with.
    """

    horizons: tuple[int, ...] | None = None
    stride: int | None = None
    steps: int | None = None
    lanes: int | None = None
    max_lag: int = 1000
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (
            ("stride", self.stride),
            ("steps", self.steps),
            ("lanes", self.lanes),
            ("max_lag", self.max_lag),
        ):
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
class Look:
    """An audit about to be made: everything is opened and checked, nothing is computed yet.

    Attributes:
        net: the run's model.
        spec: what it is.
        stream: what it is looked at on, at the start of an epoch.
        loss_fn: that of training.
        question: what to look at.
        horizons: steps, the shortest first.
        steps: how many steps of every lane.
        split: which recordings these are.
        first: the first of them, whose gradient is shown step by step.
        data: where they are.
        update: updates that made the model, if known.
        config: of the run.
    """

    net: Carried
    spec: Spec
    stream: Stream
    loss_fn: LossFn
    question: Question
    horizons: tuple[int, ...]
    steps: int
    split: str
    first: Recording
    data: Path
    update: int | None
    config: Config

    def describe(self) -> str:
        """What will be looked at."""
        every = (
            "each its own stride"
            if self.question.stride is None
            else f"stride {self.question.stride}"
        )
        return (
            f"auditing {extent_in_words(self.steps, self.stream.steps, self.stream.lanes)} of split"
            f" '{self.split}': horizons {', '.join(map(str, self.horizons))}, {every}; credit"
            f" traced back through at most {min(self.question.max_lag, self.steps):,} steps"
        )

    def go(self) -> AuditReport:
        """Computes it: seconds to minutes."""
        anchors = min(ANCHORS, SETS * self.stream.lanes)
        with one_thread(when=small(self.spec, self.stream.lanes)):
            costs = audit(
                self.net,
                self.stream,
                self.loss_fn,
                self.horizons,
                stride=self.question.stride,
                steps=self.steps,
            )
            goes = reach(
                self.net,
                self.stream,
                self.loss_fn,
                max_lag=self.question.max_lag,
                anchors=anchors,
                steps=self.steps,
            )
            steps = trace_run(self.net, self.spec, self.first, self.loss_fn, self.config)
        return AuditReport(
            self.split,
            str(self.data),
            self.update,
            self.stream.steps,
            self.question.tolerance,
            costs,
            goes,
            steps,
        )


def look_at(
    folder: Folder,
    question: Question,
    data: Path | None,
    split: str | None,
    device: str | None,
    missing: str | None,
) -> Look:
    """Opens the model and the recordings of a run, or other ones.

    Args:
        folder: of the run.
        question: what to look at.
        data: other recordings; default: those of the run.
        split: which of them; default: `train`, and for other data what `eval` would score.
        device: where to compute; default: the CPU.
        missing: what to do with inputs that are NaN or infinite; default: as in training.

    Raises:
        RunError: the folder holds no run that reached a checkpoint.
        DataError: no such split, recordings that the model does not fit, or too few steps.
        ConfigError: horizons that cannot be told from the exact gradient, or no such device.
    """
    config = replace(adjusted(folder.read_config(), missing), device=device or "cpu")
    check_device(config.device)
    net, spec = load_model(folder.model)
    net.to(config.device)
    split = split or ("train" if data is None else usual_split(data, config))
    where = data or Path(config.data)
    recordings = recordings_for(spec, where, split, config)
    lanes = (
        config.lanes if data is None and split == "train" else min(config.lanes, len(recordings))
    )
    stream = Stream(
        recordings, question.lanes or lanes, config.stride, seed=config.seed, warm_up=config.warm_up, dtype=spec.torch_dtype,
        missing=config.missing,
    )  # fmt: skip
    horizons = _horizons(question, config, stream)
    steps = min(question.steps or LENGTHS * horizons[-1], stream.steps)
    _refuse_uncut(horizons[-1], steps, stream)
    loss_fn = loss_of(config, spec, net, _class_counts(config, spec))
    return Look(
        net,
        spec,
        stream,
        loss_fn,
        question,
        horizons,
        steps,
        split,
        recordings[0],
        where,
        _updates_of(folder),
        config,
    )


def _horizons(question: Question, config: Config, stream: Stream) -> tuple[int, ...]:
    """Those asked for, or the usual ones and the run's own, as far as the stream is longer."""
    if question.horizons is not None:
        return tuple(sorted(set(question.horizons)))
    own = () if config.exact else (config.horizon or config.stride,)
    least = question.stride or 1
    fitting = sorted(h for h in {*HORIZONS, *own} if h >= least and 2 * h <= stream.steps)
    if not fitting and stream.steps < 2 * least:
        raise DataError(
            f"a lane plays {stream.steps} steps in an epoch, too few to cut at a stride of {least}."
            f" {_MORE_STEPS}"
        )
    return tuple(fitting or [stream.steps // 2])


def _refuse_uncut(longest: int, steps: int, stream: Stream) -> None:
    """A horizon as long as all that is looked at cuts nothing: its bias of zero would say nothing."""
    if longest >= steps:
        more = (
            _MORE_STEPS
            if steps == stream.steps
            else f"Take more --steps: there are {stream.steps:,}."
        )
        raise ConfigError(
            f"horizon {longest:,} is not shorter than the {steps:,} steps looked at, so it would"
            f" cut nothing. {more}"
        )


def _class_counts(config: Config, spec: Spec) -> Counter[str]:
    """How often each class occurs in the training split, where the loss balances them."""
    if spec.task == "regress" or config.class_weights != "balanced":
        return Counter()
    try:
        train = recordings_for(spec, Path(config.data), "train", config)
        return survey(
            [r.source if isinstance(r, Labelled) else r for r in train], classify=True
        ).classes
    except DataError as error:
        raise DataError(
            "class_weights='balanced' counts the training recordings of the run, which cannot be"
            f" read: {error}"
        ) from error


def _updates_of(folder: Folder) -> int | None:
    return load_checkpoint(folder.checkpoint)["counts"][0] if folder.checkpoint.is_file() else None
