"""What of a batch is split along time, and what every split gets whole.

Shapes: `B` lanes, `T` steps. As in Lightning 1.9 batches come lanes first, `(B, T, ...)`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from throughtime.errors import ConfigError


class TBPTTError(ConfigError, MisconfigurationException):
    """A module or a batch that cannot be split.

    `except MisconfigurationException` catches it too, as in Lightning 1.9.
    """


def steps(batch: Any, whole: Collection[int | str] = ()) -> int:
    """The number of steps of a batch.

    Args:
        batch: a tensor, a mapping, or a tuple or list of items.
        whole: keys or positions of the items that do not count.

    Raises:
        TBPTTError: a name in `whole` that the batch does not have, no item with a time dimension,
            or two that disagree.
    """
    items = dict(_items(batch))
    if unknown := [name for name in whole if name not in items]:
        raise TBPTTError(
            f"tbptt_whole names {unknown}, the batch has {list(items)}. Name keys of a mapping, or"
            " positions of a list."
        )
    found = {name: _lengths(item) for name, item in items.items() if name not in whole}
    timed = {name: sorted(lengths) for name, lengths in found.items() if lengths}
    if not timed:
        raise TBPTTError(
            f"no time dimension in a {type(batch).__name__}: expected a tensor (B, T, ...) or a"
            " list of B rows, alone or in a mapping, tuple or list. Override"
            " tbptt_split_batch(self, batch, split_size) for another layout."
        )
    lengths = {length for several in timed.values() for length in several}
    if len(lengths) > 1 or lengths == {0}:
        raise TBPTTError(
            f"the time dimension is ambiguous, steps by item: {timed}; expected one number, above"
            f" 0. If an item has no time, name it: tbptt_whole = ({list(timed)[-1]!r},). Override"
            " tbptt_split_batch(self, batch, split_size) for another layout."
        )
    return lengths.pop()


def cut(batch: Any, at: slice, whole: Collection[int | str] = ()) -> Any:
    """Some steps of a batch: a dict for a mapping, the same type for a namedtuple, a view for a tensor, else a list."""
    if isinstance(batch, Tensor):
        return _cut(batch, at)
    parts = {name: item if name in whole else _cut(item, at) for name, item in _items(batch)}
    if isinstance(batch, Mapping):
        return parts
    return type(batch)(*parts.values()) if hasattr(batch, "_fields") else list(parts.values())


def shares(lengths: Sequence[int], count: int) -> list[float]:
    """What part of the steps of a batch each of its splits has.

    Raises:
        TBPTTError: not one number per split, or no steps at all.
    """
    if len(lengths) != count or min(lengths) < 0 or sum(lengths) == 0:
        raise TBPTTError(
            f"tbptt_split_steps returned {list(lengths)} for {count} splits; expected the steps of"
            " each, by which gradients are weighted"
        )
    return [length / sum(lengths) for length in lengths]


def _items(batch: Any) -> list[tuple[int | str, Any]]:
    if isinstance(batch, Mapping):
        return list(batch.items())
    return list(enumerate(batch)) if _lists(batch) else [(0, batch)]


def _lists(item: Any) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str | bytes)


def _rows(item: Any) -> bool:
    """Whether an item has a row for each lane: something is in it, and all of it can be cut."""
    return (
        _lists(item)
        and len(item) > 0
        and all(row.dim() > 0 if isinstance(row, Tensor) else _lists(row) for row in item)
    )


def _lengths(item: Any) -> set[int]:
    """The steps that an item says it has; none for an item without time."""
    if isinstance(item, Tensor):
        return {item.shape[1]} if item.dim() > 1 else set()
    if isinstance(item, Mapping):
        return {length for part in item.values() for length in _lengths(part)}
    if not _rows(item):
        return set()
    if len(shapes := {tuple(row.shape[1:]) for row in item if isinstance(row, Tensor)}) > 1:
        raise TBPTTError(
            f"a list of tensors that differ by more than their steps, {sorted(shapes)}, is no list"
            " of rows; a nested batch, or one of several dataloaders? Override"
            " tbptt_split_batch(self, batch, split_size)."
        )
    return {len(row) for row in item}


def _cut(item: Any, at: slice) -> Any:
    if isinstance(item, Tensor):
        return item[:, at] if item.dim() > 1 else item
    if isinstance(item, Mapping):
        return {name: _cut(part, at) for name, part in item.items()}
    return [row[at] for row in item] if _rows(item) else item
