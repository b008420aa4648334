"""Reach: how far back in time the gradient of a single loss extends.

    phi(k) = mean over anchors t of  | dL_t / ds_{t-k} |          k = 1, 2, ... steps before the
    loss

One backward pass serves as many anchors as there are lanes: rows of a batch do not depend on each
other, so every lane has its loss at its own step, and the norm of each row of the adjoint belongs
to its anchor. Gates between the steps read the adjoint. The pass runs in segments, so memory is
that of one segment.

Shapes: `B` lanes (rows of the batch). A recording is one unbroken sequence.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.carry.carried import Carried
from throughtime.chunk import Readable
from throughtime.diagnose._slice import (
    Anchor,
    AnchorSet,
    StreamSlice,
    get_axes,
    json_safe,
    spread_of,
    windows,
)
from throughtime.errors import DataError
from throughtime.gradient import LossFn, Objective, schedule
from throughtime.gradient._backward import (
    CreditFlow,
    GradientAccumulator,
    LossPass,
    lane_norms,
    scale_lanes,
    vjp,
)
from throughtime.gradient._memory import MemoryBudget, preserve_rng_and_buffers
from throughtime.gradient._segments import (
    CheckpointedPass,
    Cotangents,
    CreditGate,
    Segment,
    wide,
)
from throughtime.state import State

_SEGMENT_STEPS = 64  # an adjoint is normalised again before it leaves float32's range
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
        lyapunov: mean growth of the logarithm of an adjoint per step; above 0 gradients explode.
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
    stream: Readable,
    loss_fn: LossFn,
    *,
    max_lag: int = 1000,
    anchors: int = 64,
    every: int = 1,
    steps: int | None = None,
    state: State = None,
    chunk: int | Literal["auto"] = "auto",
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
        chunk: steps of graph in memory at once; see `tt.Exact`.
        seed: draws the anchors.

    Returns:
        A `Reach`: the norm at every lag; `reach_50`, `reach_90` and `reach_99` are the lags that
        hold these shares of it.

    Raises:
        DataError: no valid step.

    Cost: a forward pass over the slice; a forward and two backward passes, step by step, over
    `max_lag` steps and a quarter more for every set of `B` anchors; forward passes over 2 *
    `max_lag` steps for the contexts.

    Example:
        >>> import torch, throughtime as tt
        >>> data = {"inputs": torch.randn(900, 3), "targets": torch.randn(900)}
        >>> stream = tt.Stream(data, lanes=3, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> result = tt.reach(net, stream, torch.nn.MSELoss(), max_lag=50, anchors=9)
        >>> result.reach_50 <= result.reach_90 <= result.reach_99 <= 50
        True
    """
    for name, value in (("max_lag", max_lag), ("anchors", anchors), ("every", every)):
        schedule.check_whole(name, value, 1)
    objective = Objective(loss_fn)
    section = StreamSlice.of(net, stream, steps, state, objective)
    lags = list(range(every, max(every, min(max_lag, section.steps - 1)) + 1, every))
    profile = ReachProfile(net, objective, lags, chunk)
    with torch.enable_grad(), preserve_rng_and_buffers(net, section.placement.device):
        for number, (window, entering) in enumerate(
            windows(net, section, lags[-1], -(-anchors // stream.lanes))
        ):
            profile.add_window(window, entering, torch.Generator().manual_seed(seed + number))
    if not profile.anchors:
        raise DataError(
            "no step with a valid target among those drawn: there is no loss to differentiate"
        )
    return profile.summary()


class ReachProfile:
    """Norms by lag and losses by context, accumulated window by window."""

    def __init__(
        self, net: Carried, objective: Objective, lags: list[int], chunk: int | Literal["auto"]
    ) -> None:
        self.net, self.objective, self.lags = net, objective, lags
        self.budget = MemoryBudget("512MB", chunk, None)
        self.budget.check()
        self.anchors = 0
        self.loss = 0.0
        self.contexts: dict[int, float] = {}
        self.names: list[str] = []
        self.sums = torch.zeros(0, device="cpu")  # by lag, of the state, then of each leaf
        self.counts = torch.zeros(len(lags), dtype=torch.float64, device="cpu")
        self.growth: list[Tensor] = []

    def add_window(self, window: StreamSlice, entering: State, generator: torch.Generator) -> None:
        """Add one anchor of every lane that has a valid step."""
        whole = window.read(0, window.steps)
        spread = min(spread_of(self.lags[-1]), -(-whole.steps // 2))
        drawn = AnchorSet.draw(whole, spread, generator)
        if not drawn.anchors:
            return
        if not self.names:
            self.names = self.net.leaf_names(entering)
            self.sums = torch.zeros(
                1 + len(self.names), len(self.lags), dtype=torch.float64, device="cpu"
            )
        self._add_norms(self._credit(drawn, entering, generator), drawn.anchors)
        self._add_contexts(drawn, whole.steps - spread)
        self.anchors += len(drawn.anchors)

    def _credit(self, drawn: AnchorSet, entering: State, generator: torch.Generator) -> Tensor:
        """The norm of the adjoint of each leaf, `(T, leaves, B)`; adds to loss and growth."""
        chunk, count = drawn.chunk, len(drawn.anchors)
        norms = torch.zeros(
            chunk.steps, len(self.names), chunk.lanes, dtype=torch.float64, device="cpu"
        )
        active = True

        def record(rows: Tensor, adjoint: Cotangents) -> None:
            """Write the norm of each leaf's adjoint, by lane, into `rows`, `(leaves, B)`."""
            for row, leaf in zip(rows, adjoint, strict=True):
                if active and leaf is not None:
                    row.copy_(wide(leaf.detach().abs().reshape(len(leaf), -1)).norm(dim=1))

        steps = {
            anchor.step + 1 - lag
            for anchor in drawn.anchors
            for lag in self.lags
            if lag <= anchor.step + 1
        }
        length = min(
            _SEGMENT_STEPS,
            self.budget.segment_steps(
                self.net, chunk.steps, lambda n: chunk[0:n], entering, self.objective
            ),
        )
        checkpointed = CheckpointedPass(
            self.net,
            schedule.pieces(chunk.steps, length),
            lambda start, stop: chunk[start:stop],
            entering,
            gates={step: CreditGate(watch=partial(record, norms[step])) for step in steps},
        )
        loss_pass = LossPass.run(
            checkpointed, (chunk[a:b] for a, b in pairwise(checkpointed.bounds)), self.objective
        )
        credit = CreditFlow(GradientAccumulator({}))
        adjoint: Cotangents | None = None
        for segment in checkpointed.backward():
            losses = list(loss_pass.losses(segment, self.objective).values())
            self.loss += sum(loss.item() for loss in losses) * count
            credit.through(segment, [(loss, None) for loss in losses], retain=True)
            active = False
            adjoint = self._grow(segment, adjoint, generator)
            active = True
            del losses, segment
        return norms * count

    def _grow(
        self, segment: Segment, adjoint: Cotangents | None, generator: torch.Generator
    ) -> Cotangents | None:
        """Propagate an adjoint of norm one through a segment, and record the growth of each lane.

        A lane whose adjoint has vanished gets a new random one.
        """
        leaves = trees.tensors(segment.after)
        random = [
            (
                torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype, device="cpu").to(
                    leaf.device
                )
                if leaf.requires_grad
                else None
            )
            for leaf in leaves
        ]
        first = adjoint is None
        adjoint = random if adjoint is None else _replace_vanished(adjoint, random)
        norms = lane_norms(adjoint)
        if norms is None:
            return None
        after_grads = vjp(segment, [], [], scale_lanes(adjoint, 1 / norms)).state
        after = lane_norms(after_grads)
        if after is None:
            return None
        whole = ~segment.chunk.resets.any(dim=0) & (after > 0)
        # the first segment turns a random direction into the leading one
        if not first or segment.index == 0:
            self.growth.append((after.log() / segment.chunk.steps)[whole].double().cpu())
        return after_grads

    def _add_norms(self, norms: Tensor, anchors: Sequence[Anchor]) -> None:
        """Add norms by step of the window to the sums by lag."""
        lags = torch.tensor(self.lags, device="cpu")
        for lane, step, oldest in anchors:
            steps = step + 1 - lags
            inside = steps >= oldest
            leaves = norms[steps[inside], :, lane].T
            self.sums[0, inside] += leaves.square().sum(0).sqrt()
            self.sums[1:, inside] += leaves
            self.counts[inside] += 1

    def _add_contexts(self, drawn: AnchorSet, most: int) -> None:
        """Add the losses at the anchors, from 1, 2, 4, ... steps of context, at most `most`."""
        for steps in [1 << k for k in range(min(most, self.lags[-1]).bit_length())]:
            chunk = drawn.context(steps)
            with torch.no_grad():
                y, _ = self.net(
                    chunk.inputs,
                    trees.detach(self.net.initial_state(chunk.lanes, like=chunk.inputs)),
                    chunk.resets,
                )
                loss = self.objective.loss(y, chunk).item()
            self.contexts[steps] = self.contexts.get(steps, 0.0) + loss * len(drawn.anchors)

    def summary(self) -> Reach:
        """The means over all anchors."""
        count = int((self.counts > 0).sum())
        if not count:
            raise DataError(
                "none of the losses drawn has a past: each is at the first step of its recording"
            )
        means = (self.sums[:, :count] / self.counts[:count]).tolist()
        lags = tuple(self.lags[:count])
        growth = torch.cat(self.growth) if self.growth else torch.zeros(0, device="cpu")
        contexts = {steps: loss / self.anchors for steps, loss in sorted(self.contexts.items())}
        loss, short = self.loss / self.anchors, contexts[1]
        return Reach(
            lags,
            tuple(means[0]),
            {name: tuple(row) for name, row in zip(self.names, means[1:], strict=True)},
            self.anchors,
            tuple(int(n) for n in self.counts[:count]),
            {share: within(lags, means[0], share) for share in SHARES},
            _decay(lags, means[0]),
            growth.mean().item() if len(growth) else -math.inf,
            loss,
            contexts,
            loss < short - 0.01 * abs(short),
        )


def _replace_vanished(adjoint: Cotangents, random: Cotangents) -> Cotangents:
    """The adjoint, with new random numbers in the lanes where it has vanished."""
    norms = lane_norms(adjoint)
    if norms is None:
        return random
    present = (norms > 0) & norms.isfinite()
    pairs = zip(adjoint, random, strict=True)
    return [
        r if a is None or r is None else torch.where(present.view(-1, *[1] * (a.dim() - 1)), a, r)
        for a, r in pairs
    ]


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
