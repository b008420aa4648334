"""Commands of the command line, whose flags are the fields of classes of settings.

The parser only splits words: every value reaches its setting as text and is checked there, so the
faults of all flags are reported at once. This module imports no torch and no numpy.
"""

import difflib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import click

from throughtime.app.user_class import OWN_CODE
from throughtime.app.values import ARGUMENTS, choices, flag, help_of
from throughtime.errors import ThroughtimeError, one_line

_NO_MEMORY = re.compile("(?i)can't allocate memory|not enough memory|out of memory")


class Command(click.Command):
    """A command whose flags are settings.

    Args:
        name: of the command.
        action: gets the settings; of several classes those that the flags set, by name. Its
            docstring is the help.
        kinds: the classes of these settings.
        more: arguments of `click.Command`.
    """

    def __init__(
        self, name: str, action: Callable[[Any], int | None], *kinds: Any, **more: Any
    ) -> None:
        fields = {name: about for kind in kinds for name, about in kind.model_fields.items()}

        def run(**values: Any) -> int | None:
            present = {k: v for k, v in values.items() if v is not None}
            return action(kinds[0](**present) if len(kinds) == 1 else present)

        parameters = [_parameter(*item) for item in fields.items()]
        about = (f"{ARGUMENTS[key]}: {help_of(fields[key])}" for key in ARGUMENTS if key in fields)
        text = "\n\n".join([inspect.cleandoc(action.__doc__ or ""), *about])
        super().__init__(name, callback=run, params=parameters, help=text, **more)


def _parameter(name: str, about: Any) -> click.Parameter:
    """A flag, or an argument, of a field of settings."""
    if name in ARGUMENTS:
        return click.Argument([name], required=False, metavar=ARGUMENTS[name])
    option, kind = flag(name), about.annotation
    several = name == "gradient_args"  # of others the last one counts
    shown = about.default != "" and type(about.default) in {int, float, str}

    def to_setting(context: click.Context, _: object, value: Any) -> Any:
        texts = value if several else [value]
        if others := [text for text in texts if str(text).startswith("--")]:
            raise click.BadOptionUsage(name, f"{option} needs a value, not {others[0]}", context)
        return (",".join(texts) or None) if several else value

    return click.Option(
        [f"{option}/--no-{option[2:]}" if kind is bool else option, name],
        help=help_of(about) + f" [default: {about.default}]" * shown,
        is_flag=kind is bool,
        default=None,
        multiple=several,
        metavar=None if kind is bool else "|".join(choices(kind)) or "VALUE",
        callback=to_setting,
    )


@contextmanager
def failures_printed() -> Generator[None]:
    """Print an expected error, and one of no memory, as one message, and exit with code 2."""
    try:
        yield
    except click.Abort:
        sys.exit(130)  # as a shell's command that Ctrl-C ended
    except Exception as error:
        if not (message := _in_words(error)):
            raise
        print_error(message)
        sys.exit(2)


def _in_words(error: Exception) -> str:
    """What went wrong and what to do; empty for an error that is none of these."""
    if isinstance(error, click.UsageError):
        return _usage_fault(error)
    if isinstance(error, ThroughtimeError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename or 'standard output'}: {error.strerror or error}"
        return f"{where}; make room there, change its permissions, or name another path"
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return f"out of memory ({str(error)[:200]!r}); take fewer --lanes, or smaller --hidden"
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if OWN_CODE in str(frame.f_globals.get("__name__")):
            where = f"{frame.f_code.co_filename}, line {line}"
            return f"{where}: {type(error).__name__}: {one_line(error)}; mend your code there"
    return ""


def _usage_fault(error: click.UsageError) -> str:
    """What is wrong with the words of a command line, and what to write."""
    message, context = error.format_message().removesuffix("."), error.ctx
    if context is None:
        return message
    advice = f"{context.command_path} --help lists what it takes, such as --seed 1"
    if isinstance(error, click.NoSuchOption):
        message = f"{error.option_name}: no such option"
        flags = [text for p in context.command.params for text in p.opts if text[0] == "-"]
        name = error.option_name.replace("_", "-").lower()
        if near := difflib.get_close_matches(name, flags, n=1, cutoff=0.75):
            advice = f"write {near[0]}"
    return f"{message}; {advice}"


def print_error(message: str) -> None:
    """Print one message to standard error; in red on a terminal."""
    click.echo(f"{click.style('error:', fg='red')} {message}", err=True)
