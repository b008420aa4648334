"""Settings: the types that they are declared with, how they are checked, and what a fault says.

A fault names a setting by its flag, `--lanes 0`, in a TOML file, too. This module imports no torch
and no numpy, as `throughtime.app.config`.
"""

import json
import math
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from throughtime.errors import ConfigError, did_you_mean

ARGUMENTS = {"run": "RUN", "data": "DATA", "script": "SCRIPT"}
"""The settings that are arguments of a command, not flags."""
_FLAGS = {"gradient_args": "--gradient-arg", "module": "-m", "as_json": "--json"}
_FLAGS["weight"] = "--class-weights"  # of a loss


_Model: Any = BaseModel  # a type checker would want of callers, who have texts, every field's type


class Settings(_Model):
    """Checked settings by name; `None` means the default.

    Raises:
        ConfigError: unknown names (with the nearest known one), missing ones, and values of the
            wrong type or out of range, all at once; or what does not go together.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,  # --help needs no schema
        use_attribute_docstrings=True,
    )

    def __init__(self, **settings: Any) -> None:
        present = {name: value for name, value in settings.items() if value is not None}
        try:
            super().__init__(**present)
        except ValidationError as error:
            faults = (_fault(type(self).model_fields, fault, present) for fault in error.errors())
            raise ConfigError("; ".join(dict.fromkeys(faults))) from error

    def changed(self, **settings: Any) -> Self:
        """Checked settings of which some are others."""
        return type(self)(**{**dict(self), **settings})


def _fault(fields: Mapping[str, Any], fault: Any, settings: Mapping[str, Any]) -> str:
    """One fault that pydantic reports, in words."""
    if not fault["loc"]:  # of several settings together
        return str(fault["ctx"]["error"])
    name = fault["loc"][0]
    if name not in fields:
        if isinstance(settings[name], Mapping):
            return f"no table [{name}]; write its keys without the heading"
        known = did_you_mean(name, fields) or f"; known are {', '.join(fields)}"
        return f"unknown key '{name}'{known}"
    if fault["type"] == "missing":
        return f"{flag(name)} is missing: {help_of(fields[name]).removesuffix('.')}"
    *others, last = accepted = alternatives(fields[name])
    expected = f"{', '.join(others)} or {last}" if others else last
    hint = did_you_mean(str(settings[name]), accepted)
    return f"{written(name, settings[name])}: expected {expected}{hint}"


def help_of(field: Any) -> str:
    """The text below a field, in one line."""
    return " ".join(str(field.description).split())


def flag(name: str) -> str:
    """The flag, or the argument, of a setting."""
    return ARGUMENTS.get(name) or _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def written(name: str, value: Any) -> str:
    """A setting and its value as flags.

    Example:
        >>> written("max_norm", 0.0), written("hand_off", True), written("inputs", ("u", "a b"))
        ('--max-norm 0.0', '--hand-off', "--inputs 'u,a b'")
    """
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    items = value if isinstance(value, (list, tuple)) else [value]
    texts = [str(item) for item in items if not isinstance(item, Mapping)]
    return f"{flag(name)} {shlex.quote(','.join(texts))}"


def alternatives(declared: Any) -> list[str]:
    """The words that a type or a field of settings accepts, and what its other values are."""
    kind = getattr(declared, "annotation", declared)
    about = getattr(declared, "metadata", getattr(kind, "__metadata__", ()))
    if text := [part for part in about if isinstance(part, str)][-1:]:
        return text
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    parts = [text for part in get_args(kind) for text in alternatives(part)]
    return parts or [word for of, word in _WORDS.items() if of is kind]


def _no_bool(value: Any) -> Any:
    """The value, unless it is true or false: pydantic takes these for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError  # noqa: TRY004 (pydantic collects no TypeError)
    return value


def checked_by(parse: Callable[[Any], object]) -> AfterValidator:
    """A check that a value can be parsed, which leaves it as it is."""
    return AfterValidator(lambda value: (parse(value), value)[1])


def _items(value: Any) -> Any:
    """The items of a text with commas; a list of a TOML file as it is."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


NUMBER, LIST = BeforeValidator(_no_bool), BeforeValidator(_items)
# The last text among the parts of a type says what is expected.
Count: TypeAlias = Annotated[int, NUMBER, Field(ge=1), "a whole number of at least 1"]
Natural: TypeAlias = Annotated[int, NUMBER, Field(ge=0), "a whole number of at least 0"]
Positive: TypeAlias = Annotated[
    float, NUMBER, Field(gt=0, allow_inf_nan=False), "a finite number above 0, such as 0.001"
]
Share: TypeAlias = Annotated[float, NUMBER, Field(ge=0, lt=1), "a number from 0 to below 1"]
Columns: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], LIST, "a list of column names, such as u,v"
]
Device: TypeAlias = Literal["cpu", "cuda", "mps"] | Annotated[str, "a device"]
ClassFile: TypeAlias = Annotated[
    str, StringConstraints(pattern=r".\.py:[A-Za-z_]\w*$"), "FILE.py:Class"
]
_WORDS: dict[Any, str] = {bool: "true or false", str: "a text", Path: "a path"}


def rows_ahead(ahead: int | str) -> tuple[int, ...]:
    """How many rows later the targets of a forecast are; none of 0.

    Raises:
        ValueError: not rows of at least 1 in rising order.

    Example:
        >>> rows_ahead(0), rows_ahead(24), rows_ahead("1-3,24")
        ((), (24,), (1, 2, 3, 24))
    """
    if str(ahead) == "0":
        return ()
    rows = list[int]()
    for part in str(ahead).split(","):
        first, dash, last = part.partition("-")
        start, stop = int(first), int(last if dash else first)
        if not max([0, *rows]) < start <= stop:
            raise ValueError(f"{part} does not rise")
        rows += range(start, stop + 1)
    return tuple(rows)


def pairs(entries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The name and the text of each `NAME=TEXT`.

    Raises:
        ValueError: an entry of another form.
    """
    for entry in entries:
        name, _, text = (part.strip() for part in entry.partition("="))
        if not name or not text:
            raise ValueError(entry)
        yield name, text


def named_series(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The columns of each series of `NAME=COLUMN`; a name may have several.

    Example:
        >>> named_series(["weight=w", "force=x", "force=y"])
        {'weight': ('w',), 'force': ('x', 'y')}
    """
    series = dict[str, tuple[str, ...]]()
    for name, column in pairs(entries):
        series[name] = (*series.get(name, ()), column)
    return series


def class_numbers(text: str) -> dict[str, float]:
    """The finite number above 0 of each name in `a=5,b=2`.

    Raises:
        ValueError: something else, or a name twice.

    Example:
        >>> class_numbers("pvc=5,beat=2.5")
        {'pvc': 5.0, 'beat': 2.5}
    """
    entries = text.split(",")
    numbers = {name: float(value) for name, value in pairs(entries)}
    if len(numbers) < len(entries) or not all(0 < n < math.inf for n in numbers.values()):
        raise ValueError(text)
    return numbers


def named_arguments(value: Any) -> Any:
    """The arguments in texts NAME=VALUE, each value as TOML or else text, and in dicts.

    Example:
        >>> named_arguments(["min=20", "tolerance=0.1", "name=auto"])
        {'min': 20, 'tolerance': 0.1, 'name': 'auto'}
    """
    if isinstance(value, Mapping):
        return value
    arguments = dict[str, Any]()
    for part in value:
        if isinstance(part, Mapping):
            arguments |= part
            continue
        ((name, text),) = pairs([part])
        try:
            literal = text.lower() if text in {"True", "False"} else text
            arguments |= tomllib.loads(f"{name} = {literal}")
        except tomllib.TOMLDecodeError:
            arguments[name] = text
    return arguments


def toml_lines(settings: Mapping[str, Any]) -> str:
    """Settings as lines of TOML, whose texts, numbers and lists are written as those of JSON."""
    lines = (
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in settings.items()
    )
    return "".join(lines)


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, unchecked.

    Raises:
        ConfigError: the file is missing or is not TOML; the message does not name it.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}); name a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"is not TOML ({error}); write lr = 0.1, and text in quotes") from error
