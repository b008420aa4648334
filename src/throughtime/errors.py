"""The exceptions of throughtime, each under the builtin a caller would expect.

ThroughtimeError
├── StateError          (ValueError)    a state that does not fit: structure, lanes, dtype
├── ModelError          (TypeError)     a module that cannot be carried, or breaks its contract
├── DataError           (ValueError)    a recording, chunk or stream that cannot be used as it is
├── ConfigError         (ValueError)    a setting that is unknown or out of range
├── RunError            (RuntimeError)  a run that cannot go on, or whose folder does not serve
├── MissingExtraError   (ImportError)   a feature whose optional dependency is not installed
├── DiagnosisError      (RuntimeError)  a fault that `tt.doctor(strict=True)` found in a loop
└── LawError            (AssertionError) a law of `throughtime.testing` that a module breaks
"""

import difflib
import inspect
import operator
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "ConfigError",
    "DataError",
    "DiagnosisError",
    "LawError",
    "MissingExtraError",
    "ModelError",
    "RunError",
    "StateError",
    "ThroughtimeError",
]

_SHOWN = 8  # names of a list in a message, each of at most _LONGEST characters
_LONGEST = 100
_MAX_FAULTS = 5  # of a message


def listed(names: Iterable[object], *, quoted: bool = False) -> str:
    """The first few names of a list for a message, and how many there are more.

    With `quoted` they are in quotes and brackets, as Python writes a list.

    Example:
        >>> from throughtime.errors import listed
        >>> listed(range(10_000))
        '0, 1, 2, 3, 4, 5, 6, 7 and 9,992 more'
    """
    every = [*names]
    texts = [repr(name) if quoted else str(name) for name in every[:_SHOWN]]
    half = (_LONGEST - 3) // 2  # the end of a path says most
    texts = [t if len(t) <= _LONGEST else f"{t[:half]}...{t[-half:]}" for t in texts]
    rest = len(every) - len(texts)
    text = ", ".join(texts) + (f" and {rest:,} more" if rest else "")
    return f"[{text}]" if quoted else text


def counted(count: int, one: str, many: str = "") -> str:
    """The number and the noun, which is in the plural unless the number is 1.

    Args:
        count: the number.
        one: the words for 1.
        many: those for other numbers; default: with an s at the end.

    Example:
        >>> counted(1, "lane"), counted(2_000, "lane"), counted(2, "step has", "steps have")
        ('1 lane', '2,000 lanes', '2 steps have')
    """
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def join_faults(faults: Sequence[str]) -> str:
    """Join faults into one message: five at most, and the number of others.

    Example:
        >>> from throughtime.errors import join_faults
        >>> join_faults(["a", "b"]), join_faults(list("abcdefgh"))
        ('a; b', 'a; b; c; d; e; and 3 more faults')
    """
    rest = len(faults) - _MAX_FAULTS
    more = [f"and {counted(rest, 'more fault')}"] if rest > 0 else []
    return "; ".join([*faults[:_MAX_FAULTS], *more])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question whether the most similar of the known names is meant; empty without one.

    Args:
        name: that is unknown.
        known: the names to choose from.

    Example:
        >>> did_you_mean("stirde", ["lanes", "stride"]), did_you_mean("x", ["lanes", "stride"])
        ("; did you mean 'stride'?", '')
    """
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def one_line(error: BaseException) -> str:
    """The message of an error without its line breaks."""
    return " ".join(str(error).split())


def warn_caller(message: str) -> None:
    """Warn at the innermost line of the call stack that is outside of the package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("throughtime."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


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


def check_whole(
    name: str, value: Any, least: int, error: type[ThroughtimeError] = ConfigError
) -> int:
    """A setting as an `int`; refused unless it is a whole number, of any library, not a bool.

    Example:
        >>> import numpy as np
        >>> check_whole("stride", np.int64(20), 1)
        20
    """
    if not hasattr(value, "__index__") or isinstance(value, bool) or value < least:
        raise error(f"{name}={value!r}: expected a whole number of at least {least}")
    return operator.index(value)
