"""Commands of the command line, whose flags are the fields of classes of settings.

The parser only splits words: every value reaches its setting as text and is checked there, so the
faults of all flags are reported at once. This module imports no torch and no numpy.
"""

import difflib
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from errno import EACCES, ENOENT, ENOSPC, EROFS
from typing import Any, get_args, get_origin

import click

from throughtime.app.config import PANELS, Config
from throughtime.app.values import ARGUMENTS, alternatives, fields_of, flag
from throughtime.errors import ThroughtimeError, listed

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


class _Argument(click.Argument):
    """An argument that the help describes."""

    def __init__(self, name: str, about: str) -> None:
        super().__init__([name], required=False, metavar=ARGUMENTS[name])
        self.help = about

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002
        return str(self.metavar), str(self.help)


class Command(click.Command):
    """A command whose flags are settings, in groups as in their class.

    Args:
        name: of the command.
        action: gets the settings that the flags set, by name; its docstring is the help.
        kinds: the classes of these settings.
        more: arguments of `click.Command`.
    """

    def __init__(
        self, name: str, action: Callable[[dict[str, Any]], int | None], *kinds: Any, **more: Any
    ) -> None:
        fields = {name: about for kind in kinds for name, about in fields_of(kind).items()}

        def run(**values: Any) -> int | None:
            return action({k: v for k, v in values.items() if v is not None})

        parameters = [_parameter(*item) for item in fields.items()]
        super().__init__(name, callback=run, params=parameters, help=action.__doc__, **more)
        self.panels, panel = dict[str | None, str](), "Options"
        for setting in fields_of(Config) if Config in kinds else ():
            panel = self.panels[setting] = PANELS.get(setting, panel)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Leave the arguments to `format_options`, as before click 8.4."""

    def records(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """The arguments and options of each group, with their help."""
        groups = dict[str, list[tuple[str, str]]]()
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                groups.setdefault(self.panels.get(parameter.name, "Options"), []).append(record)
        return groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each group below its title."""
        for panel, records in self.records(ctx).items():
            with formatter.section(panel):
                formatter.write_dl(records)


def _parameter(name: str, about: Any) -> click.Parameter:
    """A flag, or an argument, of a field of settings."""
    if name in ARGUMENTS:
        return _Argument(name, about.description)
    option, kind, accepted = flag(name), about.annotation, alternatives(about)
    texts = [text.partition(" ")[2].upper() or text for text in accepted]
    shown = ["N" if "NUMBER" in text else "VALUE" if " " in text else text for text in texts]
    known = [text for text in accepted if " " not in text and ":" not in text]
    kinds = {kind, get_origin(kind), *map(get_origin, get_args(kind))}
    default = about.default
    hidden = default in {None, ""} or default is False or not isinstance(default, (int, float, str))
    if kind is bool and name in fields_of(Config):
        option += f"/--no-{option[2:]}"

    def to_setting(context: click.Context, _: object, value: Any) -> Any:
        """Words in lower case; one text of all values, or their list."""
        texts = [value] if isinstance(value, str) else value
        if kind is bool or texts is None or texts == ():
            return value if kind is bool else None
        if others := [text for text in texts if text.startswith("--")]:
            raise click.BadOptionUsage(name, f"{option} needs a value, not {others[0]}", context)
        texts = [text.lower() if text.lower() in known else text for text in texts]
        return texts if dict in kinds else ",".join(texts)

    return click.Option(
        [option, name],
        help=about.description + f" [default: {default}]" * (not hidden),
        is_flag=kind is bool,
        default=None,
        multiple=dict in kinds or (tuple in kinds and bool(known)),  # of columns the last ones
        metavar=None if kind is bool else "|".join(dict.fromkeys(shown)),
        callback=to_setting,
        shell_complete=lambda _, __, start: [word for word in known if word.startswith(start)],
    )


def flags_of(command: Any) -> dict[str, str]:
    """The flags of a command by their names without hyphens, and by those of other libraries."""
    flags = [option for p in command.params for option in (*p.opts, *p.secondary_opts)]
    names = {option.lstrip("-"): option for option in flags if option.startswith("-")}
    ours = {name: f"--{our}" for name, our in _SYNONYMS.items() if our.split()[0] in names}
    return names | ours


@contextmanager
def failures_printed(commands: click.Group) -> Generator[None]:
    """Print an expected error, and one of no memory, as one message, and exit with code 2."""
    try:
        yield
    except click.Abort:
        sys.exit(130)  # as a shell's command that Ctrl-C ended
    except click.UsageError as error:
        message = usage_fault(error)
    except (ThroughtimeError, OSError) as error:
        message = in_words(error)
        message += _foreign_flags(message, commands)
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


def usage_fault(error: click.UsageError) -> str:
    """What is wrong with the words of a command line, and what to write."""
    context = error.ctx
    if context is None:
        return error.format_message()
    command, path = context.command, context.command_path
    if isinstance(error, click.NoSuchOption):
        start = error.option_name.lstrip("-")
        typed = (w.partition("=")[0] for w in sys.argv[1:] if w.lstrip("-").startswith(start))
        option, names = next(typed, error.option_name), flags_of(command)
        near = _near(option, names)
        advice = f"write {names[near[0]]}" if near else f"{path} --help lists them"
        return f"{option}: no such option; {advice}"
    message = error.format_message().removesuffix(".").replace("Got u", "u", 1)
    if isinstance(command, click.Group):
        name = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
        near = _near(name, command.commands) or command.commands
        return f"{name}: no such command; write {' or '.join(near)}"
    if dash := next((word for word in sys.argv if word[0:1] in {"\N{EN DASH}", "\N{EM DASH}"}), ""):
        return f"{dash}: write --{dash[1:]}, with two hyphens"
    arguments = " ".join(ARGUMENTS[p.name] for p in command.params if p.name in ARGUMENTS)
    return f"{message}; write {path} {arguments}, then flags, such as --seed 1"


def _near(word: str, names: Iterable[str]) -> list[str]:
    name = word.lstrip("-").replace("_", "-").lower()
    return difflib.get_close_matches(name, [*names], n=1, cutoff=0.75)


def _foreign_flags(message: str, commands: click.Group) -> str:
    """A remark on advice to write flags that `train` has and this command lacks; or nothing."""
    name = next(iter(sys.argv[1:]), "")
    own, train = commands.commands.get(name), commands.commands["train"]
    if own is None or "throughtime train" in message:
        return ""
    other = {*flags_of(train).values()} - {*flags_of(own).values()}
    named = [word for word in dict.fromkeys(re.findall(r"--[a-z-]+", message)) if word in other]
    if not named:
        return ""
    are = "is an option" if len(named) == 1 else "are options"
    return f" ({listed(named)} {are} of train: {name} reads data as its run was trained)"


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
    """Print one message to standard error; in red on a terminal."""
    click.echo(f"{click.style('error:', fg='red')} {message}", err=True)
