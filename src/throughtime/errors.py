"""The exceptions of throughtime, each under the builtin a caller would expect.

ThroughtimeError
├── StateError          (ValueError)    a state that does not fit: structure, lanes, dtype
├── ModelError          (TypeError)     a module that cannot be carried, or breaks its contract
├── DataError           (ValueError)    a recording, chunk or stream that cannot be used as it is
├── ConfigError         (ValueError)    a setting that is unknown or out of range
├── RunError            (RuntimeError)  a run that cannot go on: diverged, or its folder does not
serve
├── MissingExtraError   (ImportError)   a feature whose optional dependency is not installed
├── DiagnosisError      (RuntimeError)  a fault that `tt.doctor(strict=True)` found in a training
loop
└── LawError            (AssertionError) a law of `throughtime.testing` that a module breaks
"""


class ThroughtimeError(Exception):
    """The root: `except ThroughtimeError` catches whatever throughtime raises on purpose."""


class StateError(ThroughtimeError, ValueError):
    """A state that does not fit the model or the chunk."""


class ModelError(ThroughtimeError, TypeError):
    """A module that cannot be carried, or one whose output breaks the contract."""


class DataError(ThroughtimeError, ValueError):
    """A recording, a chunk or a stream that cannot be used as it is."""


class ConfigError(ThroughtimeError, ValueError):
    """A setting that is unknown or out of range."""


class RunError(ThroughtimeError, RuntimeError):
    """A run that cannot go on, or a run folder that does not serve."""


class MissingExtraError(ThroughtimeError, ImportError):
    """A feature whose optional dependency is not installed."""


class DiagnosisError(ThroughtimeError, RuntimeError):
    """A fault that `tt.doctor(strict=True)` found in a training loop."""


class LawError(ThroughtimeError, AssertionError):
    """A law of `throughtime.testing` that a module breaks."""
