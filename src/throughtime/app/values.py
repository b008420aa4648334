"""Settings: the types that they are declared with, how they are checked, and what a fault says.

A fault names a setting as its user wrote it: `--lanes 0` of a flag, `lanes = 0` of a TOML file.
`written` alone knows how. This module imports no torch and no numpy, as `throughtime.app.config`.
"""

import difflib
import json
import math
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from throughtime.errors import ConfigError

T = TypeVar("T")
_DECLARED = ConfigDict(
    extra="forbid",
    defer_build=True,  # --help needs no schema
    use_attribute_docstrings=True,
)
_FIELDS = dict[type, Mapping[str, Any]]()  # pydantic drops the help when it builds its schema
ARGUMENTS = {"run": "RUN", "data": "DATA", "script": "SCRIPT"}
"""The settings that are arguments of a command, not flags."""
_FLAGS = {"gradient_args": "--gradient-arg", "module": "-m"}


class _SettingsType(type):
    """Makes the faults of a class of settings a ConfigError; that of pydantic is the cause."""

    def __call__(cls, *values: Any, **settings: Any) -> Any:
        try:
            return super().__call__(*values, **settings)
        except ValidationError as error:
            raise ConfigError(faults_in_words(cls, error, settings, None)) from error


class Settings(metaclass=_SettingsType):
    """The base of classes of settings, each of which is `declared`."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(Field,))
def declared(kind: type[T]) -> type[T]:
    """Make a class of annotated fields a frozen pydantic dataclass, a field's help below it."""
    decorate: Any = dataclass(frozen=True, kw_only=True, config=_DECLARED)
    kind = decorate(kind)
    fields = {**fields_of(kind), **_FIELDS.get(kind.__mro__[1], {})}
    for field in fields.values():
        field.description = " ".join(str(field.description).split())
    _FIELDS[kind] = fields
    return kind


def fields_of(kind: Any) -> Mapping[str, Any]:
    """The fields of a class of settings: each with its type, default and help."""
    return _FIELDS.get(kind) or kind.__pydantic_fields__


def _no_bool(value: Any) -> Any:
    """The value, unless it is true or false: pydantic takes these for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError  # noqa: TRY004 (pydantic collects no TypeError)
    return value


def checked_by(parse: Callable[[Any], object]) -> AfterValidator:
    """A check that a value can be parsed, which leaves it as it is."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


def _items(value: Any) -> Any:
    """The items of a text with commas; a list of a TOML file as it is."""
    if not isinstance(value, str):
        return value
    items = [item.strip() for item in value.split(",")]
    if not all(items):
        raise ValueError
    return items


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
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
}


def build(
    kind: type[T],
    settings: Mapping[str, Any],
    source: str = "",
    flags: Collection[str] | None = None,
) -> T:
    """A checked object of declared settings; `None` means the default.

    Args:
        kind: a class of settings.
        settings: by name.
        source: the beginning of the message.
        flags: the names of those that flags set, the others are of a file; `None`: all of them.

    Raises:
        ConfigError: unknown names (with the nearest known one), missing ones, and values of the
            wrong type or out of range, all at once; or what does not go together.
    """
    present = {name: value for name, value in settings.items() if value is not None}
    try:
        return kind(**present)
    except ConfigError as error:
        raise ConfigError(
            source + faults_in_words(kind, error.__cause__, present, flags)
        ) from error


def faults_in_words(
    kind: Any, error: Any, settings: Mapping[str, Any], flags: Collection[str] | None
) -> str:
    """All faults that pydantic reports of settings, in words; see `build`."""
    faults = (text for fault in error.errors() for text in _faults(kind, fault, settings, flags))
    return "; ".join(dict.fromkeys(faults))


class Contradictions(ValueError):  # noqa: N818 (pydantic wraps it)
    """Faults of settings that are each in range.

    Args:
        faults: what is wrong, with {name} where a setting and its value belong.
        values: of all settings.
    """

    def __init__(self, faults: Sequence[str], values: Mapping[str, Any]) -> None:
        super().__init__(*faults)
        self.faults, self.values = faults, values


def _faults(
    kind: Any, fault: Any, settings: Mapping[str, Any], flags: Collection[str] | None
) -> Iterator[str]:
    """One fault that pydantic reports, in words."""
    fields, reason = fields_of(kind), fault.get("ctx", {}).get("error")
    if isinstance(reason, Contradictions):
        names = {name: written(name, value, flags) for name, value in reason.values.items()}
        yield from (text.format_map(names) for text in reason.faults)
        return
    name = fault["loc"][0]
    if name not in fields:
        known = nearest(name, fields) or f"; known are {', '.join(fields)}"
        yield f"unknown key '{name}'{known}"
    elif fault["type"] == "missing":
        yield f"{flag(name)} is missing: {fields[name].description.removesuffix('.')}"
    else:
        value, accepted = settings[name], alternatives(fields[name])
        *others, last = accepted
        expected = f"{', '.join(others)} or {last}" if others else last
        hint = nearest(str(value), accepted)
        yield f"{written(name, value, flags)}: expected {expected}{hint}"


def flag(name: str) -> str:
    """The flag, or the argument, of a setting."""
    return ARGUMENTS.get(name) or _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def written(name: str, value: Any, flags: Collection[str] | None = None) -> str:
    """A setting and its value as a user writes them.

    Args:
        name: of the setting.
        value: of it.
        flags: names that are written as flags, the others as keys of TOML; `None`: all.

    Example:
        >>> written("max_norm", 0.0), written("hand_off", True), written("lr", 0, flags=())
        ('--max-norm 0.0', '--hand-off', 'lr = 0')
    """
    if flags is not None and name not in flags:
        return f"{name} = {toml_value(value)}"
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    items = value if isinstance(value, (list, tuple)) else [value]
    text = ",".join(str(item) for item in items if not isinstance(item, Mapping))
    return f"{flag(name)} {shlex.quote(text)}"


def alternatives(declared: Any) -> list[str]:
    """The words that a type or a field of settings accepts, and what its other values are."""
    kind = getattr(declared, "annotation", declared)
    about = getattr(declared, "metadata", getattr(kind, "__metadata__", ()))
    if text := [part for part in about if isinstance(part, str)][-1:]:
        return text
    if get_origin(kind) is Literal:
        return [*get_args(kind)]
    parts = [text for part in get_args(kind) for text in alternatives(part)]
    name = _WORDS.get(kind) or getattr(kind, "__name__", "")
    return parts or ([name] if name and kind is not NoneType else [])


def nearest(name: str, known: Iterable[str]) -> str:
    """The question whether a known name is meant that is very similar; empty without one.

    Example:
        >>> nearest("hiden", ["hidden", "lanes"]), nearest("optimizer", ["delimiter"])
        ("; did you mean 'hidden'?", '')
    """
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.75)
    return f"; did you mean '{near[0]}'?" if near else ""


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


def named_series(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The columns of each series of `NAME=COLUMN`; a name may have several.

    Raises:
        ValueError: an entry of another form.

    Example:
        >>> named_series(["weight=w", "force=x", "force=y"])
        {'weight': ('w',), 'force': ('x', 'y')}
    """
    series = dict[str, tuple[str, ...]]()
    for entry in entries:
        name, _, column = (part.strip() for part in entry.partition("="))
        if not name.isidentifier() or not column:
            raise ValueError(entry)
        series[name] = (*series.get(name, ()), column)
    return series


def named_numbers(text: str, above: float = -math.inf) -> dict[str, float]:
    """The finite number of each name in `a=5,b=2`.

    Raises:
        ValueError: something else, a number that is not greater than `above`, or a name twice.

    Example:
        >>> named_numbers("age=63,weight=71.5")
        {'age': 63.0, 'weight': 71.5}
    """
    numbers: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.rpartition("="))
        if not name or name in numbers or "_" in value or not above < float(value) < math.inf:
            raise ValueError(part)
        numbers[name] = float(value)
    return numbers


def named_arguments(value: Any) -> Any:
    """The arguments in texts NAME=VALUE, each value as TOML or else text, and in dicts.

    Raises:
        ValueError: a text of another form.

    Example:
        >>> named_arguments(["min=20", "tolerance=0.1", "name=auto"])
        {'min': 20, 'tolerance': 0.1, 'name': 'auto'}
    """
    arguments = dict[str, Any]()
    for text in [value] if isinstance(value, Mapping) else value:
        if not isinstance(text, str):
            arguments |= dict(text)
            continue
        name, _, argument = (part.strip() for part in text.partition("="))
        if not name.isidentifier() or not argument:
            raise ValueError(text)
        try:
            arguments[name] = tomllib.loads(f"value = {argument}")["value"]
        except tomllib.TOMLDecodeError:
            arguments[name] = argument
    return arguments


def toml_value(value: Any) -> str:
    """A value as TOML."""
    return json.dumps(value, ensure_ascii=False, default=str)


def toml_lines(settings: Mapping[str, Any]) -> str:
    """Settings as lines of TOML."""
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in settings.items())


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
        raise ConfigError(
            f"{path}: is not TOML ({error}); write lr = 0.1, and text in quotes"
        ) from error
    tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
    for title, table in tables.items():
        if title == "gradient_args":
            continue
        if title != "gradient":
            raise ConfigError(f"{path}: no table [{title}]; write its keys without the heading")
        name = table.pop("policy", None)
        settings |= {"gradient": name, "gradient_args": table}
        if name is None:
            raise ConfigError(
                f'{path}: the table [gradient] has no policy; write policy = "adaptive", or'
                ' policy = "FILE.py:Class"'
            )
    return settings
