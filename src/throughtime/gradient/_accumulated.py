"""Several updates of a policy as one: the mean of their gradients, weighted by what they count.

    g = (m_1 g_1 + ... + m_n g_n) / (m_1 + ... + m_n),        m_i: the loss weight of update i

All of them belong to the same weights, as if the strides were played side by side in n times the
lanes; the state is carried from one to the next. Not to be confused with a longer stride, along
which credit would flow, nor with adding gradients up, which multiplies the step by n.

Cost: that of the n updates, and one more copy of the gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Source
from throughtime.errors import ConfigError
from throughtime.gradient.objective import Objective, trainable_weights
from throughtime.gradient.policy import Policy, S, Update, check_result
from throughtime.gradient.randomized import Randomized
from throughtime.gradient.schedule import check_whole
from throughtime.state import State


@dataclass(frozen=True)
class _SingleRank:
    """The reductions of a single rank: with a reducer, an empty stride is an update of weight 0."""

    def mean(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def weighted_mean(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        del weight
        return list(tensors)

    def broadcast(self, value: int) -> int:
        return value


@dataclass(frozen=True)
class Accumulation(Generic[S]):
    """`updates` updates of `policy` as one.

    Strides without a valid step count as updates; at the end of an epoch there may be fewer.

    Raises:
        ConfigError: less than one update, or a policy whose updates are not means.
    """

    policy: Policy[S]
    updates: int

    def __post_init__(self) -> None:
        check_whole("accumulate", self.updates, 1)
        if isinstance(self.policy, Randomized):
            raise ConfigError(
                f"accumulate={self.updates}: the updates of tt.Randomized are unbiased as they"
                " are, and would not be when weighted by their steps. Leave out"
                " optimizer.zero_grad() between them, or take a larger mean_horizon"
            )

    def init(self, carried: State, previous: S | None) -> S:
        """That of the policy."""
        return self.policy.init(carried, previous)

    def state_dict(self, state: S) -> dict[str, Any]:
        """That of the policy."""
        return self.policy.state_dict(state)

    def load_state_dict(self, values: Mapping[str, Any], source: Source) -> S:
        """That of the policy."""
        return self.policy.load_state_dict(values, source)

    def update(
        self, net: Carried, source: Source, objective: Objective, state: S
    ) -> tuple[Update | None, S]:
        """The next updates with a valid step; the next ones where other ranks may have one."""
        alone = objective.reducer is None
        weights = list(trainable_weights(net, objective.loss_fn).values())
        before = [weight.grad for weight in weights]
        reducing = replace(objective, reducer=_SingleRank()) if alone else objective
        mean = _WeightedMean(weights)
        try:
            while mean.update is None or (alone and not mean.weight):
                count, state = self._several(net, source, reducing, state, mean)
                if not count:
                    break
        finally:
            for weight, grad in zip(weights, before, strict=True):
                weight.grad = grad
        if objective.late is not None:  # one part that is not finite is the whole update
            objective.late.zero(mean.sums)
        return None if alone and not mean.weight else mean.deliver(), state

    def _several(
        self, net: Carried, source: Source, objective: Objective, state: S, mean: "_WeightedMean"
    ) -> tuple[int, S]:
        """Add the next updates to the mean; returns their number."""
        for count in range(self.updates):
            if count and not source.remaining(1):
                return count, state  # the source ends once, and the next call must see that
            for weight in mean.weights:
                weight.grad = None
            result = self.policy.update(net, source, objective, state)
            update, state = check_result(self.policy, result)
            if update is None:
                return count, state
            mean.add(update)
        return self.updates, state


class _WeightedMean:
    """Gradients and losses so far; `weight` is the sum of their weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.update: Update | None = None
        self.weight, self._steps = 0.0, 0
        self._loss: Tensor | None = None
        self.sums: list[Tensor | None] = [None] * len(weights)

    def add(self, update: Update) -> None:
        share = float(update.steps) if update.weight is None else update.weight
        self.update, loss = update, update.loss * share
        self._loss = loss if self._loss is None else self._loss + loss
        self._steps += update.steps
        self.weight += share
        for i, weight in enumerate(self.weights):
            if weight.grad is not None and share:
                total, grad = self.sums[i], weight.grad * share
                self.sums[i] = grad if total is None else total + grad

    def deliver(self) -> Update | None:
        """The last update with the loss and steps of all, their mean gradient added to `.grad`."""
        if self.update is None or self._loss is None:
            return None
        for weight, total in zip(self.weights, self.sums, strict=True):
            if total is not None:
                grad = total / self.weight
                weight.grad = grad if weight.grad is None else weight.grad + grad
        loss = self._loss / self.weight if self.weight else self._loss
        return replace(self.update, loss=loss, steps=self._steps, weight=self.weight)
