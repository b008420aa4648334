"""The gradient of a run over time and layer: what its own policy gives to each step of a stretch of
one recording.

    G_t = sum over updates u of  dL_u / ds_t        s a state or gate, L_u the mean loss of the
    steps that update u counts

A gradient of weights is the sum over steps of what each contributes under G_t: it is all that
training learns from at step t. Where the horizon is longer than the stride, a step lies in several
windows, whose gradients add up. One lane plays the recording, its state carried from the first
step, at fixed weights.

Shapes: `T` steps, `H` hidden.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from throughtime.app.config import Config
from throughtime.app.excerpt import busiest_excerpt
from throughtime.app.model import Spec
from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk
from throughtime.diagnose.trace import Found, Timescale, Trace, trace
from throughtime.gradient import LossFn, Truncated, schedule
from throughtime.predict import Predictor
from throughtime.state import State
from throughtime.stream import Recording, Stream, windows
from throughtime.updates import updates

SHOWN, FEWEST = 400, 3  # steps that are shown at least, and strides
LONGEST = 1_000  # a longer stride has no edge among the steps shown
# steps of all windows at most: a layer's recurrence takes about 0.1 ms for each while it is traced
WORK = 30_000
VANISHED, EXPLODED = 1e-3, 10.0  # as tt.trace has them: docs/trace.md says why
_DIGITS = 4


@dataclass(frozen=True)
class Cut:
    """Which steps are played, counted from the first shown, and how credit is cut among them.

    Attributes:
        shown: steps that are shown.
        steps: steps played; those beyond the shown ones are there for their losses.
        stride: steps between two updates.
        horizon: steps that credit flows back.
    """

    shown: int
    steps: int
    stride: int
    horizon: int

    @classmethod
    def of(cls, config: Config, steps: int) -> "Cut":
        """As the run cuts, where there are so many steps from the first on."""
        stride = (config.segment if config.exact else config.stride) or steps
        horizon = (
            stride
            if config.exact or config.train_on == "windows"
            else max(stride, config.horizon or stride)
        )
        if stride > LONGEST:
            played = min(LONGEST + SHOWN, steps)
            return cls(min(SHOWN, steps), played, played, played)
        shown = min(steps, stride * max(FEWEST, math.ceil(SHOWN / stride)))
        ahead = min(horizon - stride, steps - shown)
        while (shown + ahead) * (stride + ahead) > WORK * stride and ahead:
            ahead //= 2
        return cls(shown, shown + ahead, stride, max(stride, min(horizon, shown + ahead)))

    @property
    def edges(self) -> tuple[int, ...]:
        """The steps shown at which an update ends and the next begins."""
        return tuple(range(self.stride, self.shown, self.stride))

    def begins(self, stop: int) -> int:
        """The first step of the window whose update ends before `stop`."""
        return next(
            w.start
            for w in schedule.windows(self.steps, self.stride, self.horizon)
            if w.stop == stop
        )


@dataclass(frozen=True)
class GradientLifetime:
    """What becomes of the gradient of one state or gate, over the windows looked at.

    Attributes:
        name: `recurrent.layer0.c`.
        largest: its largest norm among the steps shown.
        at: the step of it, within the recording.
        lived: steps, counted back from the end of a window, that it lives; the median window.
        died: windows in which it has died before their first step.
        exploded: windows in which it blows up.
        burst: steps, counted back from the end of a window, where it does; the median of these
            windows, `None` where there is none.
        edge: what would flow on across the edge where a window begins, relative to its largest; the
            median window. `None` for gates.
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
class Memory:
    """How many steps the gates of a layer keep 1/e of the past: the tenth percentile of its units, the median, the ninetieth, the most."""

    name: str
    short: float
    median: float
    long: float
    longest: float


@dataclass(frozen=True)
class RunTrace:
    """What the trace of a run saw.

    Attributes:
        recording: its name.
        start: the first step shown, within the recording.
        stride: steps between two edges.
        horizon: steps that credit flowed back.
        ahead: steps after those shown whose losses were looked at, too.
        signal: the first input column at every step shown.
        windows: how many windows the figures of `lives` are of, each of `horizon` steps unless the
            stretch is shorter.
        norms: of each state and gate at every step shown, to four digits; infinite where they are
            not finite.
        lives: one for each.
        memories: one for each layer with a gate that keeps the past.
    """

    recording: str
    start: int
    stride: int
    horizon: int
    ahead: int
    signal: tuple[float, ...]
    windows: int
    norms: dict[str, tuple[float, ...]]
    lives: tuple[GradientLifetime, ...]
    memories: tuple[Memory, ...]

    @property
    def steps(self) -> int:
        """Steps shown."""
        return len(next(iter(self.norms.values())))

    @property
    def edges(self) -> tuple[int, ...]:
        """Where an update ends and the next begins, within the recording."""
        return tuple(range(self.start + self.stride, self.start + self.steps, self.stride))

    @classmethod
    def read(cls, content: Any) -> "RunTrace":
        """What `asdict` gave, read back from JSON, which knows no infinity."""
        read = {
            "signal": tuple(_number(value) for value in content["signal"]),
            "norms": {
                name: tuple(_number(norm) for norm in norms)
                for name, norms in content["norms"].items()
            },
            "lives": tuple(
                GradientLifetime(**(life | {"largest": _number(life["largest"])}))
                for life in content["lives"]
            ),
            "memories": tuple(
                Memory(
                    m["name"], *(_number(m[key]) for key in ("short", "median", "long", "longest"))
                )
                for m in content["memories"]
            ),
        }
        return cls(**(content | read))


def trace_run(
    net: Carried, spec: Spec, recording: Recording, loss_fn: LossFn, config: Config
) -> RunTrace | None:
    """The gradient over the liveliest stretch of a recording; `None` if none of its steps has a
    loss.

    Args:
        net: the run's model; its weights are left as they are.
        spec: what it is.
        recording: what to play.
        loss_fn: that of training.
        config: of the run: how its credit is cut.
    """
    longest = Cut.of(config, len(recording)).steps
    start = min(busiest_excerpt(net, spec, recording, config).start, len(recording) - longest)
    if config.train_on == "windows":
        start -= start % config.stride
    cut = Cut.of(config, len(recording) - start)
    chunk, state = _placed(net, spec, recording, config, start, cut.steps)
    seen = Seen(cut)
    with trace(net, tensors=True, vanished=VANISHED, exploded=EXPLODED) as watch:
        for update in updates(
            net, [chunk], loss_fn, gradient=Truncated(cut.stride, cut.horizon), state=state
        ):
            seen.take(watch, int(update.chunk.position[-1, 0]) + 1)
    net.zero_grad()
    signal = chunk.inputs[: cut.shown, 0].reshape(cut.shown, -1)[:, 0].double().tolist()
    return seen.summary(recording.name, start, signal) if seen.found else None


def _placed(
    net: Carried, spec: Spec, recording: Recording, config: Config, start: int, steps: int
) -> tuple[Chunk, State]:
    """The steps to play, counted from zero, and the state that enters them: carried from the start of the recording, or of the window."""
    apart = config.train_on == "windows"
    played: list[Recording] = list(windows([recording], config.stride)) if apart else [recording]
    stream = Stream(
        played,
        1,
        config.stride,
        seed=None,
        warm_up=config.warm_up,
        dtype=spec.torch_dtype,
        missing=config.missing,
        rank=0,
        ranks=1,
    )
    player, device = Predictor(net), next(net.parameters()).device
    for at in range(0, 0 if apart else start, 1024):
        player(stream.read(at, min(at + 1024, start)).inputs.to(device))
    read = stream.read(start, start + steps)
    return (
        Chunk.from_tensors(read.inputs, read.targets, resets=read.resets, mask=read.mask).to(
            device
        ),
        player.state,
    )


class Seen:
    """Adds up the gradients of the windows."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.sums: dict[str, Tensor] = {}
        self.found: list[tuple[int, Found]] = []  # the length of a window, and what its pass says
        self.kept: dict[str, list[Tensor]] = {}

    def take(self, watch: Trace, stop: int) -> None:
        """Takes in the pass of the update whose window ends before `stop`."""
        begin, last = self.cut.begins(stop), watch.last
        for name in last.names:
            gradient = last.tensor(name)[:, 0].double().cpu()
            whole = self.sums.setdefault(
                name, gradient.new_zeros(self.cut.steps, *gradient.shape[1:])
            )
            whole[begin : begin + len(gradient)] += gradient
        self.found.append((stop - begin, watch.found()))
        for name, mean in last.kept().items():
            self.kept.setdefault(name, []).append(mean.double().cpu())

    def summary(self, recording: str, start: int, signal: Sequence[float]) -> RunTrace:
        """The figures."""
        names = sorted(self.sums, key=_place)
        norms = {name: _norms(self.sums[name][: self.cut.shown]) for name in names}
        longest = max(steps for steps, _ in self.found)
        whole = [found for steps, found in self.found if steps == longest]
        memories = (
            Timescale.of(name, torch.stack(self.kept[name]).mean(0))
            for name in sorted(self.kept, key=lambda name: (len(name), name))
        )
        return RunTrace(
            recording,
            start,
            self.cut.stride,
            self.cut.horizon,
            self.cut.steps - self.cut.shown,
            tuple(_rounded(signal)),
            len(whole),
            norms,
            tuple(_life(name, values, start, whole) for name, values in norms.items()),
            tuple(
                Memory(pace.name, *(_rounded((pace.short, pace.median, pace.long, max(pace.taus)))))
                for pace in memories
            ),
        )


def _place(name: str) -> tuple[int, str]:
    """Layers in the order of their numbers; within one the states and gates as they were seen."""
    track = name.rpartition(".")[0]
    return len(track), track


def _life(
    name: str, norms: Sequence[float], start: int, whole: Sequence[Found]
) -> GradientLifetime:
    rows = [row for found in whole for row in found.rows if row.name == name]
    largest = max(norms)
    edges = [row.edge for row in rows if row.edge is not None]
    bursts = [row.end - row.exploded for row in rows if row.exploded is not None]
    return GradientLifetime(
        name,
        largest,
        start + norms.index(largest),
        statistics.median([row.lived for row in rows]),
        sum(row.vanished is not None for row in rows),
        len(bursts),
        statistics.median(bursts) if bursts else None,
        float(f"{statistics.median(edges):.{_DIGITS}g}") if edges else None,
    )


def _norms(gradients: Tensor) -> tuple[float, ...]:
    """Of `(T, H)`, one for each step."""
    return tuple(
        _rounded(
            gradients.flatten(1).norm(dim=1).nan_to_num(nan=math.inf, posinf=math.inf).tolist()
        )
    )


def _rounded(values: Sequence[float]) -> Iterator[float]:
    return (float(f"{value:.{_DIGITS}g}") for value in values)


def _number(value: float | None) -> float:
    return math.inf if value is None else value
