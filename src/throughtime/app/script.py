"""A training script run under the doctor, as `throughtime doctor train.py` does."""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from throughtime.app.settings import DoctorOptions
from throughtime.doctor import doctor as open_doctor
from throughtime.errors import ConfigError

_INTERRUPTED = 130  # the exit code of a shell's command that Ctrl-C ended


def watch_script(options: DoctorOptions, arguments: Sequence[str]) -> int:
    """Run a script as Python would; print its traceback if it failed, then the findings.

    Args:
        options: the script, and how to watch it.
        arguments: those of the script.

    Returns:
        The exit code of the script, if that is not 0. Otherwise 1 if there are findings; 2 if there
        is no verdict, since the doctor failed or no recurrent state was watched; or else 0.

    Raises:
        ConfigError: there is no script.
    """
    script, ignore = Path(options.script), options.ignore.split(",") if options.ignore else ()
    if not script.is_file():
        raise ConfigError(
            f"{script}: no such file. Write throughtime doctor train.py, with the arguments of"
            " train.py after it"
        )
    doctor, code = open_doctor(ignore=ignore, strict=options.strict), 0
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    try:
        with doctor:
            runpy.run_path(str(script.absolute()), run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 (a script may raise anything)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        if not (options.strict and doctor.findings):  # the first one stopped it
            traceback.print_exc()
    finally:
        sys.argv, sys.path[:] = before
    print(doctor, flush=True)
    unknown = doctor.internal_error is not None or not doctor.coverage.recurrences
    return code or (1 if doctor.findings else 2 * unknown)
