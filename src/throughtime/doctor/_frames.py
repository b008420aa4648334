"""The user's frames: the line that runs, the path of a variable, the line that fills a list.

A frame is the user's if its file belongs neither to a library nor to throughtime.
"""

import ast
import gc
import itertools
import os
import re
import site
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from sys import _getframe as current_frame
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

USER, LIBRARY, OURS, OPTIMIZER = 0, 1, 2, 3
DOCTOR = Path(__file__).parent
PACKAGE = DOCTOR.parent
# The doctor itself, and what replaces torch's layers or wraps them: as transparent as a library.
TRANSPARENT = (
    str(DOCTOR),
    f"{PACKAGE / 'nn'}{os.sep}",
    f"{PACKAGE / 'kernels'}{os.sep}",
    str(PACKAGE / "diagnose" / "trace"),
    str(PACKAGE / "diagnose" / "_trace"),
)
_SCHEMES = ("stdlib", "platstdlib", "purelib", "platlib")
_FOLDERS = [*site.getsitepackages(), *map(sysconfig.get_path, _SCHEMES)]
_LIBRARIES = tuple({*_FOLDERS, *(str(Path(folder).resolve()) for folder in _FOLDERS)})
_KINDS: dict[str, int] = {}
PATH_DEPTH = 3  # attributes and indices in the path of a variable
MAX_BRANCHES = 32  # items of a container that are searched

Instruction = tuple[CodeType, int]
"""One instruction of the user's code."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def file_kind(file: str) -> int:
    """The owner of a source file: `USER`, `LIBRARY`, `OURS` or `OPTIMIZER`."""
    kind = _KINDS.get(file)
    if kind is None:
        kind = _KINDS[file] = _classify(file)
    return kind


def _classify(file: str) -> int:
    if file.startswith(("<frozen", *TRANSPARENT)):
        return LIBRARY
    if file.startswith(f"{PACKAGE}{os.sep}"):
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


def user_frame(frame: FrameType | None, *, skip_optimizer: bool = True) -> FrameType | None:
    """The user's innermost frame; `None` if a frame of throughtime comes first.

    Loops of throughtime are not the user's. Neither is the work of an optimizer, unless
    `skip_optimizer`.
    """
    while frame is not None:
        kind = _KINDS.get(frame.f_code.co_filename)
        if kind is None:
            kind = file_kind(frame.f_code.co_filename)
        if kind == USER:
            return frame
        if kind == OURS or (kind == OPTIMIZER and not skip_optimizer):
            return None
        frame = frame.f_back
    return None


def current_line(depth: int = 1) -> SourceLine | None:
    """The user's line that runs now."""
    frame = user_frame(current_frame(depth))
    return SourceLine(frame.f_code.co_filename, frame.f_lineno) if frame else None


def called_by_framework(frame: FrameType | None) -> bool:
    """Whether a trainer of Lightning or Ignite runs between this frame and the user's code."""
    while frame is not None and file_kind(frame.f_code.co_filename) != USER:
        if str(frame.f_globals.get("__name__", "")).startswith(
            ("lightning.", "pytorch_lightning.", "ignite.")
        ):
            return True
        frame = frame.f_back
    return False


def line_of(instruction: Instruction) -> SourceLine:
    """The line of an instruction."""
    code, offset = instruction
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
    return SourceLine(code.co_filename, line)


def enclosing_for(line: SourceLine) -> SourceLine:
    """The innermost `for` around a line; the line itself if there is none."""
    try:
        tree = ast.parse(Path(line.file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return line
    starts = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and node.lineno < line.line <= (node.end_lineno or node.lineno)
    ]
    return SourceLine(line.file, max(starts)) if starts else line


def variable_path(matches: Callable[[Any], bool], frame: FrameType | None) -> str:
    """The path from a user's variable to the first value that matches, such as `self.h[0]`.

    `""` if no frame reaches such a value. Attributes of `self` come first.
    """
    while frame is not None:
        if file_kind(frame.f_code.co_filename) == USER:
            for name, value in sorted(frame.f_locals.items(), key=lambda item: item[0] != "self"):
                path = None if name.startswith("__") else _search(value, matches, name, PATH_DEPTH)
                if path:
                    return re.sub(r"\._buffers\['(.*?)'\]", r".\1", path)
        frame = frame.f_back
    return ""


def _search(value: Any, matches: Callable[[Any], bool], path: str, depth: int) -> str | None:
    if matches(value):
        return path
    if depth == 0 or isinstance(value, Tensor):
        return None
    results = (_search(item, matches, path + name, depth - 1) for name, item in _branches(value))
    return next(filter(None, results), None)


def _branches(value: Any) -> Iterator[tuple[str, Any]]:
    """The items or attributes of a value, with their part of the path."""
    if isinstance(value, (tuple, list)):
        branches = ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, dict):
        branches = ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, nn.Module):
        names = (*vars(value).items(), *value.named_buffers(recurse=False))
        yield from ((f".{key}", item) for key, item in names if not key.startswith("__"))
        return
    elif (
        hasattr(value, "__dict__") and not isinstance(value, (type, Tensor)) and not callable(value)
    ):
        branches = ((f".{key}", item) for key, item in vars(value).items())
    else:
        return
    yield from list(itertools.islice(branches, MAX_BRANCHES))


def container_of(tensors: list[Tensor]) -> Any:
    """The list or dict that holds many of these tensors, directly or in pairs.

    Costs one pass over all objects of the process, or two.
    """
    ids = {id(tensor) for tensor in tensors}
    referrers = [c for c in gc.get_referrers(*tensors) if c is not tensors]
    pairs = [c for c in referrers if type(c) is tuple]
    ids |= {id(pair) for pair in pairs}
    if pairs:
        referrers += [c for c in gc.get_referrers(*pairs) if c is not pairs]
    for container in referrers:
        if type(container) in {list, dict} and container is not referrers:
            items = list(container.values()) if isinstance(container, dict) else container
            if sum(id(item) in ids for item in items) >= max(4, len(tensors) // 3):
                return container
    return None


def _names_of(container: Any) -> set[str]:
    """The variables and attributes that refer to a container."""
    names: set[str] = set()
    frame: FrameType | None = current_frame()
    while frame is not None:
        if file_kind(frame.f_code.co_filename) == USER:
            names |= {name for name, value in frame.f_locals.items() if value is container}
        frame = frame.f_back
    for owner in gc.get_referrers(container):
        attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if isinstance(attributes, dict):
            names |= {
                key
                for key, value in list(attributes.items())
                if value is container and isinstance(key, str)
            }
    return names


def line_that_fills(container: Any, files: set[str]) -> tuple[SourceLine, str] | None:
    """The line `name.append(...)` of a user's file, with the name."""
    for name in sorted(_names_of(container)):
        filling = re.compile(
            rf"\b{re.escape(name)}(\.(append|extend|insert|add)\(|\s*\+=|\[.*\]\s*=)"
        )
        for file in sorted(files):
            try:
                lines = Path(file).read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            for number, line in enumerate(lines, 1):
                if filling.search(line):
                    return SourceLine(file, number), name
    return None
