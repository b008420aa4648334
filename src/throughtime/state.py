"""State trees: what a model carries from step to step, as values.

A state is a tensor, or any nesting of tuples, lists, dicts, namedtuples and dataclasses of tensors.
Every leaf has its lanes first: `(B, ...)`. `nn.LSTM` puts layers first; `tt.carry` turns its state
around, so that resetting, selecting and saving lanes are one operation for every model.

Shapes: `B` lanes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from throughtime import tensor_files
from throughtime.errors import StateError, listed
from throughtime.files import write_atomically

State: TypeAlias = (
    Any  # a nesting of tensors has no finite static type; `leaves` checks it at run time
)

__all__ = ["detach", "lanes", "load", "reset", "save", "select", "stack"]

_KIND = "throughtime.state/1"


def _level(tree: Any) -> tuple[Any, Any, Callable[[Any], Any]] | None:
    """Names and branches of a container, and what puts others in their place; None for a leaf.

    Tuples and dicts come first: for `(h, c)` pytree takes 3.5 times as long.
    """
    kind: Any = type(tree)
    if kind is tuple:
        return range(len(tree)), tree, tuple
    if kind is dict or (isinstance(tree, Mapping) and kind not in pytree.SUPPORTED_NODES):
        return tree, tree.values(), lambda new: kind(zip(tree, new, strict=True))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        return (
            fields,
            fields.values(),
            lambda new: dataclasses.replace(tree, **dict(zip(fields, new, strict=True))),
        )
    branches, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
    if [*map(id, branches)] == [id(tree)]:
        return None
    names = tree if isinstance(tree, Mapping) else getattr(tree, "_fields", range(len(branches)))
    return names, branches, spec.unflatten


def _by_path(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything that is no container, with the keys, field names and positions leading to it."""
    level = None if isinstance(tree, Tensor) else _level(tree)
    if level is None:
        yield path, tree
        return
    for name, branch in zip(level[0], level[1], strict=True):
        yield from _by_path(branch, (*path, name))


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same nesting with `fn` of each tensor; whatever else it holds stays."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if (level := _level(tree)) is None:
        return tree
    return level[2]([fn(b) if isinstance(b, Tensor) else map_tensors(fn, b) for b in level[1]])


def named_tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """Every tensor of any nesting, in order, and its path.

    A path joins keys, field names and positions by dots; what is no tensor is left out.
    """
    return [(_dotted(path), leaf) for path, leaf in _by_path(tree) if isinstance(leaf, Tensor)]


def map_leaves(fn: Callable[..., Tensor], state: State, *others: State) -> State:
    """A tree of the same structure, each leaf being `fn` of the leaves at its place.

    Branches that are `None` stay `None`. The order of keys may differ between the trees.

    Raises:
        StateError: a leaf that is no tensor, or trees of different structure; it is named.
    """
    for tree in (state, *others):
        tensors(tree)  # refuses what is no tensor
    if not others:
        return map_tensors(fn, state)
    trees = [
        {path: leaf for path, leaf in _by_path(tree) if leaf is not None}
        for tree in (state, *others)
    ]
    for tree in trees:
        if only_one := trees[0].keys() ^ tree.keys():
            names = listed(sorted(map(_dotted, only_one)), quoted=True)
            raise StateError(f"two states differ: only one of them has the leaves {names}")
    rows = iter([[tree[path] for tree in trees] for path in trees[0]])
    return map_tensors(lambda _: fn(*next(rows)), state)


def arranged(state: State, like: State) -> State:
    """The same state in the structure of another: keys in its order.

    Raises:
        StateError: a different structure; the leaves are named.
    """
    return map_leaves(lambda _, leaf: leaf, like, state)


def leaves(state: State) -> Iterator[tuple[str, Tensor]]:
    """Every leaf with its dotted path, in order: `("cell.h", tensor)`."""
    for path, leaf in _by_path(state):
        if isinstance(leaf, Tensor):
            yield _dotted(path) or "state", leaf
        elif leaf is not None or not path:
            name = f"state leaf '{_dotted(path)}'" if path else "the state"
            raise StateError(
                f"{name} is a {type(leaf).__name__}, expected a tensor or a tuple, list, dict,"
                " namedtuple or dataclass of tensors. Keep counters and flags as tensors with one"
                " row per lane."
            )


def differentiable(leaf: Tensor) -> bool:
    """Whether a leaf can carry a gradient: counters and flags cannot."""
    return leaf.is_floating_point() or leaf.is_complex()


def tensors(state: State) -> list[Tensor]:
    """Every leaf, without names: what a check that runs on every call can afford."""
    result: list[Tensor] = []
    pending: list[State] = [state]
    while pending:
        branch = pending.pop()
        if isinstance(branch, Tensor):
            result.append(branch)
        elif type(branch) is tuple:
            pending.extend(reversed(branch))
        elif type(branch) is dict:
            pending.extend(reversed(branch.values()))
        else:
            return [leaf for _, leaf in leaves(state)]
    return result


def lanes(state: State) -> int | None:
    """The number of lanes of a state; `None` for a state without leaves.

    Args:
        state: any nested state, every leaf `(B, ...)`.

    Returns:
        B.

    Raises:
        StateError: leaves that disagree, or one without a lane dimension.

    Example:
        >>> import torch, throughtime as tt
        >>> tt.state.lanes((torch.zeros(4, 8), {"c": torch.zeros(4, 2)}))
        4
    """
    first, count = "", None
    for name, leaf in leaves(state):
        if leaf.dim() == 0:
            raise StateError(
                f"state leaf '{name}' has no lane dimension: got shape (), expected (B, ...)"
            )
        first, count = first or name, leaf.shape[0] if count is None else count
        if leaf.shape[0] != count:
            raise StateError(
                f"state leaf '{name}' has {leaf.shape[0]} lanes, leaf '{first}' has {count}"
            )
    return count


def detach(state: State) -> State:
    """The same values without their graph; shares memory with `state`. `None` stays `None`.

    Args:
        state: any nested state; for a loop of your own, between two chunks.

    Returns:
        A new state of the same structure, without `requires_grad`.

    Example:
        >>> import torch, throughtime as tt
        >>> h = torch.ones(1, 4, requires_grad=True) * 2
        >>> tt.state.detach({"h": h})["h"].requires_grad
        False
    """
    # None: a loop of the user's own has no state before its first chunk
    return None if state is None else map_leaves(Tensor.detach, state)


def reset(state: State, initial: State, where: Tensor) -> State:
    """`state` with the lanes marked in `where` (B, bool) taken from `initial`; no gradient crosses.

    Args:
        state: the state to reset, every leaf `(B, ...)`.
        initial: a state of the same structure, usually `net.initial_state(lanes)`.
        where: `(B,)` bool, true for each lane that starts a new recording; on the host or where the
            state is.

    Returns:
        A new state; `state` and `initial` stay as they are.

    Raises:
        StateError: the three disagree about the number of lanes, or the structures differ.

    Example:
        >>> import torch, throughtime as tt
        >>> tt.state.reset(torch.ones(2, 1), torch.zeros(2, 1), torch.tensor([True, False]))
        tensor([[0.],
                [1.]])
    """
    count = lanes(state)
    if count is not None and (*where.shape, lanes(initial)) != (count, count):
        raise StateError(
            f"the state has {count} lanes, the initial state {lanes(initial)}, `where` the shape"
            f" {tuple(where.shape)}; all need one row per lane"
        )

    def pick(leaf: Tensor, start: Tensor) -> Tensor:
        marked = where.to(leaf.device).view(-1, *(1,) * (leaf.dim() - 1))
        return torch.where(marked, start, leaf)

    return map_leaves(pick, state, initial)


def select(state: State, lanes: Sequence[int] | Tensor) -> State:
    """The state of some lanes, given by number, in the order given; a copy.

    Args:
        state: every leaf `(B, ...)`.
        lanes: their numbers, from 0 to B - 1, in any order; a number may occur twice.

    Returns:
        A state with as many lanes as `lanes` has numbers.

    Raises:
        StateError: a number out of range, or a mask instead of numbers.

    Example:
        >>> import torch, throughtime as tt
        >>> tt.state.select((torch.arange(3.0).view(3, 1),), [2, 0])
        (tensor([[2.],
                [0.]]),)
    """
    # as_tensor would move a tensor to the default device
    index = lanes if isinstance(lanes, Tensor) else torch.as_tensor(lanes, device="cpu")
    if index.dtype == torch.bool:
        raise StateError(
            "lanes are given as a mask, expected their numbers: mask.nonzero().flatten()"
        )
    index = index.long()

    def rows(leaf: Tensor) -> Tensor:
        wrong = index[(index < 0) | (index >= leaf.shape[0])]
        if len(wrong):
            raise StateError(
                f"lane {int(wrong[0])} asked for, the state has {leaf.shape[0]} lanes (0 to"
                f" {leaf.shape[0] - 1})"
            )
        return leaf.index_select(0, index.to(leaf.device))

    return map_leaves(rows, state)


def stack(states: Sequence[State]) -> State:
    """One state holding the lanes of several, one after another; the inverse of `select`.

    Args:
        states: of one structure, whose leaves differ in the number of lanes only.

    Returns:
        A state with the lanes of all of them; a copy.

    Raises:
        StateError: no states, or leaves of other shapes.

    Example:
        >>> import torch, throughtime as tt
        >>> tt.state.stack([torch.zeros(2, 4), torch.zeros(3, 4)]).shape
        torch.Size([5, 4])
    """
    if not states:
        raise StateError("no states to stack: got an empty sequence, expected at least one state")
    for other in states[1:]:
        for (name, a), (_, b) in zip(leaves(states[0]), leaves(other), strict=False):
            if a.shape[1:] != b.shape[1:]:
                raise StateError(
                    f"state leaf '{name}' is {tuple(a.shape)} in one state and {tuple(b.shape)} in"
                    " another; only the lanes may differ"
                )
    return map_leaves(lambda *rows: torch.cat(rows), states[0], *states[1:])


def save(state: State, path: str | Path) -> None:
    """Writes a state as safetensors (no pickle): to a temporary file, synced, then renamed.

    The file contains a checksum, which `load` compares.

    Args:
        state: any nested state; tensors on a device are copied to the host.
        path: the file, usually with the suffix `.safetensors`.

    Raises:
        StateError: two leaves have one name.
        OSError: the file cannot be written; the previous one is untouched.

    Example:
        >>> import pathlib, tempfile, torch, throughtime as tt
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
        >>> tt.state.save({"h": torch.ones(2, 4)}, path)
        >>> tt.state.load(path, like={"h": torch.zeros(2, 4)})["h"].sum()
        tensor(8.)
    """
    tensors: dict[str, Tensor] = {}
    for name, leaf in leaves(state):
        if name in tensors:
            raise StateError(
                f"two leaves of the state are both called '{name}': a key with a dot in it looks"
                " like nesting; rename it"
            )
        tensors[name] = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
    write_atomically(Path(path), tensor_files.to_bytes(_KIND, None, tensors))


def load(path: str | Path, like: State) -> State:
    """Reads a state written by `save`, in the structure, dtype and device of `like`.

    Args:
        path: the file.
        like: a state of the structure expected, usually `net.initial_state(lanes)`.

    Returns:
        The state, with the values of the file.

    Raises:
        StateError: the file is damaged or no state, or its leaves, shapes or dtypes are not those
            of `like`; all differences are listed.

    Example:
        >>> import pathlib, tempfile, torch, throughtime as tt
        >>> net = tt.carry(torch.nn.GRU(3, 4))
        >>> _, state = net(torch.randn(5, 2, 3), net.initial_state(lanes=2))
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
        >>> tt.state.save(state, path)
        >>> loaded = tt.state.load(path, like=net.initial_state(lanes=2))
        >>> all(torch.equal(a, b) for a, b in zip(loaded, state))
        True
    """
    try:
        _, loaded = tensor_files.read_tensors(Path(path), _KIND)
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path}: cannot be read as a state ({error}); expected a file that tt.state.save wrote"
        ) from error
    expected = dict(leaves(like))
    if faults := differences(loaded, expected, "leaf"):
        raise StateError(f"{path}: not a state of this model and lane count: " + "; ".join(faults))
    names = iter(expected)
    return map_leaves(lambda leaf: loaded[next(names)].to(leaf.device), like)


def differences(
    values: Mapping[str, Tensor], expected: Mapping[str, Tensor], noun: str
) -> list[str]:
    """A fault for each name, shape and dtype of `values` that is not as expected, sorted."""
    faults = [f"{noun} '{name}' is missing" for name in expected if name not in values]
    faults += [f"{noun} '{name}' is unknown" for name in values if name not in expected]
    for name in expected.keys() & values.keys():
        got, other = values[name], expected[name]
        if got.shape != other.shape or got.dtype != other.dtype:
            faults.append(
                f"{noun} '{name}' is {tuple(got.shape)} {got.dtype}, expected"
                f" {tuple(other.shape)} {other.dtype}"
            )
    return sorted(faults)
