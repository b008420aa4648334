"""Rates: rows per second, which all files of a run that say one must agree on."""

import math
from collections.abc import Iterable
from typing import NamedTuple

_CLOSE = 1e-6  # relative: a rate worked out from time stamps is not exact


class Rate(NamedTuple):
    """Rows per second, and who says so."""

    where: str
    value: float


def disagreements(rates: Iterable[Rate]) -> list[str]:
    """A fault for every rate that is not the first one.

    Example:
        >>> disagreements([Rate("a.wav", 8000.0), Rate("b.wav", 16000.0)])
        ['b.wav has 16000 rows per second, a.wav has 8000; resample one of them']
    """
    first, *others = [*rates] or [None]
    return [
        f"{other.where} has {other.value:.12g} rows per second, {first.where} has"
        f" {first.value:.12g}; resample one of them"
        for other in others
        if first is not None
        and other is not None
        and not math.isclose(first.value, other.value, rel_tol=_CLOSE)
    ]
