"""Truncated backpropagation through time, Williams & Peng's BPTT(h; h'), and its adaptive form.

    every h' steps:  g = d/dw  (1/N) * sum of the losses of the newest h' steps,
                     the state h steps ago taken as a constant

h' is `stride` (k1), h is `horizon` (k2). Each loss is counted once. Its credit flows back between
`horizon - stride + 1` and `horizon` steps. With `horizon == stride` this is the usual TBPTT(k, k),
in which the credit of the first loss of every chunk flows back one step. Not to be confused with
counting every loss of the window, which multiplies the gradient by about h/h', nor with counting
the last loss only.

The window is run again under the current weights, so all of it belongs to the same model. A shorter
last stride of an epoch looks back as far as any other, unless `horizon == stride`, where no step is
run twice. Cost per step: h/h' forward and backward passes; memory for the graph of one window.

`Adaptive` takes the horizon from the measured bias:

    every so many updates:
        measure the bias(h) of horizons h on the steps ahead, against their exact gradient
        take the shortest h such that it and all longer ones are within the tolerance:
            longer than now:   at once
            shorter:           one step down, if it was the result several times in a row

A measurement covers the memory that the net uses now, not what the task needs: on a plateau the
bias of every horizon is small. Hence the floor `min`, the slow way down, and that all horizons up
to `max` are measured however short the present one is.

References: R. J. Williams and J. Peng, An efficient gradient-based algorithm for on-line training
of recurrent network trajectories, Neural Computation 2 (1990). C. Aicher, N. Foti and E. Fox,
Adaptively truncating backpropagation through time to control gradient bias, UAI 2019: they bound
the bias by the decay of the gradient's norm; here it is measured, which assumes no decay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from throughtime.chunk import Source
from throughtime.errors import ConfigError, counted
from throughtime.gradient.exact import Exact
from throughtime.gradient.window import (
    Probe,
    Progress,
    Window,
    check_horizon,
    set_whole,
)


@dataclass(frozen=True)
class Truncated:
    """Every `stride` steps, back through the last `horizon`; each loss counted once.

    Args:
        stride: steps between two updates (k1).
        horizon: steps that credit may flow back (k2), at least `stride`, not only multiples of it;
            default `stride`.
        jitter: begin every epoch with a stride of random length (from torch's generator). Strides
            then end at other steps in each epoch, and no step always has a credit of one step.
        burn_in: steps before the window that are run again under the new weights, without a graph,
            so that the state entering the window is less stale.

    Raises:
        ConfigError: a stride below 1, a horizon below the stride, or a negative `burn_in`.

    Cost: `horizon / stride` forward and backward passes per step, and `burn_in / stride` forward
    passes.

    Example:
        >>> import throughtime as tt
        >>> tt.Truncated(stride=100, horizon=400).describe()
        'an update every 100 steps, gradients flow back 301 to 400 steps (350.5 on average)'

    References: Williams & Peng, Neural Computation 2 (1990).
    """

    stride: int
    horizon: int | None = None
    jitter: bool = False
    burn_in: int = 0

    def __post_init__(self) -> None:
        set_whole(self, stride=1, horizon=1, burn_in=0)
        check_horizon(self.stride, self.horizon or self.stride)

    def describe(self) -> str:
        """The setting in words: guaranteed and mean horizon."""
        most = self.horizon or self.stride
        least = most - self.stride + 1
        text = (
            f"an update every {counted(self.stride, 'step')}, gradients flow back {least} to"
            f" {counted(most, 'step')} ({(least + most) / 2:g} on average)"
        )
        if self.jitter:
            text += ", the first stride of an epoch of random length"
        if self.burn_in:
            text += f", the {counted(self.burn_in, 'step')} before run again under the new weights"
        return text

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        """The window of the next stride."""
        del probe
        stride, horizon = self.stride, self.horizon or self.stride
        if self.jitter and not at.step:
            stride = int(torch.randint(1, stride + 1, (), device="cpu"))
        lead, step, memory = at.lead, at.step, at.memory
        steps = source.remaining(stride)
        if not steps:
            return None, memory
        stop, start, back = step + steps, step, 0
        # a last window shorter than the stride reaches back as far as any other
        if horizon > self.stride:  # else chunks from an iterator are not read ahead
            start = max(lead, stop - horizon)
            back = horizon - (source.remaining(steps + self.stride) - steps)
        keep = min(stop, max(lead, stop - back - self.burn_in))
        return Window(lead, start, step, stop, keep), memory


_init = Truncated.__init__


@wraps(_init)
def _own_names(self: Truncated, *settings: Any, **named: Any) -> None:
    names = {"k1": "stride", "k2": "horizon"}
    if names.keys() & named.keys():
        line = ", ".join(f"{names.get(name, name)}={value}" for name, value in named.items())
        raise ConfigError(f"k1 is the stride, k2 the horizon: write tt.Truncated({line})")
    _init(self, *settings, **named)


Truncated.__init__ = _own_names


@dataclass(frozen=True)
class Adaptive:
    """`Truncated` with a horizon that grows and shrinks with the measured bias.

    `updates.policy_state` holds the present `horizon`, the `biases` `(horizon, bias)` of the last
    measurement, and more. Pass it on to the next epoch, `tt.updates(...,
    policy_state=updates.policy_state)`, or that epoch starts again from the shortest horizon. A
    checkpoint contains it.

    Args:
        tolerance: largest relative bias `|g_h - g| / |g|`; one of d costs 1 / (1 - d) times the
            steps (Aicher et al., theorem 2).
        min: shortest horizon; never less, whatever is measured.
        max: longest horizon.
        stride: steps between two updates, at most `min`; default: the horizon, as in
            `Truncated(horizon)`. A fixed short stride makes each measurement cost about horizon /
            stride passes.
        every: updates between two measurements.
        patience: how often in a row a shorter horizon must be enough before it is taken.
        probe: steps measured on, those that come next; default: four times `max`, fewer near the
            end of an epoch.

    Raises:
        ConfigError: a setting out of range.
        DataError: the chunks come from an iterator and cannot be read ahead.

    Cost: that of `Truncated`, and for every measurement that of `tt.audit` on `probe` steps.

    Example:
        >>> import torch, throughtime as tt
        >>> recording = {"inputs": torch.randn(2000, 3), "targets": torch.randn(2000)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> policy = tt.Adaptive(tolerance=0.5, min=20, max=160, every=20)
        >>> updates = tt.updates(net, stream, torch.nn.MSELoss(), gradient=policy)
        >>> for update in updates:
        ...     pass
        >>> 20 <= updates.policy_state["horizon"] <= 160
        True

    References: Aicher, Foti & Fox, UAI 2019.
    """

    tolerance: float
    min: int
    max: int
    stride: int | None = None
    every: int = 100
    patience: int = 3
    probe: int | None = None

    def __post_init__(self) -> None:
        set_whole(self, min=1, stride=1, every=1, patience=1)
        set_whole(self, max=self.min, probe=2 * self.min)
        if not 0 < self.tolerance < 1:
            raise ConfigError(
                f"tolerance={self.tolerance}: expected a relative bias between 0 and 1"
            )
        if self.stride is not None:
            check_horizon(self.stride, self.min)

    @property
    def horizons(self) -> list[int]:
        """The horizons to choose from: `min`, each next one twice as long, and `max`."""
        doubled = [self.min << k for k in range((self.max // self.min).bit_length())]
        return sorted({*(h for h in doubled if h < self.max), self.max})

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        """The window at the present horizon, after a measurement if one is due."""
        memory: dict[str, Any] = at.memory or {
            "horizon": self.min,
            "biases": [],
            "shorter": 0,
            "since": self.every,
        }
        if memory["since"] >= self.every:
            memory = self._measure(source, probe, memory)
        plan, _ = self._truncated(memory["horizon"]).plan(source, at, probe)
        return plan, {**memory, "since": memory["since"] + (plan is not None)}

    def _truncated(self, horizon: int) -> Truncated:
        return Truncated(self.stride or horizon, horizon)

    def _measure(self, source: Source, probe: Probe, memory: dict[str, Any]) -> dict[str, Any]:
        """Compare gradients on the steps ahead; wait if too few are left in the epoch."""
        steps = source.remaining(self.probe or 4 * self.max)
        horizons = [h for h in self.horizons if 2 * h <= steps]
        if not horizons:
            return memory
        exact = probe(Exact(cut_every=steps), steps)
        if not exact:
            return memory
        biases = [(h, bias(probe(self._truncated(h), steps), exact)) for h in horizons]
        horizon, shorter = self._choose(memory, biases)
        return {"horizon": horizon, "biases": biases, "shorter": shorter, "since": 0}

    def _choose(
        self, memory: dict[str, Any], biases: Sequence[tuple[int, float]]
    ) -> tuple[int, int]:
        """The next horizon, and how often in a row a shorter one was enough."""
        now: int = memory["horizon"]
        # if none that was measured is enough: the longest of them
        enough = max((now, *(horizon for horizon, _ in biases)))
        for horizon, measured in reversed(biases):
            if not measured <= self.tolerance:
                break
            enough = horizon
        shorter = memory["shorter"] + 1 if enough < now else 0
        if enough > now:
            return enough, shorter
        if shorter >= self.patience:
            return [h for h in self.horizons if h < now][-1], 0
        return now, shorter


def bias(gradient: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The relative bias |g - e| / |e| of a gradient; 0 where the exact one is 0."""
    size = norm(exact)
    return norm([g - e for g, e in zip(gradient, exact, strict=True)]) / size if size else 0.0


def norm(tensors: Sequence[Tensor]) -> float:
    """The norm of all of them together, in double precision."""
    return math.sqrt(sum(t.abs().square().sum(dtype=torch.float64).item() for t in tensors))
