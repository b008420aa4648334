"""Where in the user's own code something happened: the innermost frame that belongs to no library."""

import os
import site
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from sys import _getframe as frame_at
from types import CodeType, FrameType

USER, LIBRARY, OURS, OPTIMIZER = 0, 1, 2, 3
HERE = str(Path(__file__).parent)
PACKAGE = str(Path(__file__).parent.parent.parent)
LAYERS = tuple(
    f"{Path(PACKAGE, part)}{os.sep}" for part in ("nn", "kernels", "probe/trace")
)  # stand in for torch's
_LIBRARIES = tuple(
    {
        str(Path(p).resolve())
        for p in (
            *site.getsitepackages(),
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("platstdlib"),
        )
    }
    | {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)
_KINDS: dict[str, int] = {}

Key = tuple[CodeType, int]
"""One instruction of the user's code."""


@dataclass(frozen=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def kind_of(file: str) -> int:
    """Whose file it is; the answer is kept."""
    kind = _KINDS.get(file)
    if kind is None:
        kind = _KINDS[file] = _classified(file)
    return kind


def _classified(file: str) -> int:
    if file.startswith((HERE, "<frozen", *LAYERS)):
        return LIBRARY
    if file.startswith(PACKAGE):
        return OURS
    if f"{os.sep}torch{os.sep}optim{os.sep}" in file:
        return OPTIMIZER
    if (
        file.startswith(_LIBRARIES)
        or "site-packages" in file
        or file in {"<string>", "<__array_function__ internals>"}
    ):
        return LIBRARY
    return USER


def innermost(frame: FrameType | None, through: int = OURS) -> FrameType | None:
    """The innermost frame of the user; `None` where throughtime itself comes first, whose own loops
    are not the user's.

    With `through=LIBRARY` an optimizer's own work is none of the user's either.
    """
    while frame is not None:
        kind = _KINDS.get(frame.f_code.co_filename)
        if kind is None:
            kind = kind_of(frame.f_code.co_filename)
        if kind == USER:
            return frame
        if kind == OURS or (kind == OPTIMIZER and through == LIBRARY):
            return None
        frame = frame.f_back
    return None


def here(depth: int = 1) -> Place | None:
    """The user's line that is running."""
    frame = innermost(frame_at(depth))
    return Place(frame.f_code.co_filename, frame.f_lineno) if frame else None


def through_framework(frame: FrameType | None) -> bool:
    """Whether a trainer of a framework stands between here and the user's code."""
    while frame is not None and kind_of(frame.f_code.co_filename) != USER:
        if str(frame.f_globals.get("__name__", "")).startswith(
            ("lightning.", "pytorch_lightning.", "ignite.")
        ):
            return True
        frame = frame.f_back
    return False


def line_of(key: Key) -> Place:
    """The line of an instruction."""
    code, at = key
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            line = number
    return Place(code.co_filename, line)
