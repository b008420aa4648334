"""A training script run under the doctor, as `throughtime doctor train.py` does."""

import os
import runpy
import sys
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from throughtime.app.config import DoctorOptions
from throughtime.doctor import Doctor
from throughtime.doctor import doctor as open_doctor
from throughtime.doctor.doctor import NOTE
from throughtime.errors import ConfigError, DiagnosisError

_INTERRUPTED = 130  # the exit code of a shell's command that Ctrl-C ended


def watch_script(options: DoctorOptions, arguments: Sequence[str]) -> int:
    """Run a script as Python would, and print the findings, then the traceback if it failed.

    Args:
        options: the script, and how to watch it.
        arguments: those of the script.

    Returns:
        The exit code of the script, if that is not 0. Otherwise 1 if there are findings; 2 if there
        is no verdict, since the doctor failed or no recurrent state was watched; or else 0.

    Raises:
        ConfigError: there is no script.
    """
    script, strict, as_json = options.script, options.strict, options.as_json
    if not options.module and not Path(script).is_file():
        kind = "a folder, no script" if Path(script).is_dir() else "no such file"
        raise ConfigError(
            f"{script}: {kind}. Write throughtime doctor train.py, with the arguments of train.py"
            " after it, or throughtime doctor -m package.train"
        )
    ignore = options.ignore.split(",") if options.ignore else ()
    doctor = open_doctor(ignore=ignore, strict=strict)
    with _output_to_stderr() if as_json else nullcontext():
        error = _run(doctor, script, arguments, options.module)
        sys.stdout.flush()
    print(to_json(_facts(doctor), indent=1).decode() if as_json else doctor, flush=True)
    messages = sys.stderr if as_json else sys.stdout
    stopped = strict and isinstance(error, DiagnosisError) and doctor.findings
    if stopped and str(error) == str(doctor.findings[-1]):
        print("Stopped at the first finding, as --strict says.", file=messages)
        return 1
    if doctor.ended and error is not None:
        return _report_failure(error)
    if doctor.findings:
        return 1
    return 2 if doctor.internal_error is not None or not doctor.coverage.recurrences else 0


@contextmanager
def _output_to_stderr() -> Generator[None]:
    """Standard output goes to standard error, that of processes that the script starts too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _facts(doctor: Doctor) -> dict[str, Any]:
    """The result as plain values."""
    error = doctor.internal_error
    return {
        "verdict": doctor.verdict,
        "findings": doctor.findings,
        "watched": doctor.coverage,
        "ended": doctor.ended,
        "internal_error": error and f"{type(error).__name__}: {error}",
    }


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
    notes = getattr(error, "__notes__", [])  # the findings have been printed
    notes[:] = [note for note in notes if not note.startswith(NOTE)]
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        trace = trace.tb_next
    traceback.print_exception(error.with_traceback(trace))
    return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
