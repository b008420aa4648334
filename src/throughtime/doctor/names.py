"""What the user calls a tensor or a list: found by identity in the frames that are running."""

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from sys import _getframe as frame_at
from types import FrameType
from typing import Any

from torch import Tensor, nn

from throughtime.doctor.frames import USER, Place, kind_of

DEPTH = 3


def _branches(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value[:32]))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:32])
    elif isinstance(value, nn.Module):
        yield from (
            (f".{key}", item)
            for key, item in (*vars(value).items(), *value.named_buffers(recurse=False))
            if not key.startswith("__")
        )
    elif (
        hasattr(value, "__dict__") and not isinstance(value, (type, Tensor)) and not callable(value)
    ):
        yield from ((f".{key}", item) for key, item in list(vars(value).items())[:32])


def _within(value: Any, wanted: Callable[[Any], bool], path: str, depth: int) -> str | None:
    if wanted(value):
        return path
    if depth == 0 or isinstance(value, Tensor):
        return None
    for name, branch in _branches(value):
        found = _within(branch, wanted, path + name, depth - 1)
        if found:
            return found
    return None


def name_of(wanted: Callable[[Any], bool], frame: FrameType | None) -> str:
    """The path under which what is wanted can be reached from the user's frames, `""` where it cannot; attributes come first."""
    while frame is not None:
        if kind_of(frame.f_code.co_filename) == USER:
            for name, value in sorted(frame.f_locals.items(), key=lambda item: item[0] != "self"):
                found = None if name.startswith("__") else _within(value, wanted, name, DEPTH)
                if found:
                    return (
                        found.replace("._buffers['", ".").replace("']", "")
                        if "._buffers['" in found
                        else found
                    )
        frame = frame.f_back
    return ""


def holder_of(tensors: list[Tensor]) -> Any:
    """The list or dict that keeps many of these tensors, directly or in pairs.

    One pass over what is alive for each.
    """
    ids = {id(tensor) for tensor in tensors}
    around = [c for c in gc.get_referrers(*tensors) if c is not tensors]
    pairs = [c for c in around if type(c) is tuple]
    held = {id(pair) for pair in pairs}
    if pairs:
        around += [c for c in gc.get_referrers(*pairs) if c is not pairs]
    for holder in around:
        if type(holder) in {list, dict} and holder is not around:
            inside = list(holder.values()) if isinstance(holder, dict) else holder
            if sum(id(item) in ids or id(item) in held for item in inside) >= max(
                4, len(tensors) // 3
            ):
                return holder
    return None


def names_of_holder(holder: Any) -> set[str]:
    """Variables and attributes that a container is bound to."""
    found: set[str] = set()
    frame: FrameType | None = frame_at()
    while frame is not None:
        if kind_of(frame.f_code.co_filename) == USER:
            found |= {name for name, value in frame.f_locals.items() if value is holder}
        frame = frame.f_back
    for owner in gc.get_referrers(holder):
        inside = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None)
        if isinstance(inside, dict):
            found |= {
                key
                for key, value in list(inside.items())
                if value is holder and isinstance(key, str)
            }
    return found


def line_that_fills(holder: Any, files: set[str]) -> tuple[Place, str] | None:
    """The line `name.append(...)` of a user's file, with the name."""
    for name in sorted(names_of_holder(holder)):
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
                    return Place(file, number), name
    return None
