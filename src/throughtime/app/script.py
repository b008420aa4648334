"""A training script run under the doctor, as `throughtime doctor train.py` does."""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from throughtime.app.report.doctor_page import write_report
from throughtime.doctor import Doctor
from throughtime.doctor import doctor as open_doctor
from throughtime.errors import ConfigError, DiagnosisError


def watch_script(
    script: Path,
    arguments: Sequence[str],
    ignore: Sequence[str],
    *,
    strict: bool,
    report: Path | None,
) -> int:
    """Run a script unchanged and print what the doctor finds, however the script ends.

    Args:
        script: its file.
        arguments: its own.
        ignore: codes that are not reported.
        strict: stop at the first finding.
        report: the page to write, if any.

    Returns:
        The exit code: 0; 1 if the doctor found something or the script failed; 2 if the doctor
        itself failed.

    Raises:
        ConfigError: there is no script, or the name of the page does not end in .html.
    """
    if not script.is_file():
        raise ConfigError(
            f"{script}: no such file. Write throughtime doctor train.py, with the arguments of"
            " train.py after it"
        )
    if report is not None and report.suffix.lower() not in {".html", ".htm"}:
        raise ConfigError(
            f"--report {str(report)!r}: the page is HTML. Write --report"
            f" {report.with_suffix('.html')}, before the script"
        )
    # resolved before the script changes folders
    page, base = None if report is None else report.resolve(), Path.cwd()
    doctor = open_doctor(ignore=ignore, strict=strict)
    ended, error = _run(doctor, script, arguments)
    print(doctor, flush=True)
    if page is not None:
        write_report(doctor, page, of=script.name, ended=ended, base=base)
        print(f"{report} written")
    if error is not None:
        raise error
    return 2 if doctor.internal_error is not None else int(bool(ended or doctor.findings))


def _run(
    doctor: Doctor, script: Path, arguments: Sequence[str]
) -> tuple[str, BaseException | None]:
    """Run the script as `python script.py` would.

    Returns:
        How it failed, empty if it did not, and the exception that must end this process, too. The
        traceback of an error is printed without our frames at its top.
    """
    before = (sys.argv, sys.path[:])
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with doctor:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        failed = error.code not in {None, 0}
        return (f"exit code {error.code}", error) if failed else ("", None)
    except DiagnosisError as error:  # under --strict: the findings say what it says
        return f"{type(error).__name__}: {error}", None
    except Exception as error:  # noqa: BLE001 (a script may raise anything)
        notes = getattr(error, "__notes__", [])  # the doctor's is printed with its findings
        notes[:] = [note for note in notes if not note.startswith("tt.doctor: ")]
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace or error.__traceback__)
        return f"{type(error).__name__}: {error}", None
    except BaseException as error:  # noqa: BLE001 (raised again once the findings are printed)
        return f"{type(error).__name__}: {error}", error
    finally:
        sys.argv, sys.path[:] = before
    return "", None
