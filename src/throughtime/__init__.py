"""Train recurrent networks the way they are deployed: on one unbroken stream, with the state carried."""

from throughtime import nn, optim, score, state, testing
from throughtime.carry import Carried, carry
from throughtime.chunk import Chunk
from throughtime.gradient import (
    Adaptive,
    Exact,
    Online,
    Randomized,
    Swept,
    Truncated,
    Update,
    rollout,
)
from throughtime.kernels import linear_scan
from throughtime.nn import fuse
from throughtime.predict import Evaluation, Evaluator, Predictor, evaluate, predict
from throughtime.probe import Audit, Doctor, Finding, Reach, Trace, audit, doctor, reach, trace
from throughtime.report.of_graph import Drawing, draw
from throughtime.stream import Recording, Stream
from throughtime.updates import Updates, updates

__all__ = [
    "Adaptive",
    "Audit",
    "Carried",
    "Chunk",
    "Doctor",
    "Drawing",
    "Evaluation",
    "Evaluator",
    "Exact",
    "Finding",
    "Online",
    "Predictor",
    "Randomized",
    "Reach",
    "Recording",
    "Stream",
    "Swept",
    "Trace",
    "Truncated",
    "Update",
    "Updates",
    "__version__",
    "audit",
    "carry",
    "doctor",
    "draw",
    "evaluate",
    "fuse",
    "linear_scan",
    "nn",
    "optim",
    "predict",
    "reach",
    "rollout",
    "score",
    "state",
    "testing",
    "trace",
    "updates",
]
__version__ = "0.1.0"
