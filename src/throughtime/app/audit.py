"""The audit of a run: `tt.audit`, `tt.reach`, `tt.settling_time` and `tt.trace` as it is trained.

They measure with the recordings and lanes of the run, its loss and its class weights. The results
are kept in a file of the run.

The trace is the gradient over time and layer, at each of the first steps of one recording:

    G_t = sum over updates u of  dL_u / ds_t        s: a state or gate; L_u: the mean loss of the
                                                    steps that update u counts

The gradient of the weights is a sum over steps of what each contributes under G_t. So G_t is all
that training learns from step t. With a horizon longer than the stride, a step lies in several
windows, whose gradients add up. One lane plays the recording at fixed weights, its state carried
from the first step.

Shapes: `T` steps, `H` hidden.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from torch import Tensor

from throughtime.app.config import AuditOptions, Config
from throughtime.app.dataset import recordings_for
from throughtime.app.load import Run
from throughtime.app.model import (
    ModelSpec,
    make_loss,
    one_thread,
    unbroken_stream,
    without_dropout,
)
from throughtime.app.recordings import OnPhase
from throughtime.app.user_class import is_reference
from throughtime.carry.carried import Carried
from throughtime.diagnose import Audit, Reach, SettlingTime, audit, reach, settling_time
from throughtime.diagnose.audit import Truncation
from throughtime.diagnose.trace import trace
from throughtime.errors import ConfigError, RunError, counted, one_line
from throughtime.gradient import LossFn, Truncated
from throughtime.stream import Recording, Stream, windows
from throughtime.stream.recording import Part
from throughtime.updates import updates

T = TypeVar("T")
_HORIZONS = (50, 200, 800)
_LENGTHS = 8  # times the longest horizon: steps that are audited
_PASSES = 8  # to trace losses back; each takes one loss of every lane
_TRACED = 400  # steps
_MOST_WORK = 30_000  # traced steps of all windows; each takes about 0.1 ms a layer


@dataclass(frozen=True)
class RunTrace:
    """The traced gradient of a run.

    Attributes:
        recording: its name.
        stride: steps between two updates.
        horizon: steps that credit flowed back, fewer than in training where that is too long.
        norms: norm of the gradient by state or gate, at every step; infinite where it is not
            finite.
    """

    recording: str
    stride: int
    horizon: int
    norms: dict[str, tuple[float, ...]]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(next(iter(self.norms.values())))

    @property
    def edges(self) -> tuple[int, ...]:
        """The steps at which an update ends and the next begins."""
        return tuple(range(self.stride, self.steps, self.stride))


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

    def own(self, config: Config) -> Truncation | None:
        """The truncation that the run was trained with, if it was audited."""
        if config.gradient != "truncated" or config.train_on == "windows":
            return None
        setting = (config.update_steps(), config.credit_steps())
        return next((row for row in self.audit.rows if (row.stride, row.horizon) == setting), None)

    def advice(self, config: Config) -> str:
        """The window to train with, and the bias of the run's own."""
        horizon = self.audit.suggest(self.tolerance)
        reasons = {
            "the gradient is zero everywhere": not self.audit.norm,
            "most of it is sampling noise, as near a minimum": self.audit.noise >= math.sqrt(0.5),
            "the net does not use its past yet": not self.reach.memory_used,
        }
        if reason := next((text for text, applies in reasons.items() if applies), None):
            text = f"These figures cannot choose a window: {reason}."
        elif horizon is None:
            text = (
                "No audited horizon is long enough: every bias is above the tolerance of"
                f" {self.tolerance:g}. Audit longer ones by --horizons, or train with the exact"
                " gradient, --gradient exact."
            )
        else:
            (row,) = (row for row in self.audit.rows if row.horizon == horizon)
            text = f"Train with {_flags(row)}: a bias of {row.bias:.2g}, within the tolerance."
        if own := self.own(config):
            text += f" The run was trained with {_flags(own)}, whose bias is {own.bias:.2g}."
        return text

    def warning(self) -> str:
        """The limits of the figures, as a sentence."""
        text = self.reach.warning().replace("max_lag", "--max-lag").rstrip(".")
        return f"{text[0].upper()}{text[1:]}."

    def facts(self) -> dict[str, Any]:
        """Plain numbers."""
        return {**asdict(self), "enough": self.audit.suggest(self.tolerance)}

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
        config, self.data = run.config, str(data or run.config.data)
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
            dtype=self.spec.torch_dtype,
            missing=config.missing,
        )
        self.options, epoch = options, self.stream.steps
        self.horizons = _horizons(options, config, epoch)
        longest = self.horizons[-1]
        self.steps = min(options.steps or _LENGTHS * longest, epoch)
        if longest >= self.steps:
            raise ConfigError(
                f"horizon {longest:,} is not shorter than the {counted(self.steps, 'step')} audited"
                f" of a lane ({epoch:,} in an epoch), so it would cut nothing: take shorter"
                " --horizons, more --steps, fewer --lanes, or longer recordings"
            )
        without_dropout(self.net)
        self.loss_fn = make_loss(self.spec, self.net, config.loss)
        self.first = recordings[0]

    def describe(self) -> str:
        """What will be measured."""
        stride = self.options.stride
        every = "each its own stride" if stride is None else f"stride {stride}"
        return (
            f"auditing {self.steps:,} of {counted(self.stream.steps, 'step')} of"
            f" {counted(self.stream.lanes, 'lane')} of split '{self.split}': horizons"
            f" {', '.join(map(str, self.horizons))}, {every}"
        )

    def run(self, on_phase: OnPhase = lambda *_: None) -> AuditReport:
        """Measure: seconds to minutes.

        Args:
            on_phase: called as each of the four parts begins and ends.
        """
        net, stream, loss_fn, lag = self.net, self.stream, self.loss_fn, self.options.max_lag

        def measured(name: str, measure: Callable[..., T], *arguments: Any, **more: Any) -> T:
            on_phase(name, 0, 0)
            result = measure(net, *arguments, **more)
            on_phase(name, 1, 1)
            return result

        size: dict[str, Any] = {"steps": self.steps}
        anchors = min(64, _PASSES * stream.lanes)
        back: dict[str, Any] = {"max_lag": lag, "anchors": anchors, **size}
        cost: dict[str, Any] = {"stride": self.options.stride, **size}
        played = self.spec, self.first, loss_fn, self.config
        with one_thread(when=self.spec.is_small(stream.lanes)):
            return AuditReport(
                self.split,
                self.data,
                self.spec.update,
                stream.steps,
                self.options.tolerance,
                measured("comparing horizons", audit, stream, loss_fn, self.horizons, **cost),
                measured("tracing losses back", reach, stream, loss_fn, **back),
                measured("comparing cold starts", settling_time, stream, span=lag, **size),
                measured("tracing updates", trace_run, *played),
            )


def _horizons(options: AuditOptions, config: Config, epoch: int) -> tuple[int, ...]:
    """The given horizons, or the usual ones and the run's own if an epoch is twice as long."""
    if options.horizons is not None:
        return tuple(sorted(set(options.horizons)))
    own = config.credit_steps() if config.gradient == "truncated" else None
    least = options.stride or 1
    usual = {*_HORIZONS, own or least}
    return tuple(sorted(h for h in usual if least <= h <= epoch // 2)) or (max(epoch // 2, least),)


def trace_run(
    net: Carried, spec: ModelSpec, recording: Recording, loss_fn: LossFn, config: Config
) -> RunTrace | None:
    """Trace the first steps of a recording; `None` if none of them has a loss.

    Args:
        net: the model of the run; its weights stay unchanged.
        spec: its description.
        recording: the recording to play.
        loss_fn: the loss of training.
        config: the settings of the run, which say how credit is truncated.
    """
    length = len(recording)
    stride = min(config.update_steps() or length, _TRACED, length)
    shown = min(-(-_TRACED // stride) * stride, length)
    horizon = min(config.credit_steps() or stride, _MOST_WORK * stride // shown)
    horizon = max(stride, min(horizon, length))
    part = Part(recording, 0, min(shown + horizon - stride, length))
    cut = config.train_on == "windows" and not is_reference(config.gradient)
    played = list(windows([part], config.chunk_steps())) if cut else [part]
    stream = unbroken_stream(played, spec, config, 1, stride)
    sums: dict[str, Tensor] = {}
    with trace(net) as watch:
        policy = Truncated(stride, horizon)
        for _ in updates(net, stream, loss_fn, gradient=policy):
            stop = stream.position or stream.steps
            begin = max(0, stop - horizon) if horizon > stride else (stop - 1) // stride * stride
            for name, lanes in watch.last.gradients.items():
                grads = lanes[:, 0].double().cpu()
                total = sums.setdefault(name, grads.new_zeros(stream.steps, *grads.shape[1:]))
                total[begin : begin + len(grads)] += grads
    net.zero_grad()
    # in the order of the layers: layer10 after layer9
    names = sorted(sums, key=lambda name: (len(layer := name.rpartition(".")[0]), layer))
    norms = {name: _norms(sums[name][:shown]) for name in names}
    return RunTrace(recording.name, stride, horizon, norms) if norms else None


def _norms(grads: Tensor) -> tuple[float, ...]:
    """The norm of each step of `(T, H)`, in four digits."""
    norms = grads.flatten(1).norm(dim=1).nan_to_num(nan=math.inf, posinf=math.inf)
    return tuple(float(f"{norm:.4g}") for norm in norms.tolist())
