"""The user's stack frames: the running line and the path to a variable.

A frame is the user's if its file belongs neither to a library nor to throughtime.
"""

import os
import site
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from sys import _getframe as current_frame
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from throughtime.doctor._graph import storage_of

USER, LIBRARY, OURS, OPTIMIZER = 0, 1, 2, 3
DOCTOR = Path(__file__).parent
PACKAGE = DOCTOR.parent
STATE = str(PACKAGE / "state.py")
# Files of throughtime that are skipped like a library's: the doctor, layers and wrappers that
# replace torch's, and what a loop does with its state. The last three are prefixes of file names.
SKIPPED = (
    str(DOCTOR),
    f"{PACKAGE / 'nn'}{os.sep}",
    f"{PACKAGE / 'kernels'}{os.sep}",
    str(PACKAGE / "diagnose" / "trace"),
    str(PACKAGE / "diagnose" / "_slice"),
    STATE,
)
_PATH_NAMES = ("stdlib", "platstdlib", "purelib", "platlib")
_FOLDERS = [*site.getsitepackages(), *map(sysconfig.get_path, _PATH_NAMES)]
LIBRARY_FOLDERS = (*_FOLDERS, *(str(Path(folder).resolve()) for folder in _FOLDERS))
NOT_SEARCHED = (type, Tensor, FunctionType, MethodType, ModuleType)
COMPREHENSIONS = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}
PART = "[...]"  # behind the path of a container
MAX_DEPTH = 2  # attributes in the path of a variable
MAX_ITEMS = 64  # items searched per container


class Instruction(NamedTuple):
    """A code object and a bytecode offset in it; `Watcher.instruction_at` makes one of each.

    Hashed by its identity: to hash a code object takes microseconds, since it covers the constants.
    """

    code: CodeType
    offset: int

    __hash__ = object.__hash__


class SourceLine(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        """The path from the working directory for a file below it, and the line."""
        return f"{self.file.removeprefix(f'{Path.cwd()}{os.sep}')}:{self.line}"


# the path of a variable, and the line of the loop that passes it on as an argument
Carrier = tuple[str, SourceLine | None]


@cache
def file_owner(file: str) -> int:
    """The owner of a source file: `USER`, `LIBRARY`, `OURS` or `OPTIMIZER`."""
    if file.startswith(("<frozen", *SKIPPED)):
        return LIBRARY
    if file.startswith(f"{PACKAGE}{os.sep}"):
        return OURS
    if f"{os.sep}torch{os.sep}optim{os.sep}" in file:
        return OPTIMIZER
    generated = {"<string>", "<__array_function__ internals>"}
    is_library = file.startswith(LIBRARY_FOLDERS) or "site-packages" in file or file in generated
    return LIBRARY if is_library else USER


def user_frame(frame: FrameType | None, *, skip_optimizer: bool = True) -> FrameType | None:
    """The user's innermost frame; `None` if a frame of throughtime is met first.

    Frames of `torch.optim` are skipped; with `skip_optimizer=False` they also give `None`.
    """
    while frame:
        owner = file_owner(frame.f_code.co_filename)
        if owner == USER:
            return frame
        if owner == OURS or (owner == OPTIMIZER and not skip_optimizer):
            return None
        frame = frame.f_back
    return None


def user_frames(frame: FrameType | None) -> list[FrameType]:
    """The user's frames from this one outwards, as `user_frame` gives them."""
    frames = list[FrameType]()
    while frame := user_frame(frame):
        frames.append(frame)
        frame = frame.f_back
    return frames


def line_in(frame: FrameType) -> SourceLine:
    """The line that a frame runs."""
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


def current_line() -> SourceLine | None:
    """The line of user code now running."""
    frame = user_frame(current_frame())
    return line_in(frame) if frame else None


@cache
def line_of(instruction: Instruction) -> SourceLine:
    """The source line of a bytecode instruction."""
    code, offset = instruction
    lines = (line for start, end, line in code.co_lines() if start <= offset < end and line)
    return SourceLine(code.co_filename, next(lines, code.co_firstlineno))


def variable_path(matches: Callable[[Tensor], bool], frame: FrameType) -> str:
    """The path of the first variable of a frame that is or holds a matching tensor, as `self.h`.

    Empty if there is none. `self` is searched first.
    """
    variables = sorted(frame.f_locals.items(), key=lambda item: item[0] != "self")
    for name, value in variables if frame.f_code.co_name not in COMPREHENSIONS else ():
        held = [] if name.startswith("__") else [(name, value)]
        for path, each in held:
            if any(map(matches, tensors(each))):
                return path if isinstance(each, Tensor) else f"{path}{PART}"
            is_object = hasattr(each, "__dict__") and not isinstance(each, NOT_SEARCHED)
            if is_object and path.count(".") < MAX_DEPTH:
                attributes = vars(each) | vars(each).get("_buffers", {})
                held += ((f"{path}.{key}", part) for key, part in attributes.items())
    return ""


def tensors(tree: Any, depth: int = 3) -> list[Tensor]:
    """The tensors among arguments, results or values; of a long list those at its end."""
    if isinstance(tree, Tensor):
        return [tree]
    branches = list(tree.values()) if isinstance(tree, dict) else tree
    if not isinstance(branches, (tuple, list)) or not depth:
        return []
    return [each for branch in branches[-MAX_ITEMS:] for each in tensors(branch, depth - 1)]


def carrier(tensor: Tensor, frame: FrameType | None) -> Carrier:
    """The variable of the loop that carries a tensor into an operation of this frame.

    Functions that receive it as an argument, and the `forward` of a module that keeps it, are
    inside the loop.
    """
    storage, result, passed = storage_of(tensor), ("", None), False
    for each in user_frames(frame):
        code = each.f_code
        path = variable_path(lambda t: t.requires_grad and storage_of(t) == storage, each)
        if path:
            result = path, line_in(each) if passed else None
        is_argument = (
            path.removesuffix(PART) in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        )
        if result[0] and not (is_argument or (path and code.co_name == "forward")):
            break
        passed |= is_argument
    return result
