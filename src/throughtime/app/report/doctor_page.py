"""The page of the doctor: each finding with the user's code and the line to write."""

import linecache
import os
from pathlib import Path

from throughtime._files import write_atomically
from throughtime.app.report.page import (
    Code,
    DataTable,
    Page,
    Paragraphs,
    Part,
    Section,
    WebLink,
    render,
)
from throughtime.doctor import CODES, Doctor, Finding
from throughtime.errors import counted

_CONTEXT = 4  # lines of code before and after the marked one
_LIMITS = (
    "The doctor reports only what is certain. If chunks come from files, from workers or through"
    " NumPy, it cannot know that they follow one another. Then it may not report TT201, TT204,"
    " TT206, TT207 and TT208. It skips the loops of throughtime itself."
)


def write_report(
    doctor: Doctor,
    path: Path | str,
    *,
    of: str = "a training loop",
    base: Path | None = None,
) -> Path:
    """Write the findings as one self-contained page; return its path.

    Args:
        doctor: after its `with`.
        path: of the page; an existing file is replaced.
        of: what was watched, such as the name of a script.
        base: the folder to which paths of files are relative; default: the working directory.

    Example:
        >>> import tempfile, torch, throughtime as tt
        >>> from pathlib import Path
        >>> from throughtime.app.report import doctor_page
        >>> gru = torch.nn.GRU(3, 8)
        >>> with tt.doctor() as d:
        ...     for x in torch.randn(120, 2, 3).split(10):
        ...         gru(x)[0].square().mean().backward()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = doctor_page.write_report(d, Path(folder) / "doctor.html")
        ...     page = path.read_text(encoding="utf-8")
        >>> "TT201" in page
        True
    """
    path, base = Path(path), base or Path.cwd()
    codes = [[code, fault] for code, (fault, _) in CODES.items()]
    sections = [
        Section("Findings", _summary(doctor, base)),
        *(
            Section(f"{x.code}, line {x.line} of {Path(x.file).name}", _finding_parts(x, base))
            for x in doctor.findings
        ),
        Section(
            "Faults that the doctor knows",
            [DataTable(["code", "fault"], codes, "All codes.", numeric=()), Paragraphs(_LIMITS)],
        ),
    ]
    page = Page(f"throughtime doctor: {of}", _lead(doctor), sections)
    write_atomically(path, render(page).encode())
    return path


def _lead(doctor: Doctor) -> str:
    count = len(doctor.findings)
    if count:
        return (
            f"{counted(count, 'fault')} in how the loop handles its recurrent state"
            " and its gradient."
        )
    return f"{doctor.verdict[0].upper()}{doctor.verdict[1:]}."


def _summary(doctor: Doctor, base: Path) -> list[Part]:
    parts: list[Part] = [Paragraphs(f"The loop ended with {doctor.ended}")] if doctor.ended else []
    error = doctor.internal_error
    if error is not None:
        parts.append(
            Paragraphs(
                "The doctor itself failed and stopped, so it may have missed something:"
                f" {type(error).__name__}: {error}"
            )
        )
    parts.append(Paragraphs(str(doctor.coverage)))
    if not doctor.findings:
        missing = doctor.coverage.missing
        return [*parts, Paragraphs(missing)] if missing and not doctor.ended else parts
    rows = [
        [x.code, f"{_relative(x, base)}:{x.line}", x.tensor or "\u2013", CODES[x.code][0]]
        for x in doctor.findings
    ]
    columns = ["code", "line", "tensor", "fault"]
    return [*parts, DataTable(columns, rows, "In the order of detection.", numeric=())]


def _finding_parts(finding: Finding, base: Path) -> list[Part]:
    """The fault, its place in the code, and the line to write."""
    message = finding.message[0].upper() + finding.message[1:]
    text = message + ("" if message.endswith(".") else ".")
    if finding.tensor:
        text += f" The tensor is {finding.tensor}."
    created, used = finding.created_in, finding.used_in
    if created and used:
        text += f" It was created in chunk {created} and used in chunk {used}."
    return [
        Paragraphs(text),
        _excerpt(finding, base),
        Paragraphs(f"Write: {finding.fix}"),
        WebLink(f"{finding.code}, with code before and after", finding.page),
    ]


def _excerpt(finding: Finding, base: Path) -> Part:
    """The lines around the finding, if they can still be read; a notebook's cell, too."""
    lines = linecache.getlines(finding.file)
    location = f"{_relative(finding, base)}, line {finding.line}"
    if not 0 < finding.line <= len(lines):
        return Paragraphs(f"{location}; the file is not available.")
    first = max(1, finding.line - _CONTEXT)
    return Code(lines[first - 1 : finding.line + _CONTEXT], first, finding.line, location)


def _relative(finding: Finding, base: Path) -> str:
    return finding.file.removeprefix(f"{base}{os.sep}")
