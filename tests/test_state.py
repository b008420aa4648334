"""State trees as values: what goes in comes out, and what does not fit is refused by name.

Shapes: `B` lanes.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import throughtime as tt
from throughtime.errors import StateError


class Named(dict[str, Any]):
    """A dict that pytree does not open."""


class Pair(NamedTuple):
    h: Tensor
    c: Any


@dataclasses.dataclass(frozen=True)
class Memory:
    fast: Tensor
    slow: Any


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


TREES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda b: numbers(b, 4),
    "dict-of-a-class": lambda b: Named(z=numbers(b, 3), a=(numbers(b, 2),)),
    "namedtuple": lambda b: Pair(numbers(b, 3), (numbers(b, 2),)),
    "dataclass": lambda b: Memory(numbers(b, 3), [numbers(b, 2), None]),
    "integers": lambda b: {"count": torch.arange(b), "seen": torch.ones(b, 2, dtype=torch.bool)},
}
every_tree = pytest.mark.parametrize("make", list(TREES.values()), ids=list(TREES))


def same_structure(a: Any, b: Any) -> bool:
    """Containers of the same types around tensors; written without the code under test."""
    if isinstance(a, Tensor) or a is None:
        return type(a) is type(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_structure(a[k], b[k]) for k in a)
    parts = [(t.fast, t.slow) if isinstance(t, Memory) else t for t in (a, b)]
    return len(parts[0]) == len(parts[1]) and all(
        same_structure(p, q) for p, q in zip(*parts, strict=True)
    )


def equal(a: Any, b: Any) -> bool:
    return same_structure(a, b) and all(
        torch.equal(p, q)
        for (_, p), (_, q) in zip(tt.state.leaves(a), tt.state.leaves(b), strict=True)
    )


@every_tree
def test_map_keeps_structure_and_sees_every_leaf(make: Callable[[int], Any]) -> None:
    tree = make(3)
    zeros = tt.state.map_leaves(torch.zeros_like, tree)
    assert same_structure(tree, zeros)
    assert not any(leaf.any() for leaf in tt.state.tensors(zeros))
    assert equal(tt.state.map_leaves(lambda a, _: a, tree, zeros), tree)


@every_tree
def test_reset_takes_marked_lanes_from_the_initial_state_and_no_others(
    make: Callable[[int], Any],
) -> None:
    state, initial = (
        make(5),
        tt.state.map_leaves(lambda leaf: leaf + 1 if leaf.dtype != torch.bool else ~leaf, make(5)),
    )
    before = tt.state.map_leaves(torch.clone, state)
    where = torch.tensor([True, False, False, True, False])
    after = tt.state.reset(state, initial, where)
    assert equal(tt.state.select(after, [0, 3]), tt.state.select(initial, [0, 3]))
    assert equal(tt.state.select(after, [1, 2, 4]), tt.state.select(state, [1, 2, 4]))
    assert equal(state, before)
    assert not equal(after, state)


def test_reset_lets_no_gradient_cross_even_from_a_state_that_is_not_finite() -> None:
    h = torch.tensor([[math.inf], [2.0]], dtype=torch.float64, requires_grad=True)
    start = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    after = tt.state.reset(h, start, torch.tensor([True, False]))
    after.sum().backward()
    assert after.flatten().tolist() == [0, 2]
    assert h.grad is not None
    assert start.grad is not None
    assert h.grad.flatten().tolist() == [0, 1]
    assert start.grad.flatten().tolist() == [1, 0]


@given(sizes=st.lists(st.sampled_from([1, 2, 3, 7]), min_size=1, max_size=5))
@every_tree
def test_select_is_the_inverse_of_stack(make: Callable[[int], Any], sizes: list[int]) -> None:
    states = [make(size) for size in sizes]
    stacked = tt.state.stack(states)
    assert tt.state.lanes(stacked) == sum(sizes)
    for i, state in enumerate(states):
        begin = sum(sizes[:i])
        assert equal(tt.state.select(stacked, range(begin, begin + sizes[i])), state)


@every_tree
def test_saved_state_is_loaded_to_the_bit(make: Callable[[int], Any], tmp_path: Path) -> None:
    state, path = make(3), tmp_path / "deep" / "state.safetensors"
    tt.state.save(state, path)
    assert equal(tt.state.load(path, tt.state.map_leaves(torch.zeros_like, state)), state)
    assert [file.name for file in path.parent.iterdir()] == ["state.safetensors"]
    assert b"throughtime.state/1" in path.read_bytes()


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "s", numbers(2, 3)
    tt.state.save(old, path)

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tt.state.save(numbers(2, 3), path)
    monkeypatch.undo()
    assert torch.equal(tt.state.load(path, old), old)
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_states_of_different_structure_are_refused_by_path() -> None:
    state, other = {"cell": (torch.ones(2), torch.ones(2))}, {"cell": (torch.ones(2),)}
    refused: list[Callable[[], Any]] = [
        lambda: tt.state.stack([state, other]),
        lambda: tt.state.reset(state, other, torch.tensor([True, False])),
        lambda: tt.state.arranged(other, state),
    ]
    for call in refused:
        with pytest.raises(StateError, match=r"only one .* leaves \['cell\.1'\]"):
            call()


def test_lanes_and_leaves_that_do_not_fit_are_refused() -> None:
    three = torch.zeros(3, 1)
    refused: list[Callable[[], Any]] = [
        lambda: tt.state.lanes({"a": numbers(2, 3), "b": [numbers(3, 3)]}),
        lambda: tt.state.lanes({"a": torch.tensor(1.0)}),
        lambda: tt.state.select(three, [0, 3]),
        lambda: tt.state.stack([three, torch.zeros(3, 2)]),
        lambda: tt.state.reset(three, three, torch.tensor([True])),
        lambda: tt.state.detach({"h": [torch.ones(1), "x"]}),
    ]
    for call in refused:
        with pytest.raises(StateError):
            call()


def test_an_unreadable_file_is_refused_and_every_difference_listed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(StateError, match=rf"{re.escape(str(path))}: cannot be read as a state"):
        tt.state.load(path, numbers(2, 3))
    tt.state.save(
        {"a": numbers(2, 3), "b": numbers(2, 3), "extra": numbers(2), "same": numbers(1)}, path
    )
    like = {"a": numbers(4, 3), "b": numbers(2, 3).float(), "gone": numbers(2), "same": numbers(1)}
    with pytest.raises(StateError) as caught:
        tt.state.load(path, like)
    message = str(caught.value)
    assert all(f"leaf '{name}' is" in message for name in ("gone", "extra", "a", "b"))
    assert "same" not in message
