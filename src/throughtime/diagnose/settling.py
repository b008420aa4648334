"""Settling time: how many outputs of a cold start differ from those of the carried state.

    d(k) = max over outputs c of |cold_c(p + k) - carried_c(p + k)|        k = 0, 1, ... steps
    settling time = the least n with d(k) <= tolerance * scale for all compared k >= n

The carried run has played a recording from its first step. A cold start enters step p of it with
the initial state (zeros, or what the net learned) and plays the same inputs. A net without memory
settles after 0 steps, and one that counts without a bound never does.

d is the effective remembrance of B. Ruiz and A. Gu: the distance between the prediction after the
whole past and that after the last steps alone. They take the total variation between the
probabilities of the next token. Outputs of a net are numbers of any kind, so here it is the largest
difference, relative to the deviation of the outputs.

References: R. Buitrago Ruiz and A. Gu, Understanding and improving length generalization in
recurrent models, ICML 2025 (arXiv 2507.02782).

Shapes: `T` steps, `N` cold starts, `D` input features, `C` outputs.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from throughtime.carry.carried import Carried, device_of, dtype_of, require_carried, running
from throughtime.chunk import Chunk, Placement
from throughtime.diagnose._slice import json_safe
from throughtime.errors import ConfigError, DataError, RunError, counted
from throughtime.gradient._memory import preserve_rng_and_buffers
from throughtime.gradient._segments import run_chunk
from throughtime.gradient.schedule import check_whole
from throughtime.stream import Stream
from throughtime.stream.lanes import LaneSlice
from throughtime.stream.sources import Recordings
from throughtime.stream.stream import whole_stream

SHARES = (0.5, 0.9, 0.99, 1.0)
_BLOCK = 1024  # steps of a forward call
_ROUNDING = 64  # times the precision of the largest output: less is no difference


class ColdStart(NamedTuple):
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


@dataclass(frozen=True, repr=False)
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

    @property
    def steps(self) -> tuple[int | None, ...]:
        """The settling time of each cold start; `None` for those that had not settled."""
        return tuple(start.steps for start in self.starts)

    @property
    def median(self) -> int | None:
        """Steps after which half of the cold starts agree; `None` if fewer ever did."""
        return self.quantiles[0.5]

    @property
    def maximum(self) -> int | None:
        """Steps after which all cold starts agree; `None` if some never did."""
        return self.quantiles[1.0]

    def summary(self) -> str:
        """The result and how it was measured, as a sentence."""
        labels = {0.5: "median", 1.0: "maximum"}
        quantiles = ", ".join(
            f"{labels.get(share, f'{share:.0%}')} {'not settled' if n is None else f'{n:,}'}"
            for share, n in self.quantiles.items()
        )
        open_ = [start for start in self.starts if start.steps is None]
        rest = f"; {len(open_):,} had not settled after {_lengths(open_)}" if open_ else ""
        return (
            f"steps until a cold start agrees with the carried state: {quantiles}. Within"
            f" {self.tolerance:g} of the scale of the outputs, {self.scale:.3g};"
            f" {counted(len(self.starts), 'cold start')}, compared for"
            f" {_lengths(self.starts)}{rest}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for any logger; `None` for what is not finite."""
        starts = [start._asdict() for start in self.starts]
        return json_safe({**asdict(self), "starts": starts})

    def __repr__(self) -> str:
        return f"SettlingTime({self.summary()})"

    def __str__(self) -> str:
        return self.summary()


def _lengths(starts: Sequence[ColdStart]) -> str:
    """For how many steps cold starts are compared."""
    least, most = (f(start.compared for start in starts) for f in (min, max))
    return counted(most, "step") if least == most else f"{least:,} to {most:,} steps"


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
        >>> result.maximum < 50, result.unsettled
        (True, 0)

    References: Buitrago Ruiz & Gu, ICML 2025.
    """
    require_carried(net)
    check_whole("starts", starts, 1)
    check_whole("span", span, 1)
    if steps is not None:
        check_whole("steps", steps, 1)
    for name, value in (("tolerance", tolerance), ("scale", 1.0 if scale is None else scale)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name}={value}: expected a finite number above 0")
    played = stream if isinstance(stream, Stream) else whole_stream(stream)
    played._sync_ranks()
    slices = _slices(played, min(steps or played.steps, played.steps))
    drawn = [
        cold
        for lane, runs in enumerate(slices)
        for cold in _draw(
            runs,
            starts // len(slices) + (lane < starts % len(slices)),
            span,
            f"{seed}:{runs[0].lane}",
        )
    ]
    if not drawn:
        raise DataError(
            "no recording has two steps or more among those played, so no cold start has a past to"
            " be compared with; take longer recordings, or more steps"
        )
    device = device_of(net)
    with preserve_rng_and_buffers(net, device), running(net):
        inputs, carried = _carried_run(net, played, drawn, Placement(device, dtype_of(net)))
        cold = _cold_run(net, inputs)
    return _compared(played, drawn, carried, cold, (tolerance, scale))


class _StartPosition(NamedTuple):
    """A cold start: at lane time `step`, in a slice of a recording."""

    run: LaneSlice
    step: int
    compared: int


def _slices(stream: Stream, steps: int) -> list[list[LaneSlice]]:
    """The recordings of each lane within its first steps, those that have a past to compare."""
    rows: list[list[LaneSlice]] = [[] for _ in range(stream.lanes)]
    for run in stream._schedule.slices(0, steps):
        if run.steps > 1:
            rows[run.lane].append(run)
    return [row for row in rows if row]


def _draw(runs: Sequence[LaneSlice], count: int, span: int, seed: str) -> list[_StartPosition]:
    """Different positions of a lane, in order; fewer where there are not so many."""
    margins = [min(span, max(1, run.steps // 3)) for run in runs]
    ends = list(accumulate(run.steps - 2 * m + 1 for run, m in zip(runs, margins, strict=True)))
    chosen = random.Random(seed).sample(  # noqa: S311  a position, not a secret
        range(ends[-1]), min(count, ends[-1])
    )
    drawn: list[_StartPosition] = []
    for number in sorted(chosen):
        i = next(i for i, end in enumerate(ends) if number < end)
        offset = margins[i] + number - (ends[i - 1] if i else 0)
        drawn.append(
            _StartPosition(runs[i], runs[i].start + offset, min(span, runs[i].steps - offset))
        )
    return drawn


def _carried_run(
    net: Carried, stream: Stream, drawn: Sequence[_StartPosition], placement: Placement
) -> tuple[Tensor, Tensor]:
    """Inputs `(T, N, D)` after each cold start, and the outputs `(T, N, C)` of the carried run."""
    longest, last = (
        max(cold.compared for cold in drawn),
        max(cold.step + cold.compared for cold in drawn),
    )
    state, rows = None, list[Tensor]()
    for begin in range(0, last, _BLOCK):
        chunk: Chunk = stream.read(begin, min(begin + _BLOCK, last)).convert(placement)
        if state is None:
            state = net.initial_state(chunk.lanes, like=chunk.inputs)
        y, state = run_chunk(net, chunk, state)
        if not bool(y.isfinite().all()):
            raise RunError(
                f"an output of the carried run is NaN or infinite between steps {begin:,} and"
                f" {begin + chunk.steps:,} of a lane: there is nothing to compare with. Are the"
                " inputs scaled as in training?"
            )
        if not rows:
            rows = [t.new_zeros(longest, len(drawn), *t.shape[2:]) for t in (chunk.inputs, y)]
        for n, (run, step, compared) in enumerate(drawn):
            start, stop = max(begin, step), min(begin + chunk.steps, step + compared)
            if start < stop:
                for into, values in zip(rows, (chunk.inputs, y), strict=True):
                    into[start - step : stop - step, n] = values[start - begin : stop - begin][
                        :, run.lane
                    ]
    return rows[0], rows[1]


def _cold_run(net: Carried, inputs: Tensor) -> Tensor:
    """The outputs `(T, N, C)` from the initial state, all cold starts side by side."""
    state, outputs = net.initial_state(inputs.shape[1], like=inputs), list[Tensor]()
    for part in inputs.split(_BLOCK):
        y, state = net(part, state)
        outputs.append(y)
    return torch.cat(outputs)


def _compared(
    stream: Stream,
    drawn: Sequence[_StartPosition],
    carried: Tensor,
    cold: Tensor,
    limits: tuple[float, float | None],
) -> SettlingTime:
    """The settling times of outputs `(T, N, C)`."""
    tolerance, scale = limits
    lengths = torch.tensor([c.compared for c in drawn], device=carried.device)
    counts = torch.arange(len(carried), device=carried.device).unsqueeze(1) < lengths
    before, after = (
        y.to(torch.float64).flatten(2) for y in (carried.unsqueeze(2), cold.unsqueeze(2))
    )
    values = before[counts]
    if scale is None:
        scale = float(values.var(0, correction=0).mean().sqrt())
    precision = torch.finfo(carried.dtype).eps if carried.is_floating_point() else 0.0
    limit = max(tolerance * scale, _ROUNDING * precision * float(values.abs().max()))
    differences = (after - before).abs().amax(2).masked_fill(~counts, 0.0)
    at = torch.arange(1, len(carried) + 1, device=carried.device).unsqueeze(1)
    settled = torch.where(differences <= limit, 0, at).amax(0).tolist()
    starts = tuple(
        ColdStart(
            stream.recordings[c.run.recording].name,
            c.run.position + c.step - c.run.start,
            c.compared,
            None if n == c.compared else int(n),
        )
        for c, n in zip(drawn, settled, strict=True)
    )
    ordered = sorted(math.inf if s.steps is None else s.steps for s in starts)
    quantiles = {share: ordered[math.ceil(share * len(ordered)) - 1] for share in SHARES}
    ages = [0, *(2**i for i in range((len(carried) - 1).bit_length()))]
    means = differences.sum(1) / counts.sum(1)
    return SettlingTime(
        starts,
        {share: None if n == math.inf else int(n) for share, n in quantiles.items()},
        sum(start.steps is None for start in starts),
        tolerance,
        scale,
        {age: float(means[age]) / (scale or 1.0) for age in ages if age < len(carried)},
    )
