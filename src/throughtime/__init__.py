"""Train recurrent networks the way they are deployed: on one stream, with the state carried.

Public names are loaded on first use (PEP 562): `import throughtime` and `throughtime --help` do
not import torch. What functions return stays in its module, such as `throughtime.chunk.Chunk`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from throughtime import deploy, metrics, nn, optim, state, testing
    from throughtime.app.fit import fit
    from throughtime.app.load import load_run, recordings
    from throughtime.carry import carry
    from throughtime.deploy.export import export
    from throughtime.diagnose import audit, reach, settling_time, trace
    from throughtime.diagnose.draw import draw
    from throughtime.doctor import doctor
    from throughtime.evaluation import evaluate
    from throughtime.gradient import Adaptive, Exact, Randomized, SequenceLoss, Truncated, rollout
    from throughtime.kernels import linear_scan
    from throughtime.nn import fuse
    from throughtime.predict import Predictor, predict
    from throughtime.stream import Stream, windows
    from throughtime.stream.sources import recording
    from throughtime.updates import updates

__all__ = [
    "Adaptive",
    "Exact",
    "Predictor",
    "Randomized",
    "SequenceLoss",
    "Stream",
    "Truncated",
    "__version__",
    "audit",
    "carry",
    "deploy",
    "doctor",
    "draw",
    "evaluate",
    "export",
    "fit",
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
    "app.fit": "fit",
    "app.load": "load_run recordings",
    "carry": "carry",
    "deploy.export": "export",
    "diagnose": "audit reach settling_time trace",
    "diagnose.draw": "draw",
    "doctor": "doctor",
    "evaluation": "evaluate",
    "gradient": "Adaptive Exact Randomized SequenceLoss Truncated rollout",
    "kernels": "linear_scan",
    "nn": "fuse",
    "predict": "Predictor predict",
    "stream": "Stream windows",
    "stream.sources": "recording",
    "updates": "updates",
}
_SOURCE = {name: module for module, names in _EXPORTS.items() for name in names.split()}


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name; cloudpickle, as Ray uses it, does so for plain modules only."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
