"""What a default run leaves to `make test-all`: half of the examples, and most of a product."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings

ALL_EXAMPLES = 40  # of a test that asks for no number, where slow tests run, too


def examples(count: int) -> Callable[[Any], Any]:
    """So many examples of hypothesis; half of them where slow tests are left out."""
    return settings(max_examples=max(1, count * settings().max_examples // ALL_EXAMPLES))


def mark_products(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what tests of the mark `covering` have beyond one row a value.

    Of the product of their parameters a default run takes the first values, the second, and so on;
    shorter lists begin again. So each value is in a row at least.
    """
    products = defaultdict[Any, list[Any]](list)
    for item in items:
        if item.get_closest_marker("covering") is not None:
            products[item.parent, getattr(item, "originalname", None)].append(item)
    for rows in products.values():
        parts: list[Sequence[str]] = [row.callspec._idlist for row in rows]
        axes = [list(dict.fromkeys(axis)) for axis in zip(*parts, strict=True)]
        kept = {
            tuple(axis[number % len(axis)] for axis in axes)
            for number in range(max(map(len, axes)))
        }
        for row, part in zip(rows, parts, strict=True):
            if tuple(part) not in kept:
                row.add_marker(pytest.mark.slow)
