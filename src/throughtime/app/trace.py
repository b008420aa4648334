"""The gradient of a run over time and layer, at each step of an excerpt of one recording.

    G_t = sum over updates u of  dL_u / ds_t        s: a state or gate; L_u: the mean loss of the
                                                    steps that update u counts

The gradient of the weights is a sum over steps of what each contributes under G_t. So G_t is all
that training learns from step t. With a horizon longer than the stride, a step lies in several
windows, whose gradients add up. One lane plays the recording at fixed weights, its state carried
from the first step.

Shapes: `T` steps, `B` lanes, `H` hidden.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.model import ModelSpec, unbroken_stream
from throughtime.app.user_class import is_reference
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.diagnose._trace_summary import Timescale, TraceSummary
from throughtime.diagnose.trace import trace
from throughtime.gradient import LossFn, Truncated
from throughtime.predict import predict
from throughtime.state import State
from throughtime.stream import Recording, windows
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Part
from throughtime.updates import updates

FEWEST_STEPS, FEWEST_STRIDES = 400, 3  # shown at least
LONGEST_STRIDE = 1_000  # no update ends among the shown steps of a longer one
MOST_WORK = 30_000  # traced steps of all windows; each takes about 0.1 ms a layer
_SEARCHED = 20_000  # steps predicted to find the busiest, from the start of the recording
_SHOWN = 1_500  # steps of an excerpt


@dataclass(frozen=True)
class SignalExcerpt:
    """Consecutive steps of a recording: its first input column, first target and predictions."""

    recording: str
    start: int
    signal: Array
    targets: Array
    predicted: Array


def busiest_excerpt(
    net: Carried, spec: ModelSpec, recording: Recording, config: Config
) -> SignalExcerpt:
    """The 1,500 of the first 20,000 steps with most classes, or the last ones for regression."""
    steps = min(len(recording), _SEARCHED)
    part = Part(recording, 0, steps)
    outputs, _ = predict(net, part, dtype=spec.torch_dtype, missing=config.missing)
    inputs, targets, *_ = part.read(0, steps)
    first = np.zeros(steps) if targets is None else targets.reshape(steps, -1)[:, 0]
    if spec.classes:
        start, predicted = _busiest(first), outputs.argmax(dim=1)
    else:
        start, predicted = max(0, steps - _SHOWN), spec.probabilities(outputs)[:, 0]
    shown = slice(start, start + _SHOWN)
    signal = inputs.reshape(steps, -1)[:, 0]
    return SignalExcerpt(
        recording.name, start, signal[shown], first[shown], predicted[shown].numpy()
    )


def _busiest(targets: Array) -> int:
    """The start of the excerpt with most classes, then most changes of class."""
    starts = range(0, max(1, len(targets) - _SHOWN + 1), _SHOWN // 3)
    excerpts = [targets[start : start + _SHOWN] for start in starts]
    activity = [(len(np.unique(e)), np.count_nonzero(np.diff(e))) for e in excerpts]
    return starts[activity.index(max(activity))]


@dataclass(frozen=True)
class TracePlan:
    """Steps to trace, counted from the first, and how credit is truncated among them.

    Attributes:
        shown: steps in the picture.
        steps: steps played; those after the shown ones are played for their losses.
        stride: steps between two updates.
        horizon: steps that credit flows back.
    """

    shown: int
    steps: int
    stride: int
    horizon: int

    @classmethod
    def from_config(cls, config: Config, steps: int) -> "TracePlan":
        """The plan that truncates as the run does, when `steps` are available."""
        stride = config.update_steps() or steps
        horizon = max(stride, config.credit_steps() or steps)
        if stride > LONGEST_STRIDE:
            played = min(LONGEST_STRIDE + FEWEST_STEPS, steps)
            return cls(min(FEWEST_STEPS, steps), played, played, played)
        shown = min(steps, stride * max(FEWEST_STRIDES, math.ceil(FEWEST_STEPS / stride)))
        ahead = min(horizon - stride, steps - shown)
        while (shown + ahead) * (stride + ahead) > MOST_WORK * stride and ahead:
            ahead //= 2
        return cls(shown, shown + ahead, stride, max(stride, min(horizon, shown + ahead)))

    @property
    def edges(self) -> tuple[int, ...]:
        """The shown steps at which an update ends and the next begins."""
        return tuple(range(self.stride, self.shown, self.stride))

    def window_start(self, stop: int) -> int:
        """The first step of the window that ends before `stop`."""
        if self.horizon > self.stride:
            return max(0, stop - self.horizon)
        return (stop - 1) // self.stride * self.stride


@dataclass(frozen=True)
class GradientLifetime:
    """How far the gradient of one state or gate goes back, over all windows.

    Attributes:
        name: of the state or gate, such as `recurrent.layer0.c`.
        largest: its largest norm among the steps shown.
        at: the step of the largest norm, within the recording.
        lived: steps from the end of a window until it vanishes; median of the windows.
        died: number of windows in which it vanishes before their first step.
        exploded: number of windows in which it explodes.
        burst: steps from the end of a window until it explodes; median of these windows, `None`
            if there are none.
        edge: the gradient that crosses the start of a window, relative to the largest; median of
            the windows. `None` for gates.
    """

    name: str
    largest: float
    at: int
    lived: float
    died: int
    exploded: int
    burst: float | None
    edge: float | None


@dataclass(frozen=True)
class RunTrace:
    """The traced gradient of a run; norms and signal have four digits.

    Attributes:
        recording: its name.
        start: the first step shown, within the recording.
        stride: steps between two updates.
        horizon: steps that credit flowed back.
        ahead: steps after the shown ones whose losses count, too.
        signal: the first input column at every step shown.
        windows: number of windows behind `lifetimes`; each is `horizon` steps long, unless the
            excerpt is shorter.
        norms: norm of the gradient by state or gate, at every step shown; infinite where it is not
            finite.
        lifetimes: one for each state and gate.
        timescales: one for each layer with a gate that retains memory.
    """

    recording: str
    start: int
    stride: int
    horizon: int
    ahead: int
    signal: tuple[float, ...]
    windows: int
    norms: dict[str, tuple[float, ...]]
    lifetimes: tuple[GradientLifetime, ...]
    timescales: tuple[Timescale, ...]

    @property
    def steps(self) -> int:
        """Number of steps shown."""
        return len(self.signal)

    @property
    def edges(self) -> tuple[int, ...]:
        """The steps of the recording at which an update ends and the next begins."""
        return tuple(range(self.start + self.stride, self.start + self.steps, self.stride))


def trace_run(
    net: Carried, spec: ModelSpec, recording: Recording, loss_fn: LossFn, config: Config
) -> RunTrace | None:
    """Trace the busiest excerpt of a recording; `None` if none of its steps has a loss.

    Args:
        net: the model of the run; its weights stay unchanged.
        spec: its description.
        recording: the recording to play.
        loss_fn: the loss of training.
        config: the settings of the run, which say how credit is truncated.
    """
    longest = TracePlan.from_config(config, len(recording)).steps
    start = min(busiest_excerpt(net, spec, recording, config).start, len(recording) - longest)
    if config.train_on == "windows":
        start -= start % config.chunk_steps()
    plan = TracePlan.from_config(config, len(recording) - start)
    chunk, state = _read(net, spec, recording, config, start, plan.steps)
    sums: dict[str, Tensor] = {}
    summaries: list[tuple[int, TraceSummary]] = []  # the length of each window, and its summary
    gates: dict[str, list[Tensor]] = {}
    policy = Truncated(plan.stride, plan.horizon)
    with trace(net) as watch:
        for update in updates(net, [chunk], loss_fn, gradient=policy, state=state):
            stop = int(update.chunk.position[-1, 0]) + 1
            begin = plan.window_start(stop)
            for name, lanes in watch.last.gradients.items():
                grads = lanes[:, 0].double().cpu()
                total = sums.setdefault(name, grads.new_zeros(plan.steps, *grads.shape[1:]))
                total[begin : begin + len(grads)] += grads
            summaries.append((stop - begin, watch.summary()))
            for name, mean in watch.last.retention.items():
                gates.setdefault(name, []).append(mean.double().cpu())
    net.zero_grad()
    if not summaries:
        return None
    # In the order of the layers; states and gates of a layer in the order of the trace.
    names = sorted(sums, key=lambda name: _by_layer(name.rpartition(".")[0]))
    norms = {name: _norms(sums[name][: plan.shown]) for name in names}
    longest = max(steps for steps, _ in summaries)
    full = [summary for steps, summary in summaries if steps == longest]
    return RunTrace(
        recording.name,
        start,
        plan.stride,
        plan.horizon,
        plan.steps - plan.shown,
        _rounded(chunk.inputs[: plan.shown, 0].flatten(1)[:, 0].tolist()),
        len(full),
        norms,
        tuple(_lifetime(name, values, start, full) for name, values in norms.items()),
        tuple(
            Timescale.from_mean(name, torch.stack(gates[name]).mean(0))
            for name in sorted(gates, key=_by_layer)
        ),
    )


def _read(
    net: Carried, spec: ModelSpec, recording: Recording, config: Config, start: int, steps: int
) -> tuple[Chunk, State]:
    """The steps to trace, counted from zero, and the state that enters them.

    The state is carried from the start of the recording, unless the windows of training start from
    the initial state.
    """
    cut = config.train_on == "windows" and not is_reference(config.gradient)
    recordings = list(windows([recording], config.chunk_steps())) if cut else [recording]
    stream = unbroken_stream(recordings, spec, config, 1, config.chunk_steps())
    state: State = None
    if start and not cut:
        past = Part(recording, 0, start)
        _, state = predict(net, past, dtype=spec.torch_dtype, missing=config.missing)
    device = next(net.parameters()).device
    part = stream.read(start, start + steps).to(device)
    chunk = Chunk.from_tensors(part.inputs, part.targets, resets=part.resets, mask=part.mask)
    return chunk, state


def _by_layer(name: str) -> tuple[int, str]:
    """A key that sorts layer10 after layer9."""
    return len(name), name


def _lifetime(
    name: str, norms: Sequence[float], start: int, summaries: Sequence[TraceSummary]
) -> GradientLifetime:
    rows = [row for summary in summaries for row in summary.rows if row.name == name]
    largest = max(norms)
    edges = [row.edge for row in rows if row.edge is not None]
    bursts = [row.end - row.exploded for row in rows if row.exploded is not None]
    return GradientLifetime(
        name,
        largest,
        start + norms.index(largest),
        statistics.median([row.lifetime for row in rows]),
        sum(row.vanished is not None for row in rows),
        len(bursts),
        statistics.median(bursts) if bursts else None,
        _rounded([statistics.median(edges)])[0] if edges else None,
    )


def _norms(grads: Tensor) -> tuple[float, ...]:
    """The norm of each step of `(T, H)`."""
    norms = grads.flatten(1).norm(dim=1)
    return _rounded(norms.nan_to_num(nan=math.inf, posinf=math.inf).tolist())


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values)
