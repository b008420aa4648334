"""Train recurrent networks the way they are deployed: on one stream, with the state carried.

Public names are loaded on first use (PEP 562): `import throughtime` and `throughtime --help` do
not import torch.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from throughtime import deploy, metrics, nn, optim, state, testing
    from throughtime.app.load import load_run, recordings
    from throughtime.carry import Carried, carry
    from throughtime.chunk import Chunk
    from throughtime.deploy.export import Export, export
    from throughtime.diagnose import (
        Audit,
        Reach,
        SettlingTime,
        Trace,
        audit,
        reach,
        settling_time,
        trace,
    )
    from throughtime.diagnose.draw import Drawing, draw
    from throughtime.doctor import Doctor, Finding, doctor
    from throughtime.evaluation import Evaluation, Evaluator, evaluate
    from throughtime.gradient import (
        RTRL,
        Adaptive,
        AdjointStats,
        Exact,
        Policy,
        Randomized,
        Truncated,
        Update,
        rollout,
    )
    from throughtime.kernels import linear_scan
    from throughtime.nn import fuse
    from throughtime.predict import Predictor, predict
    from throughtime.stream import Recording, Stream, windows
    from throughtime.stream.tables import from_frame, recording
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
    "Export",
    "Finding",
    "Policy",
    "Predictor",
    "Randomized",
    "Reach",
    "Recording",
    "SettlingTime",
    "Stream",
    "Trace",
    "Truncated",
    "Update",
    "Updates",
    "__version__",
    "audit",
    "carry",
    "deploy",
    "doctor",
    "draw",
    "evaluate",
    "export",
    "from_frame",
    "fuse",
    "linear_scan",
    "load_run",
    "metrics",
    "nn",
    "optim",
    "predict",
    "reach",
    "recording",
    "recordings",
    "rollout",
    "settling_time",
    "state",
    "testing",
    "trace",
    "updates",
    "windows",
]
__version__ = "0.1.0"

_MODULES = {"deploy", "metrics", "nn", "optim", "state", "testing"}
_EXPORTS = {
    "app.load": ("load_run", "recordings"),
    "carry": ("Carried", "carry"),
    "chunk": ("Chunk",),
    "deploy.export": ("Export", "export"),
    "diagnose": (
        "Audit",
        "Reach",
        "SettlingTime",
        "Trace",
        "audit",
        "reach",
        "settling_time",
        "trace",
    ),
    "diagnose.draw": ("Drawing", "draw"),
    "doctor": ("Doctor", "Finding", "doctor"),
    "evaluation": ("Evaluation", "Evaluator", "evaluate"),
    "gradient": (
        "Adaptive",
        "AdjointStats",
        "Exact",
        "Policy",
        "RTRL",
        "Randomized",
        "Truncated",
        "Update",
        "rollout",
    ),
    "kernels": ("linear_scan",),
    "nn": ("fuse",),
    "predict": ("Predictor", "predict"),
    "stream": ("Recording", "Stream", "windows"),
    "stream.tables": ("from_frame", "recording"),
    "updates": ("Updates", "updates"),
}
_SOURCE = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"throughtime.{name}")
    if name not in _SOURCE:
        raise AttributeError(f"module 'throughtime' has no attribute '{name}'")
    value = getattr(import_module(f"throughtime.{_SOURCE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `tt.carry`, `tt.doctor`, `tt.predict` and `tt.updates` functions.

    Importing a submodule sets an attribute of its name on the package, here ignored for them.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _SOURCE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickle by name; cloudpickle, as Ray uses it, does so for plain modules only."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
