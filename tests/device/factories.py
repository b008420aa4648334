"""Tensors and modules that a test makes are made on the device, and chunks that it reads are there.

The tests of the CPU say no device. Here the functions that make tensors default to the mock device,
if a test calls them: itself, or through the constructor of a layer. What the library calls stays as
it is, so that a tensor which it makes on the CPU by mistake meets those of the device.
"""

import functools
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mock_device import DEVICE
from torch import Tensor

import throughtime as tt
from throughtime.chunk import Chunk

NAMES = (
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm", "arange", "eye"),
    *("linspace", "logspace", "tensor", "as_tensor", "empty_strided", "from_numpy"),
)
TESTS = str(Path(__file__).parents[1])
TORCH = str(Path(torch.__file__).parent)


@contextmanager
def factories_on_device() -> Generator[None]:
    """In this block, tensors that tests make without naming a device are on the mock device."""
    wrapped: dict[str, Any] = {f"torch.{name}": _wrap(getattr(torch, name)) for name in NAMES}
    wrapped["torch.autocast"] = _Autocast
    with ExitStack() as stack:
        for name, factory in wrapped.items():
            stack.enter_context(mock.patch(name, factory))
        stack.enter_context(mock.patch.object(tt.Stream, "read", _read(tt.Stream.read)))
        stack.enter_context(mock.patch.object(tt.Stream, "__iter__", _iter(tt.Stream.__iter__)))
        yield


def _wrap(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is not None or not _called_by_a_test():
            return factory(*args, **kwargs)
        if args and isinstance(args[0], Tensor):  # as_tensor(x) leaves x where it is
            return factory(*args, **kwargs)
        if factory.__name__ == "from_numpy" or kwargs.get("generator") is not None:
            return factory(*args, **kwargs).to(DEVICE)  # a generator of the CPU draws there
        return factory(*args, **(kwargs | {"device": DEVICE}))

    return call


def _read(read: Callable[..., Chunk]) -> Callable[..., Chunk]:
    def call(self: tt.Stream, start: int, stop: int) -> Chunk:
        chunk = read(self, start, stop)
        return chunk.to(DEVICE) if _called_by_a_test() else chunk

    return call


def _iter(chunks: Callable[..., Iterator[Chunk]]) -> Callable[..., Iterator[Chunk]]:
    def call(self: tt.Stream) -> Iterator[Chunk]:
        by_test = _called_by_a_test()
        return (chunk.to(DEVICE) if by_test else chunk for chunk in chunks(self))

    return call


class _Autocast(torch.autocast):
    """That of the device, where a test says that of the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        own = device_type == "cpu" and _called_by_a_test()
        super().__init__(DEVICE.type if own else device_type, *args, **kwargs)


def _called_by_a_test() -> bool:
    """Whether the first caller that is not PyTorch is a test."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, "<")):
            return file.startswith(TESTS)
        frame = frame.f_back
    return False
