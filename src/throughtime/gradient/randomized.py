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
from typing import Any

import torch

from throughtime.chunk import Source
from throughtime.errors import ConfigError, counted
from throughtime.gradient.window import Credit, Probe, Progress, Window, set_whole


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
        """Mean length: the sum of S over all possible cuts, a Hurwitz zeta function."""
        sizes = [self.scale / self.grain, self.alpha]
        cuts, alpha = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        return self.grain * (torch.special.zeta(alpha, cuts) * cuts**alpha).item()

    def draw(self) -> int:
        """A length, from torch's generator."""
        chance = 1 - torch.rand((), dtype=torch.float64, device="cpu").item()  # in (0, 1]
        return self.grain * (1 + int(self.scale * (chance ** (-1 / self.alpha) - 1) / self.grain))


@dataclass(frozen=True)
class Randomized:
    """Truncation at random steps with an unbiased gradient: weights compensate the cuts.

    Use it for streams without an end, or where updates must be frequent and bias is worse than
    noise. Where a recording has an end, `Exact` has neither bias nor noise.

    Args:
        mean_horizon: mean number of steps between two cuts; an update is made at each.
        alpha: how heavy the tail is, above 1; 6 in the paper. Smaller: rarer, longer stretches and
            smaller weights.
        grain: credit may be cut every so many steps; default: a sixteenth of `mean_horizon`. The
            paper's is 1, and slower. Segments are as long, so a very long stretch takes no more
            memory.

    Raises:
        ConfigError: a setting out of range.

    Cuts are drawn from torch's generator, for all lanes together.

    Cost: two forward passes and one backward pass per step.

    Example:
        >>> import throughtime as tt
        >>> for part in tt.Randomized(mean_horizon=100).describe().split("; "):
        ...     print(part)
        an update every 100 steps on average (every 6 steps a cut may fall), credit unbiased
        the second moment of credit over 1600 steps grows up to 6.32e+03 times

    References: Tallec & Ollivier (2017).
    """

    mean_horizon: int
    alpha: float = 6.0
    grain: int | None = None

    def __post_init__(self) -> None:
        set_whole(self, mean_horizon=1, grain=1)
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
        lag = 16 * self.mean_horizon
        return (
            f"an update every {counted(self.mean_horizon, 'step')} on average (every"
            f" {counted(self._grain, 'step')} a cut may fall), credit unbiased; the second moment"
            f" of credit over {lag} steps grows up to {self.inflation(lag):.3g} times"
        )

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        """The window up to the next cut."""
        del probe
        survival, grain, begin = self._survival, self._grain, at.step
        steps = source.remaining(survival.draw())
        if not steps:
            return None, at.memory

        def gate(step: int, credit: Credit) -> Credit:
            """Scale up the credit that passes a possible cut, by the chance of a cut there."""
            factor = survival(step - begin - grain) / survival(step - begin)
            return [leaf if leaf is None else leaf * factor for leaf in credit]

        stop = begin + steps
        return Window(begin, begin, begin, stop, stop, grain, gate, self.mean_horizon), at.memory
