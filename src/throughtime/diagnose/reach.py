"""Reach: how far back in time the gradient of a single loss extends.

    phi(k) = mean over anchors t of  | dL_t / ds_{t-k} |          k = 1, 2, ... steps before the
    loss

One backward pass serves as many anchors as there are lanes: rows of a batch do not depend on each
other, so every lane has its loss at its own step, and the norm of each row of the credit belongs to
its anchor. Gates between the steps read the credit (`_slice.py`).

Shapes: `T` steps of a window, `B` lanes (rows of the batch). A recording is one unbroken sequence.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from throughtime import state as trees
from throughtime._device import real_type
from throughtime.carry.carried import Carried, device_of
from throughtime.chunk import Chunk
from throughtime.diagnose._slice import CreditPass, StreamSlice, get_axes, json_safe
from throughtime.errors import DataError
from throughtime.gradient import LossFn, Objective
from throughtime.gradient.segment import lane_norms, preserve_rng_and_buffers
from throughtime.gradient.window import Credit, check_whole
from throughtime.state import State
from throughtime.stream import Stream

_LEAST = 1e-30  # a norm of which float32 has all digits
_BLOCK = 1024  # steps of a forward call between two windows
_POINTS = 6  # the fewest for a line
SHARES = (0.5, 0.9, 0.99)
FITTING = 0.9  # the lowest R² of an exponential decay


class Decay(NamedTuple):
    """phi(k) ~ rate^k over the tail, the last third of the lags; R² is that of the fit to log phi.

    It says how phi would go on beyond the measured lags. How far the gradient goes back within them
    is what `shares` say: a tail may fall slowly and hold next to nothing of the sum.
    """

    rate: float
    r2: float


@dataclass(frozen=True)
class Reach:
    """The result of `tt.reach`.

    Attributes:
        lags: 1, 2, ... steps before the loss, or multiples of `every`.
        norms: phi at every lag, of the whole state.
        by_leaf: phi at every lag, of each leaf of the state by its name, so h and c of an LSTM
            apart.
        anchors: losses measured.
        counts: for every lag, the anchors with that much past; no gradient crosses the start of a
            recording.
        shares: the lags within which 50, 90 and 99 % of the sum of phi lie.
        decay: how phi falls over the tail, the last third of the lags, whatever its share of the
            sum; `None` if that is no exponential decay.
        lyapunov: mean growth of the logarithm of the credit of a loss per step, over the last two
            thirds of the lags at which its norm is above 1e-30; above 0 gradients explode, and it
            is minus infinity without credit at two lags.
        loss: mean loss at the anchors, with all of the past.
        contexts: mean loss at the anchors if the net starts so many steps before, from the initial
            state.
        memory_used: whether the past lowers the loss by at least 1 %.
    """

    lags: tuple[int, ...]
    norms: tuple[float, ...]
    by_leaf: dict[str, tuple[float, ...]]
    anchors: int
    counts: tuple[int, ...]
    shares: dict[float, int]
    decay: Decay | None
    lyapunov: float
    loss: float
    contexts: dict[int, float]
    memory_used: bool

    @property
    def reach_50(self) -> int:
        """The lag within which half of the gradient lies."""
        return self.shares[0.5]

    @property
    def reach_90(self) -> int:
        """The lag within which nine tenths of the gradient lie."""
        return self.shares[0.9]

    @property
    def reach_99(self) -> int:
        """The lag within which all but a hundredth of the gradient lies."""
        return self.shares[0.99]

    @property
    def tail_share(self) -> float:
        """The share of the sum of phi that lies in the tail, from which `decay` is fitted."""
        total = sum(self.norms)
        pairs = zip(self.lags, self.norms, strict=True)
        return sum(n for lag, n in pairs if _in_tail(lag, self.lags)) / total if total else 0.0

    def warning(self) -> str:
        """How to interpret the result."""
        if not self.memory_used:
            return (
                "the past does not lower the loss by 1 % or more"
                f" ({self.contexts[min(self.contexts)]:.4g} from a single step, {self.loss:.4g}"
                " with all of it): the net has not learned to use it, and this reach is a lower"
                " bound of the reach that the task needs"
            )
        more = (
            " Most of the gradient lies at the longest lags measured: pass a larger max_lag."
            if self.reach_90 > 0.85 * self.lags[-1]
            else ""
        )
        return (
            "this is the reach at the present weights: while the loss is on a plateau it is a lower"
            " bound of the reach that the task needs." + more
        )

    def table(self) -> str:
        """The figures as text."""
        decay = (
            "no exponential decay"
            if self.decay is None
            else f"x {self.decay.rate:.4f} per step (R² {self.decay.r2:.3f})"
        )
        leaves = [
            f"  {name}: reach_90 {within(self.lags, norms, 0.9)}"
            for name, norms in self.by_leaf.items()
        ]
        contexts = "  ".join(f"{k}: {loss:.4g}" for k, loss in self.contexts.items())
        first = next((lag for lag in self.lags if _in_tail(lag, self.lags)), self.lags[-1])
        tail = f"lags {first:,} to {self.lags[-1]:,}, {self.tail_share:.2g} of the gradient"
        return "\n".join(
            [
                f"{self.anchors} losses, back through at most {self.lags[-1]:,} steps",
                f"reach_50 {self.reach_50}   reach_90 {self.reach_90}   reach_99 {self.reach_99}",
                "  steps back within which 50, 90 and 99 % of the gradient lie",
                *leaves,
                f"decay of the tail ({tail}): {decay}",
                f"Lyapunov {self.lyapunov:+.4f} per step"
                + (" (gradients explode)" if self.lyapunov > 0 else ""),
                f"loss by steps of context: {contexts}  all: {self.loss:.4g}",
                self.warning(),
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for any logger; `None` for what is not finite."""
        return json_safe(asdict(self))

    def plot(self, axes: Any = None) -> Any:
        """Norms over the lag, of the whole state and of each leaf; returns matplotlib's axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        axes = get_axes(axes)
        axes.loglog(self.lags, self.norms, label="state")
        for name, norms in self.by_leaf.items():
            axes.loglog(self.lags, norms, linewidth=0.8, label=name)
        axes.set_xlabel("lag (steps)")
        axes.set_ylabel("gradient norm")
        axes.legend()
        return axes

    def __str__(self) -> str:
        return self.table()


def reach(
    net: Carried,
    stream: Stream,
    loss_fn: LossFn,
    *,
    max_lag: int = 1000,
    anchors: int = 64,
    every: int = 1,
    steps: int | None = None,
    state: State = None,
    chunk: int | None = None,
    seed: int = 0,
) -> Reach:
    """Measure how far back the gradient of a single loss extends: its norm at every lag.

    Use it beside `tt.audit`, which measures the bias of cutting that gradient.

    Args:
        net: made by `tt.carry`; it is not changed. Its lanes must not depend on each other,
            as BatchNorm makes them.
        stream: a `tt.Stream`; it is read, not moved. More lanes mean fewer backward passes.
        loss_fn: as for `tt.updates`.
        max_lag: the longest lag measured.
        anchors: the number of losses, spread over the slice; each lane has its own.
        every: resolution in lags; a larger one is faster with fused layers.
        steps: the number of steps of every lane to draw from; default: to the end of the epoch.
        state: the state entering the stream's next step; default: the start of the epoch.
        chunk: steps per segment, see `tt.Exact`.
        seed: draws the anchors.

    Returns:
        A `Reach`: the norm at every lag; `reach_50`, `reach_90` and `reach_99` are the lags that
        hold these shares of it.

    Raises:
        DataError: no valid step.

    Cost: a forward pass over the slice; for every set of `B` anchors a forward and a backward pass,
    step by step, over `max_lag` steps and a quarter more (two forward passes if that takes several
    segments), and forward passes over 2 * `max_lag` steps for the contexts, and for each of them
    over the steps between the first and the last anchor.

    Example:
        >>> import torch, throughtime as tt
        >>> data = {"inputs": torch.randn(900, 3), "targets": torch.randn(900)}
        >>> stream = tt.Stream(data, lanes=3, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> result = tt.reach(net, stream, torch.nn.MSELoss(), max_lag=50, anchors=9)
        >>> result.reach_50 <= result.reach_90 <= result.reach_99 <= 50
        True
    """
    for name, value in {"max_lag": max_lag, "anchors": anchors, "every": every}.items():
        check_whole(name, value, 1)
    objective, norms, losses = Objective(loss_fn), list[Tensor](), list[list[float]]()
    with torch.no_grad(), preserve_rng_and_buffers(net, device_of(net)):
        section = StreamSlice.of(net, stream, steps, state, objective)
        lags = range(every, max(every, min(max_lag, section.steps - 1)) + 1, every)
        spread = max(1, lags[-1] // 4)
        length = min(section.steps, lags[-1] + spread)
        spread = min(spread, -(-length // 2))
        contexts = [1 << k for k in range(max(1, min(length - spread, lags[-1])).bit_length())]
        at, state, count = 0, section.state, -(-anchors // stream.lanes)
        names = net.leaf_names(state)
        for number in range(count):
            begin = (section.steps - length) * number // max(1, count - 1)
            for start in range(at, begin, _BLOCK):
                rows = section.read(start, min(start + _BLOCK, begin))
                _, state = net(rows.inputs, state, rows.resets)
            at, generator = begin, torch.Generator().manual_seed(seed + number)
            window = section.read(at, at + length)
            drawn = _draw(window, spread, generator)
            if drawn:
                tables, row = _measure(net, objective, window, state, drawn, lags, contexts, chunk)
                norms, losses = norms + tables, losses + [row] * len(drawn)
    if not losses:
        raise DataError(
            "no step with a valid target among those drawn: there is no loss to differentiate"
        )
    loss, *means = map(statistics.fmean, zip(*losses, strict=True))
    return _summary(lags, names, norms, loss, dict(zip(contexts, means, strict=True)))


def _draw(window: Chunk, spread: int, generator: torch.Generator) -> list[tuple[int, int, int]]:
    """Draw an anchor of each lane from the valid ones of the last `spread` steps.

    Each is a lane, a step, and the steps up to it that its recording has states before.
    """
    anchors, begin = list[tuple[int, int, int]](), window.steps - spread
    for lane in range(window.lanes):
        valid = window.mask[begin:, lane].nonzero().flatten().tolist()
        if valid:
            index = torch.randint(len(valid), (), device="cpu", generator=generator)
            step = begin + valid[int(index)]
            starts = window.resets[: step + 1, lane].nonzero().flatten().tolist()
            anchors.append((lane, step, step - max(starts, default=-1)))
    return anchors


def _measure(
    net: Carried,
    objective: Objective,
    window: Chunk,
    state: State,
    anchors: Sequence[tuple[int, int, int]],
    lags: range,
    contexts: Sequence[int],
    size: int | None,
) -> tuple[list[Tensor], list[float]]:
    """Of each anchor by lag the norms of the credit, of the state and its leaves; mean losses.

    The first loss has all of the past, the others start so many steps before the anchors.
    """
    leaves, mask = trees.tensors(state), torch.zeros_like(window.mask)
    for lane, step, _ in anchors:
        mask[step, lane] = True
    x, targets = window.inputs, window.targets
    kept = [i for i, leaf in enumerate(leaves) if trees.differentiable(leaf)]
    shape = window.steps, len(leaves), window.lanes
    table = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def record(step: int, credit: Credit) -> Credit:
        for i, leaf in zip(kept, credit, strict=True):
            if leaf is not None:
                sizes: Any = lane_norms([leaf.abs().to(real_type(leaf))])  # squares underflow
                table[step, i] = sizes
        return credit

    steps = [[step + 1 - lag for lag in lags if lag <= past] for _, step, past in anchors]
    chunk = Chunk.from_tensors(x, targets, resets=window.resets, mask=mask)
    with torch.enable_grad():
        run = CreditPass(
            net,
            objective,
            lambda a, b: chunk[a:b],
            chunk.steps,
            state,
            [],
            chain(*steps),
            chunk=size,
        )
        run.gate, loss = record, run.losses.sum() / (sum(run.counts) or 1.0)
        if loss.requires_grad:
            run.gradients([loss * len(anchors)])
    vars(run).clear()  # or its graph, which refers to it, would wait for the garbage collector
    losses, first = [loss.item()], min(step for _, step, _ in anchors) + 1
    for context in contexts:
        resets = window.resets.clone()
        for lane, step, _ in anchors:
            resets[step + 1 - context, lane] = True
        rows = Chunk.from_tensors(x, targets, resets=resets, mask=mask)[first - context :]
        start = net.initial_state(rows.lanes, like=rows.inputs)
        losses.append(objective(net(rows.inputs, start, rows.resets)[0], rows)[0].item())
    tables = [table[own, :, lane] for own, (lane, *_) in zip(steps, anchors, strict=True)]
    return [torch.cat([own.norm(dim=1, keepdim=True), own], 1) for own in tables], losses


def _summary(
    lags: range,
    names: list[str],
    norms: list[Tensor],
    loss: float,
    contexts: dict[int, float],
) -> Reach:
    """The means over all anchors."""
    counts = [sum(len(rows) > i for rows in norms) for i in range(max(map(len, norms)))]
    if not counts:
        raise DataError(
            "none of the losses drawn has a past: each is at the first step of its recording"
        )
    means = pad_sequence(norms).sum(1).T / torch.tensor(counts, device="cpu")
    (whole, *leaves), growth = map(tuple, means.tolist()), list[float]()
    for rows in norms:
        alive = ((rows[:, 0] > _LEAST) & rows[:, 0].isfinite()).nonzero().flatten().tolist()
        if len(alive) > 1:
            a, b = alive[len(alive) // 3], alive[-1]
            growth.append(math.log(rows[b, 0] / rows[a, 0]) / ((b - a) * lags.step))
    lags = lags[: len(counts)]
    return Reach(
        tuple(lags),
        whole,
        dict(zip(names, leaves, strict=True)),
        len(norms),
        tuple(counts),
        {share: within(lags, whole, share) for share in SHARES},
        _decay(lags, whole),
        statistics.fmean(growth) if growth else -math.inf,
        loss,
        contexts,
        loss < contexts[1] - 0.01 * abs(contexts[1]),
    )


def within(lags: Sequence[int], norms: Sequence[float], share: float) -> int:
    """The first lag up to which the share of the sum lies."""
    total = sum(norms)
    running = 0.0
    for lag, norm in zip(lags, norms, strict=True):
        running += norm
        if running >= share * total:
            return lag
    return lags[-1]


def _in_tail(lag: int, lags: Sequence[int]) -> bool:
    return lag > lags[-1] * 2 / 3


def _decay(lags: Sequence[int], norms: Sequence[float]) -> Decay | None:
    """The least-squares line through log phi over the last third of the lags.

    `None` if the line does not fall, or fits badly.
    """
    points = [
        (lag, math.log(norm))
        for lag, norm in zip(lags, norms, strict=True)
        if norm > 0 and _in_tail(lag, lags)
    ]
    if len(points) < _POINTS:
        return None
    x, y = zip(*points, strict=True)
    slope = statistics.linear_regression(x, y).slope
    r2 = statistics.correlation(x, y) ** 2 if slope < 0 else 0.0  # none of constant values
    return Decay(math.exp(slope), r2) if r2 >= FITTING else None
