"""Where the states at the edges of a sweep's pieces are kept: on their device, in CPU memory, or in
a file.

One tensor for each leaf, `(edges, B, ...)`: written once in order, read once backwards.
"""

import os
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from throughtime import state as trees
from throughtime.errors import ConfigError, StateError
from throughtime.state import State

Offload: TypeAlias = str | Path | None  # "cpu", or a folder


class Edges:
    """The states entering the pieces of a sweep, by number."""

    def __init__(self, count: int, offload: Offload) -> None:
        self._count, self._offload = count, offload
        self._rows: list[Tensor] = []
        self._like: State = None

    def put(self, index: int, state: State) -> None:
        """Copies a state in."""
        if not self._rows:
            self._like = state
            self._rows = [self._room(leaf) for leaf in trees.tensors(state)]
        names = [name for name, _ in trees.leaves(state)]
        if len(names) != len(self._rows):
            raise StateError(
                f"the state has the leaves {names} now and had"
                f" {[name for name, _ in trees.leaves(self._like)]} at the start: it must keep its"
                " structure from step to step"
            )
        for rows, (name, leaf) in zip(self._rows, trees.leaves(state), strict=True):
            if rows.shape[1:] != leaf.shape or rows.dtype != leaf.dtype:
                raise StateError(
                    f"state leaf '{name}' is {tuple(leaf.shape)} {leaf.dtype} now and was"
                    f" {tuple(rows.shape[1:])} {rows.dtype} at the start: an exact gradient keeps"
                    " states side by side, so they must not grow or change type; give the leaf its"
                    " full size from the first step on"
                )
            rows[index].copy_(leaf.detach())

    def get(self, index: int) -> State:
        """A copy of a state, on the device it came from."""
        rows = iter(self._rows)
        return trees.map_leaves(
            lambda leaf: next(rows)[index].to(leaf.device, copy=True), self._like
        )

    def _room(self, leaf: Tensor) -> Tensor:
        shape = (self._count, *leaf.shape)
        if self._offload is None:
            return leaf.new_empty(shape)
        if self._offload == "cpu":
            return torch.empty(shape, dtype=leaf.dtype, pin_memory=leaf.is_cuda)
        return _in_file(Path(self._offload), shape, leaf.dtype)


def _in_file(folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a file that has no name any more: it goes when the tensor does, whatever happens."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="throughtime-", suffix=".edges") as file:
        size = torch.Size(shape).numel()
        if hasattr(
            os, "posix_fallocate"
        ):  # a full disk is an error here and now, not a crash when a page is written
            os.posix_fallocate(file.fileno(), 0, max(1, size * dtype.itemsize))
        return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(shape)


def check_offload(offload: Offload) -> None:
    """Refuses a folder that is not there."""
    if offload not in (None, "cpu") and not Path(str(offload)).is_dir():
        raise ConfigError(
            f"offload={str(offload)!r}: expected None, 'cpu', or a folder that exists, for a"
            " temporary file"
        )
