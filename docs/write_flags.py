"""The page of all commands and flags, from the same declarations as `--help`.

python docs/write_flags.py
"""

from pathlib import Path

import click

from throughtime.app.cli import commands

PAGE = Path(__file__).parent / "reference" / "flags.md"
HEAD = """# All flags

Every command of `throughtime` with its arguments and options, as `throughtime COMMAND --help`
prints them. [The command line](command-line.md) explains them in context. A flag of `train` is also
a key of the file that `--config` names, with underscores for hyphens: `--max-norm 1` is
`max_norm = 1`.
"""


def page() -> str:
    """The text of the page."""
    return HEAD + "".join(map(section, commands.commands.values()))


def section(command: click.Command) -> str:
    """A command: what it does, and a list of its options."""
    context = click.Context(command, info_name=f"throughtime {command.name}")
    text = f"\n## throughtime {command.name}\n\n{command.help or ''}".rstrip()
    text += f"\n\n`{' '.join(command.get_usage(context).removeprefix('Usage: ').split())}`\n\n"
    records = (parameter.get_help_record(context) for parameter in command.params)
    items = (f"- `{record[0]}`: {record[1]}\n" for record in records if record and record[1])
    return text + "".join(items)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
