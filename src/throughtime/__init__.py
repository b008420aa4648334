"""Train recurrent networks the way they are deployed: on one unbroken stream, with the state carried."""

from throughtime import score, state, testing
from throughtime.carry import Carried, carry
from throughtime.chunk import Chunk
from throughtime.gradient import Exact, Truncated, Update, rollout
from throughtime.predict import Evaluation, Predictor, evaluate, predict
from throughtime.stream import Recording, Stream
from throughtime.updates import Updates, updates

__all__ = [
    "Carried",
    "Chunk",
    "Evaluation",
    "Exact",
    "Predictor",
    "Recording",
    "Stream",
    "Truncated",
    "Update",
    "Updates",
    "__version__",
    "carry",
    "evaluate",
    "predict",
    "rollout",
    "score",
    "state",
    "testing",
    "updates",
]
__version__ = "0.1.0"
