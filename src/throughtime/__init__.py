"""Train recurrent networks the way they are deployed: on one unbroken stream, with the state carried."""

from throughtime import metrics, nn, optim, state, testing
from throughtime.carry.carried import Carried, carry
from throughtime.chunk import Chunk
from throughtime.diagnose import Audit, Reach, Trace, audit, reach, trace
from throughtime.diagnose.draw import Drawing, draw
from throughtime.doctor import Doctor, Finding, doctor
from throughtime.gradient import (
    RTRL,
    Adaptive,
    AdjointStats,
    Exact,
    Randomized,
    Truncated,
    Update,
    rollout,
)
from throughtime.kernels import linear_scan
from throughtime.nn import fuse
from throughtime.predict import Evaluation, Evaluator, Predictor, evaluate, predict
from throughtime.stream import Recording, Stream
from throughtime.updates import Updates, updates

__all__ = [
    "RTRL",
    "Adaptive",
    "AdjointStats",
    "Audit",
    "Carried",
    "Chunk",
    "Doctor",
    "Drawing",
    "Evaluation",
    "Evaluator",
    "Exact",
    "Finding",
    "Predictor",
    "Randomized",
    "Reach",
    "Recording",
    "Stream",
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
    "metrics",
    "nn",
    "optim",
    "predict",
    "reach",
    "rollout",
    "state",
    "testing",
    "trace",
    "updates",
]
__version__ = "0.1.0"
