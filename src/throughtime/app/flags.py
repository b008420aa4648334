"""The flags of the command line: made from settings, checked, read, and named in its messages.

This module imports no torch, as `throughtime.app.config`.
"""

import difflib
import inspect
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from errno import EACCES, ENOENT, ENOSPC, EROFS
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer

from throughtime.app.config import PANELS, AuditOptions, Config
from throughtime.errors import ConfigError, ThroughtimeError, listed

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
_NO_MEMORY = re.compile("(?i)can't allocate memory|not enough memory|out of memory")
_PRINTED = 10.0  # seconds after which an error has surely been printed


def check_options(commands: Any, arguments: Sequence[str]) -> None:
    """Refuse an option that is nearly one of the command, or has another name here."""
    command = commands.commands.get(next(iter(arguments), ""))
    if command is None or command.name == "doctor":  # arguments may be those of a script
        return
    flags = _flags_of(command) | {"-h", "--help"}
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
    settings = (*fields(Config), *fields(AuditOptions))
    names = "|".join(dict.fromkeys([*(setting.name for setting in settings), "on_nan"]))

    def flag(match: re.Match[str]) -> str:
        name = match[1] or match[5]
        words = "DATA" if name == "data" else f"--{name.replace('_', '-')}"
        value = match[3] or (match[4] or "").replace("', '", ",").strip("'")
        return words if match[2] else f"{words} {value}"

    return re.sub(
        rf"\b({names})=(?:(True\b)|'([\w.:-]+)'|\[('[^]]*')\])?|(?<!\()'({names})' (?=is missing)",
        flag,
        message,
    )


def foreign_options(message: str, command: str, commands: Any) -> str:
    """A remark on options in the message that `train` has and this command lacks; or nothing.

    Example:
        >>> from throughtime.app.cli import all_commands
        >>> foreign_options("sort it, or write --exclude t", "eval", all_commands())
        ' (--exclude is an option of train: eval reads data as its run was trained)'
    """
    own, train = commands.commands.get(command), commands.commands["train"]
    if own is None:
        return ""
    advised = re.sub(r"throughtime train[^;.]*", "", message)
    named = dict.fromkeys(re.findall(r"(?<!\w)--[a-z][a-z-]+", advised))
    other = [flag for flag in named if flag in _flags_of(train) and flag not in _flags_of(own)]
    if not other:
        return ""
    are = "is an option" if len(other) == 1 else "are options"
    return f" ({listed(other)} {are} of train: {command} reads data as its run was trained)"


def _flags_of(command: Any) -> set[str]:
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}


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
        name, value = setting.name, settings.get(setting.name)
        if isinstance(value, str) and value.lower() in setting.metadata.get("words", ()):
            settings[name] = value.lower()
        if value is not None and setting.type == tuple[str, ...]:
            settings[name] = tuple(column.strip() for column in value.split(","))
    if "logger" in settings:
        settings["logger"] = [name.lower() for name in settings["logger"]]
    for name in ("workers", "ahead"):
        if re.fullmatch(r"-?[0-9]+", str(settings.get(name, ""))):
            settings[name] = int(settings[name])
    if arguments := settings.pop("gradient_args", None):
        settings["gradient_args"] = dict(map(parse_argument, arguments))
    return settings


def parse_argument(text: str) -> tuple[str, Any]:
    """The name and the value of `NAME=VALUE`; the value is read as TOML, or is text.

    Example:
        >>> [parse_argument(text) for text in ("min=20", "tolerance=0.1", "name=auto")]
        [('min', 20), ('tolerance', 0.1), ('name', 'auto')]
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"\w+", name):
        raise ConfigError(f"--gradient-arg {text}: expected NAME=VALUE, such as tolerance=0.1")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _completed(words: Sequence[str]) -> Callable[[str], list[str]]:
    """What a shell completes, of an option that has more values than these words."""

    def completed(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return completed


def _flag(setting: Field[Any]) -> inspect.Parameter:
    """A flag, or the argument `data`, from a field of settings."""
    name, about, default = setting.name, setting.metadata, setting.default
    annotation: Any = setting.type
    names = list[str]()
    if name == "data":
        return _parameter(name, Path | None, None, typer.Argument(help=about["help"]))
    if name == "gradient_args":
        annotation, names = list[str] | None, ["--gradient-arg"]
    elif name == "logger":
        annotation = list[str] | None
    elif "tuple" in str(annotation) or name in {"workers", "ahead"}:  # text that is parsed later
        annotation = str | None
    if default is MISSING or default == ():
        default, annotation = None, annotation | None
    elif name in {"workers", "ahead"}:
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


def _parameter(name: str, annotation: Any, default: Any, info: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[annotation, info])


def with_flags(settings: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace `**options` of a command by flags: one for each field of a dataclass of settings."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters.values()
        named = [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in own
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        flags = sorted([*named, *map(_flag, fields(settings))], key=_panel)
        setattr(command, "__signature__", inspect.Signature(flags))  # noqa: B010 (typer reads it)
        command.__annotations__ = {flag.name: flag.annotation for flag in flags}
        return command

    return decorate


def _panel(flag: inspect.Parameter) -> int:
    """The place of a flag in the help by its panel; others come first."""
    (info,) = getattr(flag.annotation, "__metadata__", (None,))
    panel = getattr(info, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else -1


@contextmanager
def failures_printed() -> Generator[None]:
    """Print an expected error, and one of no memory, as one message, and exit with code 2."""
    try:
        yield
    except (ThroughtimeError, OSError) as error:
        message = in_words(error)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _NO_MEMORY.search(str(error)):
            raise
        reason = (str(error).splitlines() or ["no memory"])[0][:200]
        message = f"out of memory ({reason}); take fewer --lanes, or smaller --hidden"
    else:
        return
    # Of several processes that torchrun has started, the first of each node prints it. The others,
    # which fail alike, wait for torchrun to end them: it ends all as soon as one has ended, and
    # must not cut the message off.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_error(message)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_PRINTED)
    sys.exit(2)


def in_words(error: BaseException) -> str:
    """The message of an error; of one of the system with what to do."""
    if not isinstance(error, OSError) or isinstance(error, ThroughtimeError) or not error.strerror:
        return str(error)
    advice = {
        ENOSPC: "make room, or write to another disk",
        EACCES: "change its permissions, or name another path",
        EROFS: "name a path that can be written",
        ENOENT: "it cannot be made there; name another path",
    }.get(error.errno or 0)
    return f"{error.filename or 'standard output'}: {error.strerror}{f'; {advice}' * bool(advice)}"


def print_error(message: str) -> None:
    """Print one message to standard error, its settings written as flags; in red on a terminal."""
    from rich.console import Console
    from rich.text import Text

    from throughtime.app.cli import all_commands

    shown = as_flags(message, sys.argv)
    shown += foreign_options(shown, next(iter(sys.argv[1:]), ""), all_commands())
    text = Text.assemble(("error:", "red"), f" {shown}")
    Console(stderr=True, soft_wrap=True).print(text)
