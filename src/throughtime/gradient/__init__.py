"""How credit flows back through time: one file per policy, plans of integers, one executor."""

from throughtime.gradient.accumulated import Accumulated
from throughtime.gradient.adaptive import Adaptive
from throughtime.gradient.exact import Exact
from throughtime.gradient.objective import LossFn, Objective, Scaler
from throughtime.gradient.policy import AdjointStats, Learning, Policy, Progress, Update
from throughtime.gradient.randomized import Randomized
from throughtime.gradient.replay import generators, set_generators
from throughtime.gradient.rollout import rollout
from throughtime.gradient.rtrl import RTRL
from throughtime.gradient.truncated import Truncated

__all__ = [
    "RTRL",
    "Accumulated",
    "Adaptive",
    "AdjointStats",
    "Exact",
    "Learning",
    "LossFn",
    "Objective",
    "Policy",
    "Progress",
    "Randomized",
    "Scaler",
    "Truncated",
    "Update",
    "generators",
    "rollout",
    "set_generators",
]
