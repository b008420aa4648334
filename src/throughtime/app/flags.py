"""Commands of the command line, whose flags are the fields of classes of settings.

The parser only splits words: every value reaches its setting as text and is checked there, so the
faults of all flags are reported at once. This module imports no torch and no numpy.
"""

import difflib
import linecache
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from errno import EACCES, EEXIST, ENOENT, ENOSPC, ENOTDIR, EROFS
from typing import Any, get_args, get_origin

import click

from throughtime.app.config import PANELS, Config
from throughtime.app.user_class import OWN_CODE
from throughtime.app.values import ARGUMENTS, alternatives, flag, help_of
from throughtime.errors import ThroughtimeError, one_line

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
_ALIKE, _PRINTED = 3.0, 10.0  # seconds after which another rank has surely printed an error
_ADVICE = {
    ENOSPC: "; make room, or write to another disk",
    EACCES: "; change its permissions, or name another path",
    EROFS: "; name a path that can be written",
    ENOENT: "; it cannot be made there; name another path",
    ENOTDIR: "; part of this path is a file; name another path",
    EEXIST: "; it is no folder; name another path",
}


class Command(click.Command):
    """A command whose flags are settings, in groups as in their class.

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
        self._fields = {name: about for kind in kinds for name, about in kind.model_fields.items()}
        self.panels, panel = dict[str | None, str](), "Options"
        for setting in Config.model_fields if Config in kinds else ():
            panel = self.panels[setting] = PANELS.get(setting, panel)

        def run(**values: Any) -> int | None:
            present = {k: v for k, v in values.items() if v is not None}
            return action(kinds[0](**present) if len(kinds) == 1 else present)

        parameters = [_parameter(*item) for item in self._fields.items()]
        super().__init__(name, callback=run, params=parameters, help=action.__doc__, **more)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Leave the arguments to `format_options`, as before click 8.4."""

    def records(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """The arguments and options of each group, with their help."""
        groups = dict[str, list[tuple[str, str]]]()
        for parameter in self.get_params(ctx):
            name, record = str(parameter.name), parameter.get_help_record(ctx)
            if name in ARGUMENTS:
                record = ARGUMENTS[name], help_of(self._fields[name])
            if record:
                groups.setdefault(self.panels.get(name, "Options"), []).append(record)
        return groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group below its title."""
        for panel, records in self.records(ctx).items():
            with formatter.section(panel):
                formatter.write_dl(records)


def _parameter(name: str, about: Any) -> click.Parameter:
    """A flag, or an argument, of a field of settings."""
    if name in ARGUMENTS:
        return click.Argument([name], required=False, metavar=ARGUMENTS[name])
    option, kind, accepted = flag(name), about.annotation, alternatives(about)
    known = [text for text in accepted if " " not in text and ":" not in text]
    kinds = {kind, get_origin(kind), *map(get_origin, get_args(kind))}
    default = about.default if isinstance(about.default, (int, float, str)) else ""
    shown = f" [default: {default}]" * (default is not False and default != "")
    if kind is bool and name in Config.model_fields:
        option += f"/--no-{option[2:]}"

    def to_setting(context: click.Context, _: object, value: Any) -> Any:
        """Words in lower case; one text of all values, or their list."""
        texts = [value] if isinstance(value, str) else value
        if kind is bool or not texts:
            return value if kind is bool else None
        if others := [text for text in texts if text.startswith("--")]:
            raise click.BadOptionUsage(name, f"{option} needs a value, not {others[0]}", context)
        texts = [text.lower() if text.lower() in known else text for text in texts]
        return texts if dict in kinds else ",".join(texts)

    return click.Option(
        [option, name],
        help=help_of(about) + shown,
        is_flag=kind is bool,
        default=None,
        multiple=dict in kinds or (tuple in kinds and bool(known)),  # of columns the last ones
        metavar=None if kind is bool else "|".join(dict.fromkeys(map(_metavar, accepted))),
        callback=to_setting,
        shell_complete=lambda _, __, start: [word for word in known if word.startswith(start)],
    )


def _metavar(text: str) -> str:
    """A word that a setting accepts; N for a number, PATH for a path, VALUE for anything else."""
    upper = text.partition(" ")[2].upper() or text
    return "N" if "NUMBER" in upper else "VALUE" if " " in upper else upper


def _wait_for_others(error: BaseException) -> None:
    """Under torchrun let the rank print first that knows why it failed.

    torchrun ends all as soon as one has ended: the others print nothing where they fail alike.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from throughtime.distributed import RankError

        seconds = _PRINTED if isinstance(error, RankError) else 0.0
        time.sleep(seconds + _ALIKE * (os.environ["RANK"] != "0"))


@contextmanager
def failures_printed() -> Generator[None]:
    """Print an expected error, and one of no memory, as one message, and exit with code 2.

    An error in a file of the user's is one, too: with the last line of that file that ran.
    """
    try:
        yield
    except click.Abort:
        sys.exit(130)  # as a shell's command that Ctrl-C ended
    except Exception as error:
        if not (message := _in_words(error)):
            raise
        _wait_for_others(error)
        print_error(message)
        sys.exit(2)


def _in_words(error: Exception) -> str:
    """What went wrong and what to do; empty for an error that is none of these."""
    if isinstance(error, click.UsageError):
        return usage_fault(error)
    if isinstance(error, OSError) and error.strerror:
        advice = _ADVICE.get(error.errno or 0, "")
        return f"{error.filename or 'standard output'}: {error.strerror}{advice}"
    if isinstance(error, (ThroughtimeError, OSError)):
        return str(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        reason = (str(error).splitlines() or ["no memory"])[0][:200]
        return f"out of memory ({reason}); take fewer --lanes, or smaller --hidden"
    return _in_own_code(error)


def _in_own_code(error: Exception) -> str:
    """The error at the last line of a file of the user's; empty where none of these ran."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [(f.f_code, n) for f, n in frames if f.f_globals.get("__name__", "").startswith(OWN_CODE)]
    if not own:
        return ""
    code, number = own[-1]
    line = linecache.getline(code.co_filename, number).strip()
    where = f"{code.co_filename}, line {number}, in {code.co_name}: {line}"
    return f"{where}: {type(error).__name__}: {one_line(error)}; mend your code there"


def usage_fault(error: click.UsageError) -> str:
    """What is wrong with the words of a command line, and what to write."""
    message, context = error.format_message().removesuffix("."), error.ctx
    if context is None:
        return message
    command, path = context.command, context.command_path
    arguments = " ".join(ARGUMENTS[p.name] for p in command.params if p.name in ARGUMENTS)
    if isinstance(error, click.NoSuchOption):
        typed = (word.partition("=")[0] for word in sys.argv[1:])
        option = next((w for w in typed if w.startswith(error.option_name)), error.option_name)
        if ARGUMENTS.get(option.lstrip("-")) in arguments.split():
            return f"{option}: no such option; write {path} {arguments}, without {option}"
        flags = {o.lstrip("-"): o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        ours = {word: f"--{our}" for word, our in _SYNONYMS.items() if our.split()[0] in flags}
        near = _near(option, names := flags | ours)
        advice = f"write {names[near[0]]}" if near else f"{path} --help lists them"
        return f"{option}: no such option; {advice}"
    if isinstance(command, click.Group):
        name = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        near = _near(name, command.commands) or command.commands
        return f"{name}: no such command; write {' or '.join(near)}"
    return f"{message}; write {path} {arguments}, then flags with two hyphens, such as --seed 1"


def _near(word: str, names: Iterable[str]) -> list[str]:
    name = word.lstrip("-").replace("_", "-").lower()
    return difflib.get_close_matches(name, [*names], n=1, cutoff=0.75)


def print_error(message: str) -> None:
    """Print one message to standard error; in red on a terminal."""
    click.echo(f"{click.style('error:', fg='red')} {message}", err=True)
