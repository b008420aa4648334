"""Unbiased truncation at random places (ARTBP).

    a_t = dl_t/ds_t + [no cut after t] / (1 - c_t) * J' a_{t+1},      c_t the chance of a cut after
    step t

Credit that is not cut is scaled up for what was cut elsewhere, so that the sum over an
epoch has the exact gradient as its mean, at fixed weights, for any chances c_t < 1. The chances
make a stretch without a cut longer than l with probability S(l) = (1 + l/s)^-alpha. This law is
polynomial, not geometric: its weights 1/S(l) grow slower than any exponential decay of the credit
they multiply, so the variance stays finite however long the memory.

An update at every cut: the sum of the losses since the last one, over the mean number of steps
between cuts (of all lanes). It is not divided by its own number of steps, since an update of a
short stretch must not count as much as one of a long stretch. Where few steps count, gradients are
smaller accordingly. Not to be confused with `Truncated(jitter=True)`, which moves the cuts and
stays biased, nor with random horizons without weights, which are biased as well.

References: C. Tallec and Y. Ollivier, Unbiasing truncated backpropagation through time (2017).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError, counted
from throughtime.gradient import schedule
from throughtime.gradient._backward import AdjointRecorder, LossPass
from throughtime.gradient._memory import MemoryBudget
from throughtime.gradient._segments import CheckpointedPass, CreditGate
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import (
    AdjointStats,
    CarriedState,
    MemorylessPolicy,
    Update,
    empty_update,
)
from throughtime.state import State


@dataclass(frozen=True)
class Survival:
    """The chance S(l) = (1 + l / scale)^-alpha that a stretch is longer than l steps.

    Cuts are possible every `grain` steps.
    """

    scale: float
    alpha: float
    grain: int

    @classmethod
    @lru_cache
    def with_mean(cls, mean: float, alpha: float, grain: int) -> "Survival":
        """The law whose stretches are `mean` steps long on average, by bisection."""
        low, high = 1e-9 * grain, alpha * mean
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, alpha, grain).mean() < mean else (low, middle)
        return cls(high, alpha, grain)

    def __call__(self, steps: float) -> float:
        return (1 + steps / self.scale) ** -self.alpha

    def mean(self) -> float:
        """Mean length: the sum of S over all possible cuts, its tail by Euler-Maclaurin."""
        far = 4096
        rest = (
            self.scale / (self.alpha - 1) * (1 + far * self.grain / self.scale) ** (1 - self.alpha)
        )
        return (
            self.grain
            * (sum(self(k * self.grain) for k in range(far)) + self(far * self.grain) / 2)
            + rest
        )

    def draw(self) -> int:
        """A length, from torch's generator."""
        chance = 1 - torch.rand((), dtype=torch.float64, device="cpu").item()  # in (0, 1]
        return self.grain * (1 + int(self.scale * (chance ** (-1 / self.alpha) - 1) / self.grain))


@dataclass(frozen=True)
class Randomized(MemorylessPolicy):
    """Truncation at random steps with an unbiased gradient: weights compensate the cuts.

    Use it for streams without an end, or where updates must be frequent and bias is worse than
    noise. Where a recording has an end, `Exact` has neither bias nor noise.

    Args:
        mean_horizon: mean number of steps between two cuts; an update is made at each.
        alpha: how heavy the tail is, above 1; 6 in the paper. Smaller: rarer, longer stretches and
            smaller weights.
        grain: credit may be cut every so many steps; default: a sixteenth of `mean_horizon`. The
            paper's is 1, and slower.
        memory: as for `tt.Exact`; stretches are run again chunk by chunk, so a very long one takes
            no more memory.

    Raises:
        ConfigError: a setting out of range.

    Cuts are drawn from torch's generator, for all lanes together.

    Cost: two forward passes and one backward pass per step.

    Example:
        >>> import throughtime as tt
        >>> for part in tt.Randomized(mean_horizon=100).describe().split("; "):
        ...     print(part)
        an update every 100 steps on average (every 6 steps a cut may fall), credit unbiased
        the second moment of credit over 100, 400, 1600 steps grows up to 3.08, 37, 6.32e+03 times

    References: Tallec & Ollivier (2017).
    """

    mean_horizon: int
    alpha: float = 6.0
    grain: int | None = None
    memory: str | int | float = "512MB"

    def __post_init__(self) -> None:
        schedule.check_whole("mean_horizon", self.mean_horizon, 1)
        schedule.check_whole("grain", self._grain, 1)
        schedule.bytes_in(self.memory)
        if not (self.alpha > 1 and math.isfinite(self.alpha)):
            raise ConfigError(
                f"alpha={self.alpha}: expected a number above 1; with 1 or less the mean stretch"
                " has no end"
            )
        if self._grain > self.mean_horizon:
            raise ConfigError(
                f"grain={self.grain} is above mean_horizon={self.mean_horizon}: a stretch has at"
                " least one grain"
            )

    @property
    def _grain(self) -> int:
        return max(1, self.mean_horizon // 16) if self.grain is None else self.grain

    @property
    def _survival(self) -> Survival:
        return Survival.with_mean(self.mean_horizon, self.alpha, self._grain)

    def inflation(self, lag: int) -> float:
        """The growth of the second moment of credit over `lag` steps, at most: 1 / S(lag)."""
        return 1 / self._survival(lag)

    def describe(self) -> str:
        """The setting in words, with the predicted growth of the variance."""
        lags = [self.mean_horizon * k for k in (1, 4, 16)]
        grows = ", ".join(f"{self.inflation(lag):.3g}" for lag in lags)
        return (
            f"an update every {counted(self.mean_horizon, 'step')} on average (every"
            f" {counted(self._grain, 'step')} a cut may fall), credit unbiased; the second moment"
            f" of credit over {', '.join(map(str, lags))} steps grows up to {grows} times"
        )

    def update(
        self, net: Carried, source: Source, objective: Objective, state: CarriedState
    ) -> tuple[Update | None, CarriedState]:
        """The update of the next stretch with a valid step."""
        while (chunk := source.take(objective.same_on_ranks(self._survival.draw()))) is not None:
            begin = source.position - chunk.steps
            update, state = self._update_stretch(net, chunk, begin, objective, state.carried)
            if update is not None:
                return update, state
        return None, state

    def _update_stretch(
        self, net: Carried, chunk: Chunk, begin: int, objective: Objective, carried: State
    ) -> tuple[Update | None, CarriedState]:
        budget = MemoryBudget(self.memory, "auto", None)
        gates = self._gates(chunk.steps)
        length = budget.segment_steps(
            net, chunk.steps, lambda n: chunk[0:n], carried, objective, gates=len(gates)
        )
        bounds = schedule.pieces(chunk.steps, length)
        checkpoints = CheckpointedPass(net, bounds, lambda a, b: chunk[a:b], carried, gates=gates)
        chunks = (chunk[a:b] for a, b in pairwise(bounds))
        loss_pass = LossPass.run(checkpoints, chunks, objective)
        after, outputs, last = checkpoints.state, loss_pass.outputs, loss_pass.chunk
        loss_weight = objective.mean(loss_pass.loss_weight)
        if not loss_pass.valid_steps:
            return empty_update(objective, last, after, outputs), CarriedState(after)
        recorder = AdjointRecorder(None, objective.scale(outputs), last)
        scale = loss_weight / (self.mean_horizon * chunk.lanes)
        loss = loss_pass.backward(objective, recorder, begin, scale)
        stats = AdjointStats(length, recorder.adjoints)
        weight = loss_pass.loss_weight
        update = Update(loss, loss_pass.valid_steps, after, outputs, last, stats, weight)
        return update, CarriedState(after)

    def _gates(self, steps: int) -> dict[int, CreditGate]:
        """Gates at the possible cuts: credit that passes is scaled up by the chance of a cut."""
        survival, grain = self._survival, self._grain
        return {
            step: CreditGate(survival(step - grain) / survival(step))
            for step in range(grain, steps, grain)
        }
