"""The page of all commands and flags, from the same declarations as `--help`.

python docs/write_flags.py
"""

from itertools import groupby
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
    """A command: what it does, its arguments, and a table for each group of its options."""
    parameters = [p for p in command.params if p.name != "help"]
    named = [p for p in parameters if p.param_type_name == "argument"]
    arguments = " ".join(p.name.upper() if p.required else f"[{p.name.upper()}]" for p in named)
    usage = f"`throughtime {name} {arguments} [OPTIONS]`".replace("  ", " ")
    parts = [f"\n## throughtime {name}\n\n{command.help.strip()}\n\n{usage}\n"]
    groups = [("", named), *grouped([p for p in parameters if p not in named])]
    for panel, members in groups:
        if members:
            title = f"\n### {panel} ({name})\n" if panel else ""
            head = "\n| | value | what it sets | default |\n|---|---|---|---|\n"
            parts.append(title + head + "".join(map(row, members)))
    return "".join(parts)


def grouped(options: list[Any]) -> list[tuple[str, list[Any]]]:
    """Options under the headings of the help, in its order."""
    groups = groupby(options, key=lambda option: option.rich_help_panel or "")
    return [(panel, list(members)) for panel, members in groups]


def row(parameter: Any) -> str:
    """A row of a table: name, kind of value, help, default."""
    is_argument = parameter.param_type_name == "argument"
    name = parameter.name.upper() if is_argument else ", ".join(parameter.opts)
    value = "" if getattr(parameter, "is_flag", False) else shown_type(parameter)
    cells = (f"`{name}`", f"`{value}`" if value else "", parameter.help or "", default(parameter))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def shown_type(parameter: Any) -> str:
    """The kind of value as the help shows it, such as `<int>`."""
    return parameter.display_type(typer.Context(typer.main.get_command(app)))


def default(parameter: Any) -> str:
    """What holds without the option, in words or as a value."""
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    return (
        ""
        if parameter.default in (None, "") or parameter.default is False
        else f"`{parameter.default}`"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
