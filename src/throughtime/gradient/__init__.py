"""How credit flows back through time: one file per policy, plans of integers, one executor."""

from throughtime.gradient.accumulated import Accumulated
from throughtime.gradient.adaptive import Adaptive
from throughtime.gradient.exact import Exact
from throughtime.gradient.objective import LossFn, Objective, Scaler
from throughtime.gradient.online import Online
from throughtime.gradient.policy import Learning, Policy, Progress, Swept, Update
from throughtime.gradient.randomized import Randomized
from throughtime.gradient.replay import generators, set_generators
from throughtime.gradient.rollout import rollout
from throughtime.gradient.truncated import Truncated

__all__ = [
    "Accumulated",
    "Adaptive",
    "Exact",
    "Learning",
    "LossFn",
    "Objective",
    "Online",
    "Policy",
    "Progress",
    "Randomized",
    "Scaler",
    "Swept",
    "Truncated",
    "Update",
    "generators",
    "rollout",
    "set_generators",
]
