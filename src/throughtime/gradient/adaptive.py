"""Truncation whose horizon follows the measured bias.

    every so many updates:  bias(h) of horizons h on the steps ahead, against their exact gradient
    (`bias.py`) the shortest h whose bias, and that of all longer ones, is within the tolerance:
        longer than now:   taken at once
        shorter:           one step down, after it was found several times in a row

A measurement sees the memory that the net uses now, not what the task needs: on a plateau the bias
of every horizon is small. Hence the floor `min`, the slow way down, and horizons up to `max` being
tried however short the present one is.

References: C. Aicher, N. Foti and E. Fox, Adaptively truncating backpropagation through time to
control gradient bias, UAI 2019. They bound the bias by the decay of the gradient's norm; here it is
measured, which needs no assumption of decay.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Source
from throughtime.errors import ConfigError
from throughtime.gradient import schedule
from throughtime.gradient.bias import Probe
from throughtime.gradient.budget import Room
from throughtime.gradient.gather import norm, weights_of
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import Progress, Update
from throughtime.gradient.truncated import Truncated


@dataclass(eq=False)
class Adaptive:
    """`Truncated` with a horizon that grows and shrinks with the measured bias.

    It remembers its horizon from epoch to epoch: make one, and give the same to every `tt.updates`.
    A place saved by `updates.state_dict()` holds it.

    Args:
        tolerance: largest relative bias |g_h - g| / |g|; one of d costs 1 / (1 - d) times the steps
            (Aicher et al., theorem 2).
        min: shortest horizon; never less, whatever is measured.
        max: longest horizon.
        stride: steps between two updates, at most `min`; default: the horizon, as in
            `Truncated(horizon)`. A fixed short stride makes each measurement cost about horizon /
            stride backward passes.
        every: updates between two measurements.
        patience: how often in a row a shorter horizon must be found before it is taken.
        probe: steps measured on, those that come next; default: four times `max`, fewer near the
            end of an epoch.

    Raises:
        ConfigError: a setting out of range.
        DataError: the chunks come from an iterator and cannot be read ahead.

    Cost: that of `Truncated`, and for every measurement that of `tt.audit` on `probe` steps.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream({"inputs": torch.randn(5000, 3), "targets": torch.randn(5000)}, lanes=1, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> policy = tt.Adaptive(tolerance=0.5, min=20, max=160, every=50)
        >>> for update in tt.updates(net, stream, torch.nn.MSELoss(), gradient=policy):
        ...     pass
        >>> 20 <= policy.horizon <= 160
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
    horizon: int = field(init=False, repr=False)
    biases: dict[int, float] = field(init=False, repr=False, default_factory=dict[int, float])
    _shorter: int = field(init=False, repr=False, default=0)
    _since: int | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        for name, least in (("min", 1), ("max", self.min), ("every", 1), ("patience", 1)):
            schedule.whole(name, getattr(self, name), least)
        if not 0 < self.tolerance < 1:
            raise ConfigError(
                f"tolerance={self.tolerance}: expected a relative bias between 0 and 1"
            )
        if self.stride is not None:
            schedule.check(self.stride, self.min)
        if self.probe is not None:
            schedule.whole("probe", self.probe, 2 * self.min)
        self.horizon = self.min

    @property
    def horizons(self) -> list[int]:
        """The horizons there are to choose from: `min`, each next one twice as long, and `max`."""
        doubled = [self.min << k for k in range((self.max // self.min).bit_length())]
        return sorted({*(h for h in doubled if h < self.max), self.max})

    def describe(self) -> str:
        """The setting in words."""
        every = (
            "an update every horizon"
            if self.stride is None
            else f"an update every {self.stride} steps"
        )
        return (
            f"{every}, which is {self.horizon} steps now, from {self.min} to {self.max}, for a bias"
            f" of at most {self.tolerance:g}, measured every {self.every} updates"
        )

    def update(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        """The next update at the present horizon, after measuring where that is due."""
        if self._since is None or self._since >= self.every:
            self._measure(net, source, objective, progress)
        update, progress = Truncated(self.stride or self.horizon, self.horizon).update(
            net, source, objective, progress
        )
        self._since = (self._since or 0) + (update is not None)
        return update, progress

    def _measure(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> None:
        """Compares gradients on the steps ahead.

        Near the end of an epoch, where too few are left, it waits.
        """
        steps = source.remaining(self.probe or 4 * self.max)
        wanted = [h for h in self.horizons if 2 * h <= steps]
        if not wanted:
            return
        begin = source.position
        start = (
            progress.state if begin else progress.edge
        )  # at the start of an epoch the initial state, with its graph
        read = Probe(
            net,
            lambda a, b: source.read(begin + a, begin + b),
            steps,
            start,
            Objective(objective.loss_fn),
            Room("512MB", "auto", None),
        )
        exact, *truncated = self._gradients(read, wanted, objective)
        if not exact:
            return
        size = norm(exact)
        apart = [
            norm(g - e for g, e in zip(gradient, exact, strict=True)) for gradient in truncated
        ]
        self.biases = {h: a / size if size else 0.0 for h, a in zip(wanted, apart, strict=True)}
        self._since = 0
        self._choose()

    def _gradients(
        self, probe: Probe, horizons: list[int], objective: Objective
    ) -> list[list[Tensor]]:
        """The exact one and that of each horizon, of all ranks together.

        Empty where no step counts.
        """
        mass = objective.mass(probe.read(0, probe.steps))
        found: list[list[Tensor]] = []
        if mass:
            compared = probe.compare(
                [list(schedule.windows(probe.steps, self.stride or h, h)) for h in horizons]
            )
            found = [compared.exact, *compared.truncated]
        together = objective.together
        if together is None:
            return found or [[]]
        if not together.mean([mass])[0]:
            return [[]]
        weights = list(weights_of(probe.net).values())
        return [
            together.joined(g, mass)
            for g in found
            or [[torch.zeros_like(w) for w in weights] for _ in range(1 + len(horizons))]
        ]

    def _choose(self) -> None:
        """Growth at once, shrinking slowly."""
        enough = max(
            (self.horizon, *self.biases)
        )  # none that was measured is enough: the longest of them, not one nobody looked at
        for horizon in reversed(self.biases):
            if not self.biases[horizon] <= self.tolerance:
                break
            enough = horizon
        self._shorter = self._shorter + 1 if enough < self.horizon else 0
        if enough > self.horizon:
            self.horizon = enough
        elif self._shorter >= self.patience:
            self.horizon = [h for h in self.horizons if h < self.horizon][-1]
            self._shorter = 0

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt, as plain values."""
        return {"horizon": self.horizon, "shorter": self._shorter, "since": self._since}

    def load_state_dict(self, learnt: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.horizon, self._shorter, self._since = (
            learnt["horizon"],
            learnt["shorter"],
            learnt["since"],
        )
