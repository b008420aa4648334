"""The user's stack frames: the running line and the path to a variable.

Also the traceback of an error without the frames of the doctor.

A frame is the user's if its file belongs neither to a library nor to throughtime.
"""

import itertools
import os
import site
import sysconfig
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from sys import _getframe as current_frame
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import handle_torch_function

from throughtime.doctor._torch_private import share_memory

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
_LIBRARY_DIRS = [*site.getsitepackages(), *map(sysconfig.get_path, _PATH_NAMES)]
_RESOLVED_LIBRARY_DIRS = tuple(
    {*_LIBRARY_DIRS, *(str(Path(folder).resolve()) for folder in _LIBRARY_DIRS)}
)
_MODULE_CALLS = ("Module._wrapped_call_impl", "Module._call_impl")  # frames of nn.Module.__call__
NOT_SEARCHED = (type, Tensor, FunctionType, MethodType, ModuleType)
COMPREHENSIONS = {"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"}
INDICES = r"(\[[^\]]*\])+$"  # at the end of a path
CONTAINERS = {list, dict, set, deque, defaultdict}
MAX_PATH_DEPTH = 3  # at most so many attributes and indices in the path of a variable
MAX_ITEMS = 32  # items searched per container


class Instruction(NamedTuple):
    """A code object and a bytecode offset in it; `Watcher.instruction_at` makes one of each.

    Hashed by its identity: to hash a code object takes microseconds, since it covers the constants.
    """

    code: CodeType
    offset: int

    __hash__ = object.__hash__


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    line: int

    def __str__(self) -> str:
        """The path from the working directory for a file below it, and the line."""
        return f"{self.file.removeprefix(f'{Path.cwd()}{os.sep}')}:{self.line}"


@dataclass(frozen=True)
class Variable:
    """A variable of the user's loop that carries a tensor into an operation."""

    path: str  # empty if unknown
    line: SourceLine | None  # the line of the loop that runs
    is_argument: bool  # the loop passes it on as an argument


@cache
def file_owner(file: str) -> int:
    """The owner of a source file: `USER`, `LIBRARY`, `OURS` or `OPTIMIZER`."""
    if file.startswith(("<frozen", *SKIPPED)):
        return LIBRARY
    if file.startswith(f"{PACKAGE}{os.sep}"):
        return OURS
    if f"{os.sep}torch{os.sep}optim{os.sep}" in file:
        return OPTIMIZER
    if (
        file.startswith(_RESOLVED_LIBRARY_DIRS)
        or "site-packages" in file
        or file in {"<string>", "<__array_function__ internals>"}
    ):
        return LIBRARY
    return USER


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
    frames: list[FrameType] = []
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


def error_chain(error: BaseException) -> list[BaseException]:
    """An error, its causes, and the errors of a group."""
    chain = [error]
    for each in chain:
        grouped = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        chain += [
            other
            for other in (each.__cause__, each.__context__, *grouped)
            if other is not None and all(other is not known for known in chain)
        ]
    return chain


def remove_doctor_frames(error: BaseException) -> None:
    """Remove the doctor from the tracebacks of an error and its causes.

    The frames by which a module calls its own forward go with it: the hooks of the doctor change
    them, and they name no line of the user.
    """
    for each in error_chain(error):
        each.__traceback__ = _without_doctor(each.__traceback__)


def _without_doctor(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(f"{DOCTOR}{os.sep}"):
            # a function of torch hands itself to the mode, which calls it again
            if kept and kept[-1].tb_frame.f_code is handle_torch_function.__code__:
                del kept[-2:]
        elif not code.co_qualname.startswith(_MODULE_CALLS):
            kept.append(trace)
        trace = trace.tb_next
    for entry, following in itertools.zip_longest(kept, kept[1:]):
        entry.tb_next = following
    return kept[0] if kept else None


def called_by_trainer(frame: FrameType | None) -> bool:
    """Whether Lightning or Ignite code is between this frame and the user's."""
    while frame and file_owner(frame.f_code.co_filename) != USER:
        if str(frame.f_globals.get("__name__", "")).startswith(
            ("lightning.", "pytorch_lightning.", "ignite.")
        ):
            return True
        frame = frame.f_back
    return False


@cache
def line_of(instruction: Instruction) -> SourceLine:
    """The source line of a bytecode instruction."""
    code, offset = instruction
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= offset < end and number is not None:
            line = number
    return SourceLine(code.co_filename, line)


def variable_path(matches: Callable[[Any], bool], frame: FrameType | None) -> str:
    """The path from a user's variable to the first value that matches, such as `self.h[0]`.

    Empty if there is none. `self` is searched first.
    """
    return next(filter(None, (_path_in(each, matches) for each in user_frames(frame))), "")


def _path_in(frame: FrameType | None, matches: Callable[[Any], bool]) -> str:
    """The path from a variable of this frame, see `variable_path`; empty if there is none."""
    if frame is None or frame.f_code.co_name in COMPREHENSIONS:
        return ""
    variables = sorted(frame.f_locals.items(), key=lambda item: item[0] != "self")
    paths = (
        _search(value, matches, name, MAX_PATH_DEPTH)
        for name, value in variables
        if not name.startswith("__")
    )
    return next(filter(None, paths), "")


def call_site(frame: FrameType | None) -> int:
    """A number for the lines of all the user's frames from this one outwards."""
    return hash(tuple((id(each.f_code), each.f_lineno) for each in user_frames(frame)))


def carrying_variable(tensor: Tensor, frame: FrameType | None) -> Variable:
    """The variable of the loop that carries a tensor into an operation of this frame or below.

    Functions that receive it as an argument, and the `forward` of a module that keeps it, are
    inside the loop.
    """

    def matches(value: Any) -> bool:
        return value is tensor or (
            isinstance(value, Tensor) and value.requires_grad and share_memory(value, tensor)
        )

    frame, passed = user_frame(frame), False
    while frame and frame.f_code.co_name in COMPREHENSIONS:
        frame = user_frame(frame.f_back)
    if frame is None:
        return Variable("", None, is_argument=False)
    path = _path_in(frame, matches)
    while frame:
        is_argument = _in_arguments(frame, matches)
        outer = user_frame(frame.f_back)
        outer_path = _path_in(outer, matches)
        if not outer_path or not (is_argument or frame.f_code.co_name == "forward"):
            break
        frame, path, passed = outer, outer_path, passed or is_argument
    return Variable(path, line_in(frame) if frame else None, passed)


def _in_arguments(frame: FrameType, matches: Callable[[Any], bool]) -> bool:
    """Whether an argument of the function is a tensor that matches, or a container of it."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(
        _search(value, matches, name, MAX_PATH_DEPTH)
        for name in names
        if isinstance(value := frame.f_locals.get(name), (Tensor, tuple, list, dict))
    )


def _search(value: Any, matches: Callable[[Any], bool], path: str, depth: int) -> str | None:
    if matches(value):
        return path
    if depth == 0 or isinstance(value, Tensor):
        return None
    results = (_search(item, matches, path + name, depth - 1) for name, item in _items(value))
    return next(filter(None, results), None)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The items or attributes of a value, each with its path suffix, such as `[0]` or `.h`."""
    if isinstance(value, (tuple, list)):
        items = ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, (set, deque)):
        items = (("[...]", item) for item in list(value))
    elif isinstance(value, dict):
        items = ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, nn.Module):
        names = vars(value) | dict(value.named_buffers(recurse=False))
        names.pop("_buffers", None)
        yield from ((f".{key}", item) for key, item in names.items() if not key.startswith("__"))
        return
    elif hasattr(value, "__dict__") and not isinstance(value, NOT_SEARCHED):
        items = ((f".{key}", item) for key, item in vars(value).items())
    else:
        return
    yield from list(itertools.islice(items, MAX_ITEMS))


def container_of(tensors: list[Tensor]) -> str:
    """The user's list, dict, set or deque that holds many of these tensors; empty if none does.

    They may lie in rows of it, such as tuples or objects. A deque of limited length does not count.
    """
    ids = set(map(id, tensors))

    def holds_many(value: Any) -> bool:
        if type(value) not in CONTAINERS or len(value) > MAX_ITEMS * len(tensors):
            return False
        rows = value.values() if isinstance(value, dict) else list(value)
        kept = (_search(row, lambda item: id(item) in ids, "row", MAX_PATH_DEPTH) for row in rows)
        limited = isinstance(value, deque) and value.maxlen is not None
        return not limited and sum(map(bool, kept)) >= max(4, len(tensors) // 3)

    return variable_path(holds_many, current_frame())
