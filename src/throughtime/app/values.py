"""Settings: the types that they are declared with, how they are checked, and what a fault says.

A fault names a setting by its flag, `--lanes 0`, in a TOML file, too. This module imports no torch
and no numpy, as `throughtime.app.config`.
"""

import json
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from throughtime.errors import ConfigError, did_you_mean

ARGUMENTS = {"run": "RUN", "data": "DATA", "script": "SCRIPT"}
"""The settings that are arguments of a command, not flags."""
_FLAGS = {
    "gradient_args": "--gradient-arg",
    "weight": "--class-weights",  # of a loss
}


_Model: Any = BaseModel  # a type checker would want of callers, who have texts, every field's type


class Settings(_Model):
    """Checked settings by name; `None` means the default.

    Raises:
        ConfigError: unknown names (with the nearest known one), missing ones, and values of the
            wrong type or out of range, all at once; or what does not go together.
    """

    model_config = ConfigDict(
        allow_inf_nan=False,
        frozen=True,
        extra="forbid",
        defer_build=True,  # --help needs no schema
        use_attribute_docstrings=True,
    )

    def __init__(self, **settings: Any) -> None:
        present = {  # true as a text, which is no number
            name: str(value) if isinstance(value, bool) else value
            for name, value in settings.items()
            if value is not None
        }
        try:
            super().__init__(**present)
        except ValidationError as error:
            faults = dict[str, dict[str, None]]()  # of a union there are several
            for fault in error.errors():
                name, text = _fault(type(self).model_fields, fault, present)
                faults.setdefault(name, {})[text] = None
            texts = (f"{name}{' or '.join(several)}" for name, several in faults.items())
            raise ConfigError("; ".join(texts)) from error

    def changed(self, **settings: Any) -> Self:
        """Checked settings of which some are others."""
        return type(self)(**{**dict(self), **settings})


def _fault(fields: Mapping[str, Any], fault: Any, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The setting of a fault that pydantic reports, and the fault in words."""
    message = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:  # of several settings together
        return "", message
    name = fault["loc"][0]
    if name not in fields:
        near = f"{did_you_mean(name, fields)}; keys are flags of --help, outside all tables"
        return f"unknown key '{name}'", near
    if fault["type"] == "missing":
        return f"{flag(name)} is missing: ", help_of(fields[name])
    if fault["type"] in {"literal_error", "string_pattern_mismatch"}:
        message = f"expected {' or '.join(choices(fields[name].annotation))}"
    if fault["type"] == "tuple_type":
        message = "expected a list"
    return f"{written(name, settings[name])}: ", message


def help_of(field: Any) -> str:
    """The text below a field, in one line."""
    return " ".join(str(field.description).split())


def flag(name: str) -> str:
    """The flag, or the argument, of a setting."""
    return ARGUMENTS.get(name) or _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def written(name: str, value: Any) -> str:
    """A setting and its value as flags.

    Example:
        >>> written("max_norm", 0.0), written("inputs", ("u", "a b"))
        ('--max-norm 0.0', "--inputs 'u,a b'")
    """
    items = value if isinstance(value, (list, tuple)) else [value]
    return f"{flag(name)} {shlex.quote(','.join(map(str, items)))}"


def choices(kind: Any) -> list[str]:
    """The words that a type accepts, those of its parts included."""
    parts = get_args(kind)
    own = [part for part in parts if isinstance(part, str)]
    return own + [word for part in parts for word in choices(part)]


def checked_by(parse: Callable[[Any], object], expected: str) -> AfterValidator:
    """A check that a value can be parsed, which leaves it as it is."""

    def check(value: Any) -> Any:
        try:
            parse(value)
        except ValueError as error:
            raise ValueError(f"expected {expected}") from error
        return value

    return AfterValidator(check)


def _items(value: Any) -> Any:
    """The items of a text with commas; a list of a TOML file as it is."""
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


LIST = BeforeValidator(_items)
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Columns: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], LIST]


def rows_ahead(ahead: int | str) -> tuple[int, ...]:
    """How many rows later the targets of a forecast are; none of 0.

    Raises:
        ValueError: not rows of at least 1 in rising order.

    Example:
        >>> rows_ahead(0), rows_ahead(24), rows_ahead("1-3,24")
        ((), (24,), (1, 2, 3, 24))
    """
    rows = list[int]()
    for part in str(ahead).split(","):
        first, dash, last = part.partition("-")
        rows += range(int(first), int(last if dash else first) + 1)
    if rows == [0]:
        return ()
    if rows != sorted({*rows}) or not rows or rows[0] < 1:
        raise ValueError(ahead)
    return tuple(rows)


def named_arguments(entries: Iterable[str]) -> dict[str, Any]:
    """The arguments in texts NAME=VALUE, each value a number, true, false or else a text.

    Raises:
        ValueError: an entry of another form.

    Example:
        >>> named_arguments(["min=20", "tolerance=0.1", "jitter=False", "name=auto"])
        {'min': 20, 'tolerance': 0.1, 'jitter': False, 'name': 'auto'}
    """
    arguments = dict[str, Any]()
    for entry in entries:
        name, _, text = (part.strip() for part in entry.partition("="))
        if not name or not text:
            raise ValueError(entry)
        try:
            arguments[name] = json.loads(text.lower())
        except ValueError:
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
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot be read as TOML ({error}); name a file with lines such as lr = 0.1, and text"
            " in quotes"
        ) from error
