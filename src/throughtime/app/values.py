"""Settings: declared with their help and range, checked, and read from text and TOML.

This module imports no torch, as `throughtime.app.config`.
"""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from throughtime.errors import ConfigError

_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def setting(panel: str, help_: str, default: Any = MISSING, **checks: Any) -> Any:
    """A field of a dataclass of settings: its group in the help, what it sets, its default.

    `checks` are `minimum=N`, `positive=True` for finite numbers above 0, `share=True` for those
    from 0 to below 1, `unset="..."`, what `None` means, and `words=...`, the values of a text that
    a shell completes.
    """
    return field(default=default, metadata={"panel": panel, "help": help_, **checks})


def range_faults(settings: Any) -> list[str]:
    """The faults of the values of a dataclass of settings that are out of range."""
    faults: list[str] = []
    for one in fields(settings):
        value, checks = getattr(settings, one.name), one.metadata
        for number in value if isinstance(value, tuple) else (value,):
            said = f"{one.name}={number}: expected"
            if number is None:
                continue
            if "minimum" in checks and not checks["minimum"] <= number < math.inf:
                faults.append(f"{said} at least {checks['minimum']}")
            if checks.get("positive") and not 0 < number < math.inf:
                faults.append(f"{said} a finite number above 0")
            if checks.get("share") and not 0 <= number < 1:
                faults.append(f"{said} a share from 0 to below 1")
    return faults


def rows_ahead(ahead: int | str) -> tuple[int, ...]:
    """How many rows later the targets of a forecast are; none of 0.

    Raises:
        ConfigError: a text that names no rows.

    Example:
        >>> rows_ahead(0), rows_ahead(24), rows_ahead("1-3,24")
        ((), (24,), (1, 2, 3, 24))
    """
    if isinstance(ahead, int):
        return (ahead,) * bool(ahead)
    rows = list[int]()
    for part in ahead.split(","):
        first, dash, last = part.partition("-")
        ends = [int(end) for end in (first, last if dash else first) if end.isdecimal()]
        if len(ends) < 2 or ends[0] <= max([0, *rows]) or ends[1] < ends[0]:
            raise ConfigError(
                f"ahead={ahead!r}: expected rows of at least 1 in rising order, such as 24, all of"
                " 1-24, or 1,6,24"
            )
        rows += range(ends[0], ends[1] + 1)
    return tuple(rows)


def check(faults: Sequence[str], source: str = "") -> None:
    """Refuse settings with faults; all of them are listed.

    Raises:
        ConfigError: there is a fault.
    """
    if faults:
        raise ConfigError(source + "; ".join(faults))


def convert(name: str, value: Any, annotation: Any) -> tuple[Any, str]:
    """Check a value against a type, a union of types or of words, and convert it.

    Returns:
        The value in its type; and the fault, with the name of the setting, empty if there is none.
    """
    union = get_origin(annotation) in {Union, UnionType}
    options = get_args(annotation) if union else (annotation,)
    expected: list[str] = []
    for option in options:
        fits, converted, words = _fit(value, option)
        if fits:
            return converted, ""
        expected += words
    one_of = "one of " if all(text.startswith("'") for text in expected) else ""
    joined = (", " if one_of else " or ").join(expected)
    return value, f"{name}={value!r}: expected {one_of}{joined}"


def _fit(value: Any, option: Any) -> tuple[bool, Any, list[str]]:
    """Whether a value fits a single type, the value in that type, and the type in words."""
    if get_origin(option) is Literal:
        words = get_args(option)
        return value in words, value, [repr(word) for word in words]
    if get_origin(option) is tuple:
        items = [value] if isinstance(value, str) else value
        words = get_args(get_args(option)[0])
        fits = isinstance(items, (list, tuple)) and all(
            item in words if words else isinstance(item, str) for item in items
        )
        expected = f"a list of {', '.join(words) or 'column names'}"
        return fits, tuple(items) if fits else value, [expected]
    if option is NoneType:
        return value is None, value, []
    if option not in _TYPES:  # only the policy itself can check it
        return True, value, []
    if isinstance(value, bool) != (option is bool):
        return False, value, [_TYPES[option]]
    if option is float and isinstance(value, int):
        return True, float(value), []
    return isinstance(value, option), value, [_TYPES[option]]


def named_series(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The columns of each series of `NAME=COLUMN`; a name may have several.

    Raises:
        ConfigError: an entry of another form.

    Example:
        >>> named_series(["weight=w", "force=x", "force=y"])
        {'weight': ('w',), 'force': ('x', 'y')}
    """
    series = dict[str, tuple[str, ...]]()
    for entry in entries:
        name, _, column = (part.strip() for part in entry.partition("="))
        if not name.isidentifier() or not column:
            raise ConfigError(f"series={entry!r}: expected NAME=COLUMN, such as weight=w")
        series[name] = (*series.get(name, ()), column)
    return series


def named_numbers(
    setting: str, text: str, expected: str, *, above: float = -math.inf
) -> dict[str, float]:
    """The finite number of each name in the text of a setting.

    Raises:
        ConfigError: something else, a number that is not greater than `above`, or a name that
            occurs twice; the message says what was `expected`.

    Example:
        >>> named_numbers("static", "age=63,weight=71.5", "numbers such as age=63")
        {'age': 63.0, 'weight': 71.5}
    """
    numbers: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.rpartition("="))
        try:
            number = math.nan if "_" in value or name in numbers else float(value)
        except ValueError:
            number = math.nan
        if not name or not above < number < math.inf:
            raise ConfigError(f"{setting}={text!r}: expected {expected}")
        numbers[name] = number
    return numbers


def weights_by_class(text: str) -> dict[str, float]:
    """The weight of each class named in `a=5,b=2`.

    Raises:
        ConfigError: other text, or a weight that is not a finite number above 0.

    Example:
        >>> weights_by_class("pvc=5,beat=2")
        {'pvc': 5.0, 'beat': 2.0}
    """
    expected = "none, balanced, or a number above 0 for some classes, such as pvc=5,beat=2"
    return named_numbers("class_weights", text, expected, above=0.0)


def toml_lines(settings: Mapping[str, Any]) -> str:
    """Settings as lines of TOML."""
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in settings.items()
    )


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, unchecked.

    A table `[gradient]` becomes `gradient`, its key `policy`, and `gradient_args`, its other keys.

    Raises:
        ConfigError: the file is missing or is not TOML.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML ({error}); text needs quotes") from error
    table = settings.get("gradient")
    if isinstance(table, dict):
        name = table.pop("policy", None)
        settings |= {"gradient": name, "gradient_args": table}
        if name is None:
            raise ConfigError(
                f'{path}: the table [gradient] has no policy; write policy = "adaptive", or'
                ' policy = "FILE.py:Class"'
            )
    return settings
