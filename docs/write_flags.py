"""The page of all commands and flags, from the same declarations as `--help`.

python docs/write_flags.py
"""

from pathlib import Path

import click

from throughtime.app.cli import commands
from throughtime.app.flags import Command

PAGE = Path(__file__).parent / "reference" / "flags.md"
HEAD = """# All flags

Every command of `throughtime` with its arguments and options, as `throughtime COMMAND --help`
prints them. [The command line](command-line.md) explains them in context. A flag of `train` is also
a key of the file that `--config` names, with underscores for hyphens: `--max-norm 1` is
`max_norm = 1`.
"""


def page() -> str:
    """The text of the page."""
    made = (command for command in commands.commands.values() if isinstance(command, Command))
    return HEAD + "".join(map(section, made))


def section(command: Command) -> str:
    """A command: what it does, its arguments, and a list for each group of its options."""
    context = click.Context(command, info_name=f"throughtime {command.name}")
    text = f"\n## throughtime {command.name}\n\n{command.help or ''}".rstrip()
    text += f"\n\n`{' '.join(command.get_usage(context).removeprefix('Usage: ').split())}`\n"
    for panel, records in command.records(context).items():
        title = f"### {panel} ({command.name})\n\n" if command.panels else ""
        items = (f"- `{name}`: {about}\n" for name, about in records if "--help" not in name)
        text += f"\n{title}{''.join(items)}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
