"""Gradient policies: how credit flows back through time."""

from throughtime._device import generators, seed_generators, set_generators
from throughtime.gradient.exact import Exact
from throughtime.gradient.executor import Update
from throughtime.gradient.objective import LossFn, Objective, Scaler, SequenceLoss
from throughtime.gradient.randomized import Randomized
from throughtime.gradient.segment import rollout
from throughtime.gradient.truncated import Adaptive, Truncated
from throughtime.gradient.window import Policy, Probe, Progress, UpdatePolicy, Window

__all__ = [
    "Adaptive",
    "Exact",
    "LossFn",
    "Objective",
    "Policy",
    "Probe",
    "Progress",
    "Randomized",
    "Scaler",
    "SequenceLoss",
    "Truncated",
    "Update",
    "UpdatePolicy",
    "Window",
    "generators",
    "rollout",
    "seed_generators",
    "set_generators",
]
