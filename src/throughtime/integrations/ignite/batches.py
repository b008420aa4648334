"""Batches of any nesting, cut along time.

The rule: every tensor of a batch is cut along `dim`, and all must have equally many steps there,
but those whose place is named in `static`; these, and whatever is no tensor, go whole into every
chunk. A place is the path to it, keys and numbers joined by dots: `"1"`, `"speaker"`,
`"0.meta.age"`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from throughtime.errors import DataError

Batch = Any  # a nesting of tensors and anything else; `steps_of` checks it at run time


def _mapped(fn: Callable[[str, Any], Any], tree: Batch, path: str = "") -> Batch:
    """The same nesting around `fn(path, leaf)`."""
    at = f"{path}." if path else ""
    if isinstance(tree, Mapping):
        return cast("Any", type(tree))(
            {key: _mapped(fn, branch, f"{at}{key}") for key, branch in tree.items()}
        )
    if isinstance(tree, (tuple, list)):
        branches = [_mapped(fn, branch, f"{at}{i}") for i, branch in enumerate(tree)]
        return (
            cast("Any", type(tree))(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
        )
    return fn(path, tree)


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """Every tensor by its place, in order."""
    found: dict[str, Tensor] = {}

    def note(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found[path] = leaf
        return leaf

    _mapped(note, batch)
    return found


def _is_static(path: str, static: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in static)


def steps_of(batch: Batch, dim: int, static: Sequence[str] = ()) -> int:
    """How many time steps the batch has.

    Raises:
        DataError: no tensor at all, one without the dimension, or different numbers of steps; all
            are listed.
    """
    tensors = tensors_of(batch)
    unknown = [name for name in static if not any(_is_static(path, (name,)) for path in tensors)]
    timed = {path: tensor for path, tensor in tensors.items() if not _is_static(path, static)}
    lengths = {
        path: tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None
        for path, tensor in timed.items()
    }
    if (
        unknown
        or None in lengths.values()
        or len(set(lengths.values())) != 1
        or not all(lengths.values())
    ):
        shapes = (
            ", ".join(f"'{path}' {tuple(tensor.shape)}" for path, tensor in tensors.items())
            or "none"
        )
        raise DataError(
            f"the batch has the tensors {shapes}; along dim={dim} they have"
            f" {sorted(set(lengths.values()), key=str)} steps, expected one number above 0 for all"
            " but"
            f" static={tuple(static)}{f', of which {unknown} are not there' if unknown else ''}."
            " Pad or cut them to one length; name what has no time:"
            " create_supervised_tbptt_trainer(..., static=('place', ...))"
        )
    return next(length for length in lengths.values() if length is not None)


def lanes_of(batch: Batch, dim: int, static: Sequence[str] = ()) -> int | None:
    """The number of lanes, the first dimension besides time of the first tensor cut.

    `None` where there is none.
    """
    first = next(
        tensor for path, tensor in tensors_of(batch).items() if not _is_static(path, static)
    )
    return next((size for at, size in enumerate(first.shape) if at != dim % first.dim()), None)


def pieces(
    batch: Batch, steps: int, dim: int, static: Sequence[str] = ()
) -> Iterator[tuple[Batch, int]]:
    """Consecutive chunks of at most `steps` steps in the nesting of the batch, a list as a tuple, and the steps of each."""
    whole = steps_of(batch, dim, static)
    batch = tuple(batch) if isinstance(batch, list) else batch
    for start in range(0, whole, steps):
        count = min(steps, whole - start)

        def cut(path: str, leaf: Any, start: int = start, count: int = count) -> Any:
            timed = isinstance(leaf, Tensor) and not _is_static(path, static)
            return leaf.narrow(dim, start, count) if timed else leaf

        yield _mapped(cut, batch), count


def prepare_batch(
    batch: Batch, device: str | torch.device | None = None, non_blocking: bool = False
) -> tuple[Batch, Batch]:
    """Inputs and targets on the device: of a pair its two parts, of a mapping `inputs` and
    `targets`.

    Raises:
        DataError: a batch of another form, for which the user has to say what is what.
    """
    named = isinstance(batch, Mapping) and set(batch) == {"inputs", "targets"}
    if not named and (
        isinstance(batch, Mapping) or not isinstance(batch, Sequence) or len(batch) != 2
    ):
        held = (
            f"the keys {list(batch)}"
            if isinstance(batch, Mapping)
            else f"{type(batch).__name__} of {len(tensors_of(batch))} tensors"
        )
        raise DataError(
            f"a batch is a {held}, expected a pair (inputs, targets) or a mapping of 'inputs' and"
            " 'targets' alone. Say what is what: prepare_batch=lambda batch, device, non_blocking:"
            " (batch['x'].to(device), batch['y'].to(device))"
        )

    def move(_: str, leaf: Any) -> Any:
        return (
            leaf.to(device, non_blocking=non_blocking)
            if isinstance(leaf, Tensor) and device is not None
            else leaf
        )

    x, y = (cast("Any", batch)[key] for key in (("inputs", "targets") if named else (0, 1)))
    return _mapped(move, x), _mapped(move, y)
