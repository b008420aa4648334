"""Truncation whose horizon follows the measured bias.

    every so many updates:
        measure the bias(h) of horizons h on the steps ahead, against their exact gradient
        take the shortest h such that it and all longer ones are within the tolerance:
            longer than now:   at once
            shorter:           one step down, if it was the result several times in a row

A measurement covers the memory that the net uses now, not what the task needs: on a plateau the
bias of every horizon is small. Hence the floor `min`, the slow way down, and that all horizons up
to `max` are measured however short the present one is. `_bias.py` computes the gradients.

References: C. Aicher, N. Foti and E. Fox, Adaptively truncating backpropagation through time to
control gradient bias, UAI 2019. They bound the bias by the decay of the gradient's norm; here it is
measured, which needs no assumption of decay.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Source
from throughtime.errors import ConfigError, counted
from throughtime.gradient import schedule
from throughtime.gradient._backward import norm
from throughtime.gradient._bias import BiasProbe
from throughtime.gradient._memory import MemoryBudget
from throughtime.gradient.objective import Objective, trainable_weights
from throughtime.gradient.policy import Update
from throughtime.gradient.truncated import Truncated, TruncatedState
from throughtime.state import State


@dataclass(frozen=True, eq=False)
class AdaptiveState:
    """Between two updates of `Adaptive`.

    Attributes:
        window: that of the truncation.
        horizon: the present one.
        biases: of each horizon in the last measurement.
        shorter: how often in a row a shorter horizon was enough.
        since_measured: updates since the last measurement; `None` before the first.
    """

    window: TruncatedState
    horizon: int
    biases: dict[int, float] = field(default_factory=dict[int, float])
    shorter: int = 0
    since_measured: int | None = None

    @property
    def carried(self) -> State:
        """The net's state after the last step taken."""
        return self.window.carried


@dataclass(frozen=True)
class Adaptive:
    """`Truncated` with a horizon that grows and shrinks with the measured bias.

    The present horizon and the measured biases are in `updates.policy_state`. Pass it on to the
    next epoch, `tt.updates(..., policy_state=updates.policy_state)`, or that epoch starts again
    from the shortest horizon. A checkpoint contains it.

    Args:
        tolerance: largest relative bias `|g_h - g| / |g|`; one of d costs 1 / (1 - d) times the
            steps (Aicher et al., theorem 2).
        min: shortest horizon; never less, whatever is measured.
        max: longest horizon.
        stride: steps between two updates, at most `min`; default: the horizon, as in
            `Truncated(horizon)`. A fixed short stride makes each measurement cost about horizon /
            stride backward passes.
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
        >>> 20 <= updates.policy_state.horizon <= 160
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
        for name, least in (("min", 1), ("max", self.min), ("every", 1), ("patience", 1)):
            schedule.check_whole(name, getattr(self, name), least)
        if not 0 < self.tolerance < 1:
            raise ConfigError(
                f"tolerance={self.tolerance}: expected a relative bias between 0 and 1"
            )
        if self.stride is not None:
            schedule.check_horizon(self.stride, self.min)
        if self.probe is not None:
            schedule.check_whole("probe", self.probe, 2 * self.min)

    @property
    def horizons(self) -> list[int]:
        """The horizons to choose from: `min`, each next one twice as long, and `max`."""
        doubled = [self.min << k for k in range((self.max // self.min).bit_length())]
        return sorted({*(h for h in doubled if h < self.max), self.max})

    def describe(self) -> str:
        """The setting in words."""
        stride = "horizon" if self.stride is None else counted(self.stride, "step")
        return (
            f"an update every {stride}, a horizon from {self.min} to {counted(self.max, 'step')},"
            f" for a bias of at most {self.tolerance:g}, measured every"
            f" {counted(self.every, 'update')}"
        )

    def init(self, carried: State, previous: AdaptiveState | None) -> AdaptiveState:
        """The state before the first update of an epoch, with the horizon of the last one."""
        window = TruncatedState(carried, carried)
        if previous is None:
            return AdaptiveState(window, self.min)
        return replace(previous, window=window)

    def state_dict(self, state: AdaptiveState) -> dict[str, Any]:
        """The state as plain values and state trees."""
        return {
            **self._truncated(state.horizon).state_dict(state.window),
            "horizon": state.horizon,
            "biases": dict(state.biases),
            "shorter": state.shorter,
            "since_measured": state.since_measured,
        }

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> AdaptiveState:
        """The state that `state_dict` saved."""
        return AdaptiveState(
            self._truncated(values["horizon"]).load_state_dict(values, source),
            values["horizon"],
            {int(horizon): bias for horizon, bias in values["biases"].items()},
            values["shorter"],
            values["since_measured"],
        )

    def _truncated(self, horizon: int) -> Truncated:
        return Truncated(self.stride or horizon, horizon)

    def update(
        self, net: Carried, source: Source, objective: Objective, state: AdaptiveState
    ) -> tuple[Update | None, AdaptiveState]:
        """The next update at the present horizon, after a measurement if one is due."""
        if state.since_measured is None or state.since_measured >= self.every:
            state = self._measure(net, source, objective, state)
        truncated = self._truncated(state.horizon)
        update, window = truncated.update(net, source, objective, state.window)
        since = (state.since_measured or 0) + (update is not None)
        return update, replace(state, window=window, since_measured=since)

    def _measure(
        self, net: Carried, source: Source, objective: Objective, state: AdaptiveState
    ) -> AdaptiveState:
        """Compare gradients on the steps ahead; wait if too few are left in the epoch."""
        steps = source.remaining(self.probe or 4 * self.max)
        horizons = [h for h in self.horizons if 2 * h <= steps]
        if not horizons:
            return state
        begin = source.position
        probe = BiasProbe(
            net,
            lambda a, b: source.read(begin + a, begin + b),
            steps,
            state.carried,
            Objective(objective.loss_fn),
            MemoryBudget("512MB", "auto", None),
        )
        exact, *truncated = self._gradients(probe, horizons, objective)
        if not exact:
            return state
        size = norm(exact)
        errors = [norm(g - e for g, e in zip(grads, exact, strict=True)) for grads in truncated]
        biases = {h: e / size if size else 0.0 for h, e in zip(horizons, errors, strict=True)}
        horizon, shorter = self._choose(state, biases)
        return AdaptiveState(state.window, horizon, biases, shorter, 0)

    def _gradients(
        self, probe: BiasProbe, horizons: list[int], objective: Objective
    ) -> list[list[Tensor]]:
        """The exact gradient and that of each horizon, of all ranks together.

        Empty where no step counts.
        """
        weight = objective.loss_weight(probe.read(0, probe.steps))
        gradients: list[list[Tensor]] = []
        if weight:
            comparison = probe.compare(
                [list(schedule.windows(probe.steps, self.stride or h, h)) for h in horizons]
            )
            gradients = [comparison.exact, *comparison.truncated]
        reducer = objective.reducer
        if reducer is None:
            return gradients or [[]]
        if not reducer.mean([weight])[0]:
            return [[]]
        weights = list(trainable_weights(probe.net).values())
        zeros = [[torch.zeros_like(w) for w in weights] for _ in range(1 + len(horizons))]
        return [reducer.weighted_mean(grads, weight) for grads in gradients or zeros]

    def _choose(self, state: AdaptiveState, biases: dict[int, float]) -> tuple[int, int]:
        """The next horizon, and how often in a row a shorter one was enough."""
        # if none that was measured is enough: the longest of them
        enough = max((state.horizon, *biases))
        for horizon in reversed(biases):
            if not biases[horizon] <= self.tolerance:
                break
            enough = horizon
        shorter = state.shorter + 1 if enough < state.horizon else 0
        if enough > state.horizon:
            return enough, shorter
        if shorter >= self.patience:
            return [h for h in self.horizons if h < state.horizon][-1], 0
        return state.horizon, shorter
