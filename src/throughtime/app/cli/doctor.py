"""`throughtime doctor script.py ...`: an unchanged script under the doctor, and what it found."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from throughtime.app.cli.screen import out
from throughtime.app.report import doctor_page
from throughtime.doctor import Doctor
from throughtime.doctor import doctor as open_doctor
from throughtime.errors import ConfigError

SCRIPT = {
    "allow_interspersed_args": False,
    "allow_extra_args": True,
    "ignore_unknown_options": True,
}
"""What follows the script belongs to the script."""


def doctor(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(help="The script to run; what follows it are its own arguments.")
    ],
    ignore: Annotated[
        str | None,
        typer.Option(help="Codes that are not reported, separated by commas, such as TT201,TT207."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first finding.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Write what was found as a page, too: a file that ends in .html."),
    ] = None,
) -> None:
    """Run a training script unchanged and name what is wrong with its loop.

    Exit code 1: something was found, 2: the doctor failed.
    """
    if not script.is_file():
        raise ConfigError(
            f"script={str(script)!r}: no such file. Write throughtime doctor train.py, with the"
            " arguments of train.py after it"
        )
    watching = open_doctor(ignore=ignore.split(",") if ignore else (), strict=strict)
    _run(watching, script, context.args, _page(watching, script, report))
    if watching.internal_error is not None:
        raise typer.Exit(2)
    if watching.findings:
        raise typer.Exit(1)


def _page(watching: Doctor, script: Path, report: Path | None) -> Callable[[str], None]:
    """What writes the page once it is told how the script ended; a script may change the working
    directory.

    Raises:
        ConfigError: a name that is no page's, found before the script has run for hours.
    """
    if report is None:
        return lambda _: None
    if report.suffix.lower() not in {".html", ".htm"}:
        raise ConfigError(
            f"report={str(report)!r}: the page is HTML. Write --report"
            f" {report.with_suffix('.html')}, before the script"
        )
    path, base = report.resolve(), Path.cwd()

    def write(ended: str) -> None:
        doctor_page.write_report(watching, path, of=script.name, ended=ended, base=base)
        out.print(f"{report} written")

    return write


def _run(watching: Doctor, script: Path, arguments: list[str], page: Callable[[str], None]) -> None:
    """The script as `python script.py` would run it; the report is printed however it ends."""
    before, ended = (sys.argv, sys.path[:]), ""
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with watching:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in {None, 0}:
            ended = f"exit code {exit_.code}"
            raise
    except BaseException as error:
        ended = f"{type(error).__name__}: {error}"
        raise
    finally:
        sys.argv, sys.path[:] = before
        out.print(str(watching), markup=False, highlight=False, soft_wrap=True)
        page(ended)
