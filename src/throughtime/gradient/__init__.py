"""How credit flows back through time: one file per policy, plans of integers, one executor."""

from throughtime.gradient.objective import LossFn, Objective, Scaler
from throughtime.gradient.policy import Policy, Progress, Update
from throughtime.gradient.exact import Exact
from throughtime.gradient.rollout import rollout
from throughtime.gradient.truncated import Truncated

__all__ = ["Exact", "LossFn", "Objective", "Policy", "Progress", "Scaler", "Truncated", "Update", "rollout"]
