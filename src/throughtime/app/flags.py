"""The flags of the command line: made from the settings of `train`, checked, and read as settings.

This module imports no torch, as `throughtime.app.config`.
"""

import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from throughtime.app.config import PANELS, Config
from throughtime.errors import ConfigError

_COLUMNS = ("inputs", "targets", "exclude", "static")  # settings that name columns
_SYNONYMS = {
    "learning-rate": "lr",
    "batch-size": "lanes",
    "hidden-size": "hidden",
    "num-layers": "layers",
    "k1": "stride",
    "k2": "horizon",
    "max-grad-norm": "max-norm",
    "num-workers": "workers",
    "exact": "gradient exact",
}
"""Names of other libraries, each with ours."""


def check_options(commands: Any, arguments: Sequence[str]) -> None:
    """Refuse an option that is nearly one of the command, or has another name here."""
    command = commands.commands.get(next(iter(arguments), ""))
    if command is None or command.name == "doctor":  # arguments may be those of a script
        return
    flags = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    flags |= {"-h", "--help"}
    names = {flag.removeprefix("--"): flag for flag in flags}
    names |= {name: f"--{ours}" for name, ours in _SYNONYMS.items() if ours.split()[0] in names}
    for argument in takewhile(lambda word: word != "--", arguments):
        flag = argument.partition("=")[0]
        if flag in flags or not re.fullmatch(r"--?[A-Za-z][\w-]+", flag):
            continue
        name = flag.lstrip("-").replace("_", "-")
        near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.75)
        if near:
            raise ConfigError(f"{flag}: no such option; write {names[near[0]]}")


def as_flags(message: str, arguments: Sequence[str]) -> str:
    """The message with settings written as flags, unless the command line names a file of settings.

    Example:
        >>> as_flags("lanes=0: expected at least 1", ["train", "--lanes", "0"])
        '--lanes 0: expected at least 1'
    """
    if any(argument.startswith(("--config", "--resume")) for argument in arguments):
        return message
    settings = [f.name for f in fields(Config)] + ["horizons", "max_lag", "steps", "tolerance"]
    names = "|".join(settings)

    def flag(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        words = "DATA" if name == "data" else f"--{name.replace('_', '-')}"
        return words if match[2] else f"{words} "

    return re.sub(rf"\b({names})=(True\b)?|(?<!\()'({names})' (?=is missing)", flag, message)


def merge_settings(base: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file with the flags over them; arguments of another policy are dropped."""
    merged = {**base, **flags}
    same = merged.get("gradient") == base.get("gradient")
    sources = (base, flags) if same else (flags,)
    arguments = [source.get("gradient_args") or {} for source in sources]
    return {**merged, "gradient_args": {k: v for part in arguments for k, v in part.items()}}


def to_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """Flags as settings: paths as text, words in lower case, column names apart."""
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in flags.items()}
    for setting in fields(Config):
        value = settings.get(setting.name)
        if isinstance(value, str) and value.lower() in setting.metadata.get("words", ()):
            settings[setting.name] = value.lower()
    for name in _COLUMNS:
        if name in settings:
            settings[name] = tuple(name.strip() for name in settings[name].split(","))
    if "logger" in settings:
        settings["logger"] = [name.lower() for name in settings["logger"]]
    if re.fullmatch(r"-?[0-9]+", settings.get("workers", "")):
        settings["workers"] = int(settings["workers"])
    if arguments := settings.pop("gradient_args", None):
        settings["gradient_args"] = dict(map(parse_argument, arguments))
    return settings


def parse_argument(text: str) -> tuple[str, Any]:
    """The name and the value of `NAME=VALUE`; the value is read as TOML, or is text.

    Example:
        >>> [parse_argument(text) for text in ("min=20", "memory=2GiB", "graphs=auto")]
        [('min', 20), ('memory', '2GiB'), ('graphs', 'auto')]
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"\w+", name):
        raise ConfigError(f"--gradient-arg {text}: expected NAME=VALUE, such as tolerance=0.1")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _parameter(name: str, annotation: Any, default: Any, info: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[annotation, info])


def _completed(words: Sequence[str]) -> Callable[[str], list[str]]:
    """What a shell completes, of an option that has more values than these words."""

    def completed(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return completed


def _flag(setting: Field[Any], annotation: Any) -> inspect.Parameter:
    """A flag of `train`, or its argument, from a field of `Config`."""
    name, about, default, names = setting.name, setting.metadata, setting.default, list[str]()
    if name == "data":
        return _parameter(name, Path | None, None, typer.Argument(help=about["help"]))
    if name == "gradient_args":
        annotation, names = list[str] | None, ["--gradient-arg"]
    elif name == "logger":
        annotation = list[str]
    elif name in {*_COLUMNS, "workers"}:
        annotation = str | None
    if default is MISSING or default == ():
        default, annotation = None, annotation | None
    elif name == "workers":
        default = str(default)
    option = typer.Option(
        *names,
        help=about["help"],
        rich_help_panel=about["panel"],
        case_sensitive=False,
        autocompletion=_completed(about["words"]) if "words" in about else None,
        show_default=about.get("unset", default is not None),
    )
    return _parameter(name, annotation, default, option)


def train_signature() -> inspect.Signature:
    """The flags of `train`: one for each field of `Config`, and those that name a file."""
    annotations = get_type_hints(Config)
    files = {
        "config": "A TOML file with the same settings as keys; flags win.",
        "resume": "Go on with the run in this folder, from its last checkpoint.",
    }
    settings = sorted(fields(Config), key=lambda s: PANELS.index(s.metadata["panel"]))
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    return inspect.Signature(
        [
            context,
            *(_flag(setting, annotations[setting.name]) for setting in settings),
            *(
                _parameter(
                    name, Path | None, None, typer.Option(help=text, rich_help_panel=PANELS[-1])
                )
                for name, text in files.items()
            ),
        ]
    )
