"""What the doctor found as a page: finding by finding, with the lines of the user's code and what to write."""

import linecache
from collections.abc import Sequence
from pathlib import Path

from throughtime._files import write_atomically
from throughtime.app.report.page import Code, Link, Page, Part, Section, Table, Text, render
from throughtime.doctor import CODES, Doctor, Finding

_AROUND = 4  # lines of code shown before and after the one that is named


def write_report(
    doctor: Doctor,
    path: Path | str,
    *,
    of: str = "a training loop",
    ended: str = "",
    base: Path | None = None,
) -> Path:
    """Writes what was found as one self-contained page; returns its path.

    Args:
        doctor: after its `with`.
        path: of the page; one that is there is replaced.
        of: what was watched, say the name of a script.
        ended: how the loop ended, if not well: an exception in words.
        base: where the paths of files begin; default: the working directory.

    Returns:
        The path.

    Example:
        >>> import tempfile, torch, throughtime as tt
        >>> from pathlib import Path
        >>> from throughtime.app.report import doctor_page
        >>> gru = torch.nn.GRU(3, 8)
        >>> with tt.doctor() as d:
        ...     for x in torch.randn(120, 2, 3).split(10):
        ...         gru(x)[0].square().mean().backward()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = doctor_page.write_report(d, Path(folder) / "doctor.html").read_text(encoding="utf-8")
        >>> "TT201" in page
        True
    """
    path = Path(path)
    write_atomically(path, render(page_of(doctor, of, ended, base or Path.cwd())).encode())
    return path


def page_of(doctor: Doctor, of: str, ended: str, base: Path) -> Page:
    """The page itself."""
    found = doctor.findings
    sections = [Section("What was found", _summary(doctor, ended))]
    sections += [
        Section(
            f"{finding.code}, line {finding.line} of {Path(finding.file).name}",
            _told(finding, base),
        )
        for finding in found
    ]
    sections += [Section("What was looked for", [_codes(), Text(_LIMITS)])]
    return Page(f"throughtime doctor: {of}", _lead(doctor), sections)


_LIMITS = (
    "Only what is certain is said. Chunks that come from files, from workers or through NumPy are"
    " not known to follow one another, and then TT201, TT204, TT206 and TT207 may stay silent."
    " Loops of throughtime itself are not looked at."
)


def _lead(doctor: Doctor) -> str:
    count = len(doctor.findings)
    if not count:
        return (
            "Nothing was found."
            if doctor.internal_error is None
            else "Nothing was found before the doctor itself failed."
        )
    return (
        f"{count} fault{'s' if count > 1 else ''} in how its recurrent state and its gradient are"
        " handled."
    )


def _summary(doctor: Doctor, ended: str) -> list[Part]:
    parts: list[Part] = [Text(f"The loop ended with {ended}")] if ended else []
    if doctor.internal_error is not None:
        what = f"{type(doctor.internal_error).__name__}: {doctor.internal_error}"
        parts.append(
            Text(
                "The doctor itself failed and stopped looking, so that something may have been"
                f" missed: {what}"
            )
        )
    if not doctor.findings:
        return [*parts, Text("No fault was seen in what the loop did while it was watched.")]
    rows = [
        [f.code, f"{f.file}:{f.line}", f.tensor or "\u2013", CODES[f.code][0]]
        for f in doctor.findings
    ]
    return [
        *parts,
        Table(
            ["code", "where", "tensor", "what"],
            rows,
            "In the order in which they were found.",
            numeric=(),
        ),
    ]


def _told(finding: Finding, base: Path) -> list[Part]:
    """What is wrong, where, and what to write."""
    chunks = (
        f" Made in chunk {finding.made}, used in chunk {finding.used}."
        if finding.made and finding.used
        else ""
    )
    of = f" It is about {finding.tensor}." if finding.tensor else ""
    message = finding.message[0].upper() + finding.message[1:]
    return [
        Text(f"{message}{'' if message.endswith('.') else '.'}{of}{chunks}"),
        *_excerpt(finding, base),
        Text(f"What to write: {finding.fix}"),
        Link(f"{finding.code}, with a before and an after", finding.page),
    ]


def _excerpt(finding: Finding, base: Path) -> Sequence[Part]:
    """The lines around it, if the file can still be read; those of a notebook's cell, too."""
    path = base / finding.file
    lines = linecache.getlines(str(path) if path.is_file() else finding.file)
    if not 0 < finding.line <= len(lines):
        return [Text(f"{finding.file}, line {finding.line}; the file is not at hand.")]
    first = max(1, finding.line - _AROUND)
    return [
        Code(
            lines[first - 1 : finding.line + _AROUND],
            first,
            finding.line,
            f"{finding.file}, line {finding.line}",
        )
    ]


def _codes() -> Table:
    rows = [[code, what] for code, (what, _) in CODES.items()]
    return Table(["code", "fault"], rows, "Every fault that the doctor knows.", numeric=())
