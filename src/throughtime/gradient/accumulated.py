"""Several updates of a policy as one: the mean of their gradients, each weighing what it counts.

    g = (m_1 g_1 + ... + m_n g_n) / (m_1 + ... + m_n),        m_i: what the losses of update i weigh

All of them belong to the same weights, as if the strides were played side by side by n times the
lanes; the state goes on from one to the next. To be confused neither with a longer stride, along
which credit would flow, nor with adding gradients up, which multiplies the step by n.

Cost: that of the n updates, and one more copy of the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Source
from throughtime.errors import ConfigError
from throughtime.gradient.gather import weights_of
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import Policy, Progress, Update
from throughtime.gradient.randomized import Randomized
from throughtime.gradient.schedule import whole


@dataclass(frozen=True)
class Alone:
    """A single rank, asked as several are: every stride then says what it weighs, those without a valid step too."""

    def mean(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def joined(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        del weight
        return list(tensors)

    def same(self, value: int) -> int:
        return value


@dataclass(frozen=True)
class Accumulated:
    """`updates` updates of `policy`, strides without a valid step counted, as one; fewer at the end
    of an epoch.

    Raises:
        ConfigError: less than one update, or a policy whose updates are no means over what they
            count.
    """

    policy: Policy
    updates: int

    def __post_init__(self) -> None:
        whole("accumulate", self.updates, 1)
        if isinstance(self.policy, Randomized):
            raise ConfigError(
                f"accumulate={self.updates}: the updates of tt.Randomized are unbiased as they"
                " come, and would not be when weighed by their steps. Leave out"
                " optimizer.zero_grad() between them, or take a larger mean_horizon"
            )

    def update(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        """The next updates that have a valid step; where other ranks may have one, the next."""
        weights = list(weights_of(net, objective.loss_fn).values())
        before = [weight.grad for weight in weights]
        asked = (
            objective if objective.together is not None else replace(objective, together=Alone())
        )
        mean = _Mean(weights)
        try:
            while mean.update is None or (objective.together is None and not mean.mass):
                found, progress = self._several(net, source, asked, progress, mean)
                if not found:
                    break
        finally:
            for weight, had in zip(weights, before, strict=True):
                weight.grad = had
        return mean.delivered() if mean.mass or objective.together is not None else None, progress

    def _several(
        self, net: Carried, source: Source, objective: Objective, progress: Progress, mean: "_Mean"
    ) -> tuple[int, Progress]:
        """Adds the next updates to the mean; how many there were."""
        for count in range(self.updates):
            if count and not source.remaining(
                1
            ):  # the end of an epoch is told once, and the next call must hear it
                return count, progress
            for weight in mean.weights:
                weight.grad = None
            update, progress = self.policy.update(net, source, objective, progress)
            if update is None:
                return count, progress
            mean.add(update)
        return self.updates, progress


class _Mean:
    """Gradients and losses so far, weighed; `mass` is the sum of the weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.update: Update | None = None
        self.mass, self._steps = 0.0, 0
        self._loss = torch.zeros(())
        self._sums: list[Tensor | None] = [None] * len(weights)

    def add(self, update: Update) -> None:
        mass = float(update.steps) if update.weight is None else update.weight
        self.update = update
        self._loss = update.loss * mass + self._loss.to(update.loss.device)
        self._steps += update.steps
        self.mass += mass
        for i, weight in enumerate(self.weights):
            if weight.grad is not None and mass:
                had = self._sums[i]
                self._sums[i] = weight.grad * mass if had is None else had + weight.grad * mass

    def delivered(self) -> Update | None:
        """The last update with the loss and steps of all, their mean gradient added to `.grad`."""
        if self.update is None:
            return None
        for weight, total in zip(self.weights, self._sums, strict=True):
            if total is not None:
                mine = total / self.mass
                weight.grad = mine if weight.grad is None else weight.grad + mine
        loss = self._loss / self.mass if self.mass else self._loss
        return replace(self.update, loss=loss, steps=self._steps, weight=self.mass)
