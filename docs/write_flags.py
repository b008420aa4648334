"""The page of all commands and flags, from the same declarations as `--help`.

python docs/write_flags.py
"""

from pathlib import Path
from typing import Any

import typer

from throughtime.app.cli import app

PAGE = Path(__file__).parent / "reference" / "flags.md"
HEAD = """# All flags

Every command of `throughtime` with its arguments and options, as `throughtime COMMAND --help`
prints them. [The command line](command-line.md) explains them in context. A flag of `train` is also
a key of the file that `--config` names, with underscores for hyphens: `--max-norm 1` is
`max_norm = 1`.
"""


def page() -> str:
    """The text of the page."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    return HEAD + "".join(section(name, command) for name, command in commands.items())


def section(name: str, command: Any) -> str:
    """A command: what it does, its arguments, and a list for each group of its options."""
    parameters = [p for p in command.params if p.name != "help"]
    named = [p for p in parameters if p.param_type_name == "argument"]
    arguments = " ".join(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in named)
    usage = f"`throughtime {name} {arguments} [OPTIONS]`".replace("  ", " ")
    parts = [f"\n## throughtime {name}\n\n{command.help.strip()}\n\n{usage}\n"]
    groups: dict[str, list[Any]] = {"": named}
    for option in (p for p in parameters if p not in named):
        groups.setdefault(option.rich_help_panel or "", []).append(option)
    for panel, members in groups.items():
        title = f"### {panel} ({name})\n\n" if panel else ""
        parts += ["\n", title, *map(item, members)] if members else []
    return "".join(parts)


def item(parameter: Any) -> str:
    """An argument or option in a list: name, kind of value, help, default."""
    is_argument = parameter.param_type_name == "argument"
    name = parameter.name.upper() if is_argument else ", ".join(parameter.opts)
    value = "" if getattr(parameter, "is_flag", False) else f" {shown_type(parameter)}"
    return f"- `{name}{value}`: {parameter.help or ''}{default(parameter)}\n"


def shown_type(parameter: Any) -> str:
    """The kind of value as the help shows it, such as `<int>`."""
    return parameter.display_type(typer.Context(typer.main.get_command(app)))


def default(parameter: Any) -> str:
    """A sentence on what holds without the option; empty where nothing does."""
    if parameter.required:
        return " Required."
    if isinstance(parameter.show_default, str):
        return f" Default: {parameter.show_default}."
    unset = parameter.default in (None, "") or parameter.default is False
    return "" if unset else f" Default: `{parameter.default}`."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
