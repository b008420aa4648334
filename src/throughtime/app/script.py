"""A training script run under the doctor, as `throughtime doctor train.py` does."""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from throughtime.doctor import Doctor
from throughtime.doctor import doctor as open_doctor
from throughtime.doctor._frames import error_chain
from throughtime.doctor.doctor import NOTE
from throughtime.errors import ConfigError, DiagnosisError

_INTERRUPTED = 130  # the exit code of a shell's command that Ctrl-C ended


def watch_script(
    script: str,
    arguments: Sequence[str],
    ignore: Sequence[str],
    *,
    module: bool = False,
    strict: bool,
) -> int:
    """Run a script as Python would, and print the findings, then the traceback if it failed.

    Args:
        script: its file, or the name of a module.
        arguments: its own.
        ignore: codes that are not reported.
        module: run it as `python -m` does.
        strict: stop at the first finding.

    Returns:
        The exit code of the script, if that is not 0. Otherwise 1 if there are findings; 2 if there
        is no verdict, since the doctor failed or no recurrent state was watched; or else 0.

    Raises:
        ConfigError: there is no script.
    """
    if not module and not Path(script).is_file():
        kind = "a folder, no script" if Path(script).is_dir() else "no such file"
        raise ConfigError(
            f"{script}: {kind}. Write throughtime doctor train.py, with the arguments of train.py"
            " after it, or throughtime doctor -m package.train"
        )
    doctor = open_doctor(ignore=ignore, strict=strict)
    error = _run(doctor, script, arguments, module)
    print(doctor, flush=True)
    stopped = strict and isinstance(error, DiagnosisError) and doctor.findings
    if stopped and str(error) == str(doctor.findings[-1]):
        print("Stopped at the first finding, as --strict says.")
        return 1
    if doctor.ended and error is not None:
        return _report_failure(error)
    if doctor.findings:
        return 1
    return 2 if doctor.internal_error is not None or not doctor.coverage.recurrences else 0


def _run(
    doctor: Doctor, script: str, arguments: Sequence[str], module: bool
) -> BaseException | None:
    """Run the script as `python script.py` would; return the exception that ended it."""
    path = Path(script)
    folder = Path.cwd() if module else path.resolve().parent
    before = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path[: not sys.flags.safe_path] = [str(folder)]
    try:
        with doctor:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path.absolute()), run_name="__main__")
    except BaseException as error:  # noqa: BLE001 (a script may raise anything)
        return error
    finally:
        sys.argv, sys.path[:] = before
    return None


def _report_failure(error: BaseException) -> int:
    """Print the traceback of a script as Python would; return the exit code."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr)
        return 1
    for each in error_chain(error):
        notes = getattr(each, "__notes__", [])  # the findings have been printed
        notes[:] = [note for note in notes if not note.startswith(NOTE)]
        trace = each.__traceback__
        while trace and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
            trace = trace.tb_next
        each.__traceback__ = trace
    traceback.print_exception(error)
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
