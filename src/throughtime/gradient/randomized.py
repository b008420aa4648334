"""Unbiased truncation at random places (ARTBP).

    a_t = dl_t/ds_t + [no cut after t] / (1 - c_t) * J' a_{t+1},      c_t the chance of a cut after
    step t

Credit that comes through uncut is made larger by what was cut elsewhere, so that the sum over an
epoch has the exact gradient as its mean, at fixed weights, for any chances c_t < 1. They are chosen
so that a stretch without a cut is longer than l with probability S(l) = (1 + l/s)^-alpha: a
polynomial, not a geometric, law, whose weights 1/S(l) grow slower than any exponential decay of the
credit they multiply, so that the variance stays finite however long the memory.

An update at every cut: the sum of the losses since the last one, over the mean number of steps
between cuts (of all lanes) and not over its own, for an update of a short stretch must not count as
much as one of a long stretch. Where few steps count, gradients are smaller accordingly. To be
confused neither with `Truncated(jitter=True)`, which moves the cuts and stays biased, nor with
random horizons without weights, which are biased as well.

References: C. Tallec and Y. Ollivier, Unbiasing truncated backpropagation through time (2017).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError
from throughtime.gradient import schedule
from throughtime.gradient.budget import Room
from throughtime.gradient.exact import Clip
from throughtime.gradient.gate import Gate
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import Progress, Update, nothing
from throughtime.gradient.stretch import Stretch
from throughtime.gradient.sweep import Sweep


@dataclass(frozen=True)
class Survival:
    """The chance S(l) = (1 + l / scale)^-alpha that a stretch is longer than l steps, where cuts fall every `grain` steps."""

    scale: float
    alpha: float
    grain: int

    @classmethod
    @lru_cache
    def of_mean(cls, mean: float, alpha: float, grain: int) -> "Survival":
        """The one whose stretches are `mean` steps long on average, found by halving."""
        low, high = 1e-9 * grain, alpha * mean
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if cls(middle, alpha, grain).mean() < mean else (low, middle)
        return cls(high, alpha, grain)

    def __call__(self, steps: float) -> float:
        return (1 + steps / self.scale) ** -self.alpha

    def mean(self) -> float:
        """Mean length: the sum of S over all places where a cut may fall.

        Far out, by Euler's and Maclaurin's formula.
        """
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
        chance = 1 - torch.rand((), dtype=torch.float64).item()  # in (0, 1]
        return self.grain * (1 + int(self.scale * (chance ** (-1 / self.alpha) - 1) / self.grain))


@dataclass(frozen=True)
class Randomized:
    """Truncation at random places, the gradient unbiased: weights make up for what is cut.

    Use it for streams without an end, or where an update must come often and bias is worse than
    noise. Where a recording has an end, `Exact` has no bias and no noise.

    Args:
        mean_horizon: mean number of steps between two cuts; an update is made at each.
        alpha: how heavy the tail is, above 1; 6 in the paper. Smaller: rarer, longer stretches and
            smaller weights.
        grain: credit may be cut every so many steps; default: a sixteenth of `mean_horizon`. The
            paper's is 1, and slower.
        memory: see `tt.Exact`; stretches are run again chunk by chunk, so a very long one takes no
            more memory.

    Raises:
        ConfigError: a setting out of range.

    Cuts are drawn from torch's generator, for all lanes together.

    Cost: two forward passes and one backward pass per step.

    Example:
        >>> import throughtime as tt
        >>> print(tt.Randomized(mean_horizon=100).describe())
        an update every 100 steps on average (every 6 steps a cut may fall), credit unbiased; the
        second moment of credit over 100, \
400, 1600 steps grows up to 3.08, 37, 6.32e+03 times

    References: Tallec & Ollivier (2017).
    """

    mean_horizon: int
    alpha: float = 6.0
    grain: int | None = None
    memory: str | int | float = "512MB"

    def __post_init__(self) -> None:
        schedule.whole("mean_horizon", self.mean_horizon, 1)
        schedule.whole("grain", self._grain, 1)
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
        return Survival.of_mean(self.mean_horizon, self.alpha, self._grain)

    def inflation(self, lag: int) -> float:
        """How much larger the second moment of credit over `lag` steps may be than that of exact credit: 1 / S(lag)."""
        return 1 / self._survival(lag)

    def describe(self) -> str:
        """The setting in words, with the predicted growth of the variance."""
        lags = [self.mean_horizon * k for k in (1, 4, 16)]
        grows = ", ".join(f"{self.inflation(lag):.3g}" for lag in lags)
        return (
            f"an update every {self.mean_horizon} steps on average (every {self._grain} steps a cut"
            " may fall), credit unbiased; the second moment of credit over"
            f" {', '.join(map(str, lags))} steps grows up to {grows} times"
        )

    def update(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        """The next stretch that has a valid step."""
        while (chunk := source.take(objective.alike(self._survival.draw()))) is not None:
            update, progress = self._stretch(
                net, chunk, source.position - chunk.steps, objective, progress
            )
            if update is not None:
                return update, progress
        return None, progress

    def _stretch(
        self, net: Carried, chunk: Chunk, begin: int, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        room = Room(self.memory, "auto", None)
        length = room.length(
            net, chunk.steps, lambda wanted: chunk[0:wanted], progress.state, objective
        )
        bounds = schedule.pieces(chunk.steps, length)
        sweep = Sweep(
            net,
            bounds,
            lambda start, stop: chunk[start:stop],
            progress.edge,
            gates=self._gates(chunk.steps),
        )
        stretch = Stretch.played(sweep, (chunk[a:b] for a, b in pairwise(bounds)), objective)
        after = Progress(sweep.state, sweep.state)
        mass = objective.mean(stretch.mass)
        if not stretch.valid:
            return nothing(objective, stretch.chunk, after.state, stretch.outputs), after
        clip = Clip(None, objective.scale(stretch.outputs), stretch.chunk)
        loss = stretch.descend(
            objective, clip, begin, weight=mass / (self.mean_horizon * chunk.lanes)
        )
        swept = clip.adjoint_stats(length)
        return (
            Update(
                loss,
                stretch.valid,
                after.state,
                stretch.outputs,
                stretch.chunk,
                swept,
                stretch.mass,
            ),
            after,
        )

    def _gates(self, steps: int) -> dict[int, Gate]:
        """Where no cut fell, credit weighs as much more as a cut there was likely."""
        survival, grain = self._survival, self._grain
        return {at: Gate(survival(at - grain) / survival(at)) for at in range(grain, steps, grain)}
