"""Gradient policies: how credit flows back through time."""

from throughtime._device import generators, set_generators
from throughtime.gradient._accumulated import Accumulation
from throughtime.gradient.adaptive import Adaptive
from throughtime.gradient.exact import Exact
from throughtime.gradient.objective import LossFn, Objective, Scaler
from throughtime.gradient.policy import AdjointStats, CarriedState, Policy, PolicyState, Update
from throughtime.gradient.randomized import Randomized
from throughtime.gradient.rollout import rollout
from throughtime.gradient.rtrl import RTRL
from throughtime.gradient.truncated import Truncated

__all__ = [
    "RTRL",
    "Accumulation",
    "Adaptive",
    "AdjointStats",
    "CarriedState",
    "Exact",
    "LossFn",
    "Objective",
    "Policy",
    "PolicyState",
    "Randomized",
    "Scaler",
    "Truncated",
    "Update",
    "generators",
    "rollout",
    "set_generators",
]
