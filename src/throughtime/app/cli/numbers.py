"""Numbers by name, as flags say them."""

import math

from throughtime.errors import ConfigError
from throughtime.stream.formats.csv import is_number


def numbers_in(text: str) -> dict[str, float]:
    """The number of each name in `age=63,weight=71.5`.

    Raises:
        ConfigError: something else.

    Example:
        >>> numbers_in("age=63,weight=71.5")
        {'age': 63.0, 'weight': 71.5}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.rpartition("="))
        if not name or name in found or not is_number(value) or not math.isfinite(float(value)):
            raise ConfigError(
                f"static={text!r}: expected a finite number for each feature, such as"
                " age=63,weight=71.5"
            )
        found[name] = float(value)
    return found
