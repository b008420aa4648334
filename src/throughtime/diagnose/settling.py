"""Settling time: how many outputs of a cold start differ from those of the carried state.

    d(k) = max over outputs c of |cold_c(p + k) - carried_c(p + k)|        k = 0, 1, ... steps
    settling time = the least n with d(k) <= tolerance * scale for all compared k >= n

The carried run has played a recording from its first step. A cold start enters step p of it with
the initial state (zeros, or what the net learned) and plays the same inputs. A net without memory
settles after 0 steps, and one that counts without a bound never does.

d is an analogue of the effective remembrance of R. Buitrago Ruiz and A. Gu, not that measure. Both
are a distance between the prediction after the whole past and that after the last steps alone.
Theirs is the total variation between the probabilities of the next token. Outputs of a net are
numbers of any kind, so here it is the largest difference, relative to their deviation.

References: R. Buitrago Ruiz and A. Gu, Understanding and improving length generalization in
recurrent models, ICML 2025 (arXiv 2507.02782).

Shapes: `T` steps, `N` cold starts, `D` input features, `C` outputs.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from throughtime.carry.carried import Carried, pack, running
from throughtime.diagnose._slice import StreamSlice, run_spans
from throughtime.errors import ConfigError, DataError, RunError, counted
from throughtime.gradient.segment import preserve_rng_and_buffers
from throughtime.gradient.window import check_whole
from throughtime.stream import Stream
from throughtime.stream.lanes import LaneSlice
from throughtime.stream.sources import Recordings
from throughtime.stream.stream import whole_stream

SHARES = (0.5, 0.9, 0.99, 1.0)
_BLOCK = 1024  # steps of a forward call
_ROUNDING = 64  # times the precision of the largest output: less is no difference


@dataclass(frozen=True)
class ColdStart:
    """A step at which the net starts anew beside the carried run.

    Attributes:
        recording: its name.
        position: the step, within the recording.
        compared: steps whose outputs are compared, from that one on.
        steps: after which it agrees until the last of them; `None` if it does not.
    """

    recording: str
    position: int
    compared: int
    steps: int | None


@dataclass(frozen=True)
class SettlingTime:
    """The result of `tt.settling_time`.

    Attributes:
        starts: the cold starts, by lane.
        quantiles: steps after which a share of the cold starts agree (0.5, 0.9, 0.99 and 1.0, the
            maximum); `None` where cold starts that had not settled belong to that share.
        unsettled: cold starts that did not agree at the end of their comparison.
        tolerance: the largest difference that counts as agreement, relative to `scale`.
        scale: of the outputs: the deviation of the carried ones, root mean square over the columns,
            unless the caller said.
        remembrance: mean difference relative to `scale`, by the number of steps since the start.
    """

    starts: tuple[ColdStart, ...]
    quantiles: dict[float, int | None]
    unsettled: int
    tolerance: float
    scale: float
    remembrance: dict[int, float]

    def __str__(self) -> str:
        """The result and how it was measured, as a sentence."""
        quantiles = ", ".join(
            f"{share:.0%} {'not settled' if n is None else f'{n:,}'}"
            for share, n in self.quantiles.items()
        )
        return (
            "steps until a cold start agrees with the carried state, by the share of cold starts:"
            f" {quantiles}. Within {self.tolerance:g} of the scale of the outputs; of"
            f" {counted(len(self.starts), 'cold start')} {self.unsettled:,} had not settled"
        )


def settling_time(
    net: Carried,
    stream: Stream | Recordings,
    *,
    starts: int = 64,
    span: int = 1000,
    steps: int | None = None,
    tolerance: float = 0.01,
    scale: float | None = None,
    seed: int = 0,
) -> SettlingTime:
    """Measure after how many steps a cold start agrees with the run whose state was carried.

    So many outputs are not to be relied on after a start in the middle of a signal, and so many
    steps are to be played before it ("prewarming"). It says nothing of longer recordings than those
    measured. See `tt.reach` for how far back the gradient goes.

    Args:
        net: made by `tt.carry`; run in evaluation mode, and left as it was.
        stream: recordings, as for `tt.evaluate`: whole ones are played. Or a `tt.Stream`, whose
            lanes are played as in training; it is read, not moved.
        starts: N, the number of cold starts, spread over the lanes. Their positions are drawn:
            `span` steps or more after the start of a recording and before its end, or a third of
            a recording that is too short for that.
        span: the most steps to compare after a cold start.
        steps: steps of every lane that are played; default: to the end of the epoch.
        tolerance: the largest difference of an output that counts as agreement, relative to
            `scale`. Differences of rounding always agree.
        scale: of the outputs; default: the deviation of the carried ones, root mean square over the
            columns. 1 makes `tolerance` absolute.
        seed: draws the positions, of each lane by itself.

    Returns:
        A `SettlingTime`: the steps until the outputs of a cold start agree with the carried ones.

    Raises:
        ConfigError: a number out of range.
        DataError: no recording of two steps or more; or inputs that are not finite, as for
            `tt.Stream`.
        RunError: the carried run has outputs that are not finite.

    Cost: one forward pass over the recordings, up to the last cold start, and one over `starts`
    times `span` steps, as one batch. Memory for their inputs and outputs. No graph.

    Example:
        >>> import torch, throughtime as tt
        >>> _ = torch.manual_seed(0)
        >>> net = tt.carry(torch.nn.GRU(3, 8))
        >>> result = tt.settling_time(net, torch.randn(2000, 3), span=200)
        >>> result.quantiles[1.0] < 50, result.unsettled
        (True, 0)

    References: after an idea of Buitrago Ruiz & Gu, ICML 2025.
    """
    check_whole("starts", starts, 1)
    check_whole("span", span, 1)
    if not (0 < tolerance < math.inf and (scale is None or 0 < scale < math.inf)):
        raise ConfigError(f"tolerance={tolerance}, scale={scale}: expected finite numbers above 0")
    played = stream if isinstance(stream, Stream) else whole_stream(stream)
    played._sync_ranks()
    section = StreamSlice(net, played, steps)
    lanes: dict[int, list[LaneSlice]] = {}
    for run in played._schedule.slices(0, section.steps):
        if run.steps > 1:  # it has a past to compare with
            lanes.setdefault(run.lane, []).append(run)
    drawn = [
        start
        for number, runs in enumerate(lanes.values())
        for start in _draw(runs, len(range(number, starts, len(lanes))), span, seed)
    ]
    if not drawn:
        raise DataError(
            "no recording has two steps or more among those played, so no cold start has a past to"
            " be compared with; take longer recordings, or more steps"
        )
    with preserve_rng_and_buffers(net, section.placement.device), running(net):
        carried = _carried_run(net, section, drawn)
        rows = [section.read(c.step, c.step + c.compared).inputs[:, c.run.lane] for c in drawn]
        inputs = pad_sequence(rows)
        cold, _ = net(inputs, net.initial_state(len(drawn), like=inputs))
        cold = pack(cold)
    return _compared(played, drawn, (carried, cold), tolerance, scale)


class _Start(NamedTuple):
    """A cold start: at lane time `step`, in a slice of a recording."""

    run: LaneSlice
    step: int
    compared: int


def _draw(runs: Sequence[LaneSlice], count: int, span: int, seed: int) -> Iterator[_Start]:
    """Different positions of a lane, in order; fewer where there are not so many."""
    margins = [min(span, max(1, run.steps // 3)) for run in runs]
    ends = list(accumulate(run.steps - 2 * m + 1 for run, m in zip(runs, margins, strict=True)))
    numbers = random.Random(f"{seed}:{runs[0].lane}")  # noqa: S311  positions, not secrets
    for number in sorted(numbers.sample(range(ends[-1]), min(count, ends[-1]))):
        i = bisect_right(ends, number)
        run, left = runs[i], ends[i] - number + margins[i] - 1
        yield _Start(run, run.stop - left, min(span, left))


def _carried_run(net: Carried, section: StreamSlice, drawn: Sequence[_Start]) -> Tensor:
    """The outputs `(T, N, C)` of the carried run after each cold start."""
    last = max(cold.step + cold.compared for cold in drawn)
    edges, parts = [*range(0, last, _BLOCK), last], list[list[Tensor]]([] for _ in drawn)
    spans = run_spans(net, section.read, edges, section.state)
    for begin, (rows, y, _) in zip(edges, spans, strict=False):
        if not bool(y.isfinite().all()):
            raise RunError(
                f"an output of the carried run is NaN or infinite between steps {begin:,} and"
                f" {begin + rows.steps:,} of a lane: there is nothing to compare with. Are the"
                " inputs scaled as in training?"
            )
        for own, (run, step, compared) in zip(parts, drawn, strict=True):
            start, stop = (max(0, t - begin) for t in (step, step + compared))
            own.append(y[start:stop, run.lane].clone())
    return pad_sequence([torch.cat(own) for own in parts])


def _compared(
    stream: Stream,
    drawn: Sequence[_Start],
    runs: tuple[Tensor, Tensor],
    tolerance: float,
    scale: float | None,
) -> SettlingTime:
    """The settling times of the outputs `(T, N, C)` of the carried run and of the cold starts."""
    carried, cold = (y.reshape(*y.shape[:2], -1).double() for y in runs)
    lengths = torch.tensor([c.compared for c in drawn], device=carried.device)
    ages = torch.arange(len(carried), device=carried.device).unsqueeze(1)
    counts = ages < lengths
    values = carried[counts]
    if scale is None:
        scale = float(values.var(0, correction=0).mean().sqrt())
    rounding = _ROUNDING * torch.finfo(runs[0].dtype).eps * float(values.abs().max())
    limit = max(tolerance * scale, rounding)
    differences = (cold - carried).abs().amax(2).masked_fill(~counts, 0.0)
    settled = torch.where(differences <= limit, 0, ages + 1).amax(0).tolist()
    starts = tuple(
        ColdStart(
            stream.recordings[c.run.recording].name,
            c.run.position + c.step - c.run.start,
            c.compared,
            None if n == c.compared else n,
        )
        for c, n in zip(drawn, settled, strict=True)
    )
    ordered = sorted((s.steps is None, s.steps) for s in starts)
    means = differences.sum(1) / counts.sum(1) / (scale or 1.0)
    return SettlingTime(
        starts,
        {share: ordered[math.ceil(share * len(ordered)) - 1][1] for share in SHARES},
        sum(start.steps is None for start in starts),
        tolerance,
        scale,
        {n: float(means[n]) for n in (0, *(1 << i for i in range(32))) if n < len(means)},
    )
