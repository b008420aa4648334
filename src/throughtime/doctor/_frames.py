"""The user's stack frames: the running line and the path to a variable.

A frame is the user's if its file belongs neither to a library nor to throughtime.
"""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from sys import _getframe as current_frame
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from throughtime.doctor._graph import storage_of

USER, LIBRARY, OURS = range(3)
PACKAGE = Path(__file__).parents[1]
# Files of throughtime that are skipped like a library's: the doctor, layers and wrappers that
# replace torch's, and what a loop does with its state. All are prefixes.
_PARTS = ("doctor", "nn", "kernels", "diagnose/trace", "diagnose/_slice", "state.py")
SKIPPED = ("<frozen", *(str(PACKAGE / part) for part in _PARTS))
LIBRARIES = (str(Path(os.__file__).parent), "<string>")  # Python's, and generated code
PART = "[...]"  # behind the path of a container
MAX_DEPTH = 2  # attributes in the path of a variable


@dataclass(frozen=True, eq=False)
class Instruction:
    """A bytecode instruction; `LoopEvents` makes one of each, and keeps its code."""

    code: CodeType
    line: "SourceLine"


class SourceLine(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        """The path from the working directory for a file below it, and the line."""
        return f"{self.file.removeprefix(f'{Path.cwd()}{os.sep}')}:{self.line}"


@cache
def file_owner(file: str) -> int:
    """The owner of a source file: `USER`, `LIBRARY` or `OURS`."""
    if file.startswith(SKIPPED):
        return LIBRARY
    if file.startswith(f"{PACKAGE}{os.sep}"):
        return OURS
    # site-packages, or dist-packages of a Linux distribution
    return LIBRARY if "-packages" in file or file.startswith(LIBRARIES) else USER


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The user's innermost frame; `None` if a frame of throughtime is met first."""
    while frame:
        owner = file_owner(frame.f_code.co_filename)
        if owner == USER:
            return frame
        if owner == OURS:
            return None
        frame = frame.f_back
    return None


def line_in(frame: FrameType) -> SourceLine:
    """The line that a frame runs."""
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


def current_line() -> SourceLine | None:
    """The line of user code now running."""
    frame = user_frame(current_frame())
    return line_in(frame) if frame else None


def tensors(tree: Any, depth: int = 3) -> list[Tensor]:
    """The tensors among arguments, results or values."""
    if isinstance(tree, Tensor):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree
    is_tree = isinstance(tree, (tuple, list, dict)) and depth
    return [each for part in branches for each in tensors(part, depth - 1)] if is_tree else []


def variable_path(storage: int, frame: FrameType) -> str:
    """The path of the first variable of a frame that is or holds a tensor, as `self.h`.

    Of a tensor with a graph in this storage; empty if there is none.
    """
    # those of a comprehension are not the loop's
    held = [] if ".0" in frame.f_locals else list(frame.f_locals.items())
    for path, value in held:
        if any(t.requires_grad and storage_of(t) == storage for t in tensors(value)):
            return path if isinstance(value, Tensor) else f"{path}{PART}"
        is_object = hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType))
        if is_object and path.count(".") < MAX_DEPTH:
            attributes = vars(value) | vars(value).get("_buffers", {})
            held += ((f"{path}.{key}", part) for key, part in attributes.items())
    return ""


def carrier(tensor: Tensor, frame: FrameType | None) -> tuple[str, Any]:
    """The variable of the loop that carries a tensor into an operation of this frame.

    Its path, and the line of the loop that passes it on as an argument, if any.
    Functions that receive it as an argument, and the `forward` of a module that keeps it, are
    inside the loop.
    """
    result, passed = ("", None), False
    while frame := user_frame(frame):
        code, path = frame.f_code, variable_path(storage_of(tensor), frame)
        if path:
            result = path, line_in(frame) if passed else None
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        is_argument = path.removesuffix(PART) in arguments
        if result[0] and not (is_argument or (path and code.co_name == "forward")):
            break
        passed, frame = passed or is_argument, frame.f_back
    return result
