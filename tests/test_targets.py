"""Targets as they come: for each step, for intervals, for a whole recording; and static features,
given at every step.

Shapes: `n` steps, `S` static features, `C` target columns.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from policy_data import allocated
from strategies import recordings, seeds
from test_stream import same, whole
from throughtime.errors import DataError
from throughtime.stream.formats.table import Array, RowSource
from throughtime.stream.sources import as_recording
from throughtime.stream.targets import IGNORE_INDEX, interval_labels

KINDS: dict[str, Callable[[int, np.random.Generator], Array]] = {
    "float": lambda n, draw: draw.normal(size=n),
    "float32-columns": lambda n, draw: draw.normal(size=(n, 3)).astype(np.float32),
    "int": lambda n, draw: draw.integers(0, 9, n),
    "uint8": lambda n, draw: draw.integers(0, 9, n).astype(np.uint8),
    "int-columns": lambda n, draw: draw.integers(0, 9, (n, 2)),
    "bool": lambda n, draw: draw.random(n) < 0.5,
    "text": lambda n, draw: np.array([f"word{i}" for i in draw.integers(0, 9, n)]),
}
kinds = st.sampled_from(list(KINDS))
cuts = st.tuples(st.floats(0, 1), st.floats(0, 1))


def missing(label: Any) -> Any:
    """What stands where there is no label, one by one."""
    row = np.asarray(label)
    if row.dtype.kind == "U":
        return ""
    return np.full_like(row, np.nan) if row.dtype.kind == "f" else np.full(row.shape, IGNORE_INDEX)


def spread(spans: list[tuple[int, int, Any]], steps: int, sample: Any) -> list[Any]:
    """The target of every step, by a loop: the oracle."""
    result = [missing(sample)] * steps
    for start, stop, label in spans:
        for step in range(start, stop):
            result[step] = label
    return result


def check_rows(rows: RowSource, expected: list[Any], cut: tuple[float, float]) -> None:
    """As expected, as a whole and between any two steps, with the type of a stream's targets."""
    assert len(rows) == len(expected)
    start = min(int(cut[0] * len(expected)), len(expected) - 1)
    stop = start + 1 + int(cut[1] * (len(expected) - start - 1))
    for begin, end in ((0, len(expected)), (start, stop), (len(expected) - 1, len(expected))):
        got, wanted = (
            rows.read(begin, end),
            np.stack([np.asarray(row) for row in expected[begin:end]]),
        )
        assert got.shape == wanted.shape
        assert (
            (got == wanted).all()
            if wanted.dtype.kind in "US"
            else np.array_equal(got, wanted, equal_nan=wanted.dtype.kind == "f")
        )
        assert got.dtype.kind in {wanted.dtype.kind, "i", "u", "b"} - (
            {"f"} if wanted.dtype.kind != "f" else set()
        )


def drawn_spans(steps: int, bounds: list[int], keep: int) -> tuple[list[int], list[int]]:
    """Some of the stretches between sorted bounds: touching, apart, none."""
    edges = sorted({bound % (steps + 1) for bound in bounds})
    pairs = [pair for i, pair in enumerate(pairwise(edges)) if keep >> i & 1]
    return [start for start, _ in pairs], [stop for _, stop in pairs]


@given(
    steps=st.integers(1, 200),
    bounds=st.lists(st.integers(0, 1000), min_size=2, max_size=12),
    keep=st.integers(0, 2**12 - 1),
    kind=kinds,
    cut=cuts,
    seed=seeds,
)
def test_labels_of_intervals_are_the_same_as_one_written_for_each_step(
    steps: int,
    bounds: list[int],
    keep: int,
    kind: str,
    cut: tuple[float, float],
    seed: int,
) -> None:
    starts, stops = drawn_spans(steps, bounds, keep)
    labels = KINDS[kind](len(starts) + 1, np.random.default_rng(seed))
    spans = list(zip(starts, stops, labels, strict=False))
    rows = interval_labels("it", "the mapping", starts, stops, labels[: len(starts)], steps)
    check_rows(rows, spread(spans, steps, labels[0]), cut)


MUTANTS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "one step late": lambda rows: [rows[0], *rows[:-1]],
    "the last step alone": lambda rows: [IGNORE_INDEX, *rows[1:]],
    "no label for the last interval": lambda rows: [*rows[:-1], IGNORE_INDEX],
}


@pytest.mark.parametrize("mutant", list(MUTANTS.values()), ids=list(MUTANTS))
def test_check_of_targets_fails_on_mutants(mutant: Callable[[list[Any]], list[Any]]) -> None:
    labels, expected = np.array([1, 2, 3]), [1, 1, 1, 1, 2, 2, 2, IGNORE_INDEX, 3, 3]
    rows = interval_labels("it", "targets", [0, 4, 8], [4, 7, 10], labels, 10)
    check_rows(rows, expected, (0.2, 0.7))
    with pytest.raises(AssertionError):
        check_rows(rows, mutant(expected), (0.2, 0.7))


Source = dict[str, Any]
WAYS: dict[str, tuple[Source, list[Any]]] = {
    "intervals": (
        {"intervals": ([1, 6], [4, 10], [2, 5])},
        spread([(1, 4, 2), (6, 10, 5)], 10, 1),
    ),
    "no interval": ({"intervals": ([], [], np.zeros(0, int))}, [IGNORE_INDEX] * 10),
    "one label": ({"targets": 7}, [IGNORE_INDEX] * 9 + [7]),
    "one label as a tensor": ({"targets": torch.tensor(7)}, [IGNORE_INDEX] * 9 + [7]),
    "NaN": ({"targets": np.array([0.5, np.nan] * 5)}, [0.5, np.nan] * 5),
}


@pytest.mark.parametrize(("source", "expected"), list(WAYS.values()), ids=list(WAYS))
@pytest.mark.parametrize("lanes", [1, 3])
def test_stream_masks_steps_without_a_label(
    source: Source, expected: list[Any], lanes: int
) -> None:
    inputs = np.arange(20.0).reshape(10, 2)
    got = tt.Stream({"inputs": inputs, **source}, lanes, 4)
    plain = tt.Stream({"inputs": inputs, "targets": np.array(expected)}, lanes, 4)
    chunk = whole(got)
    assert same(chunk, whole(plain))
    wanted = np.array([row != IGNORE_INDEX and not np.isnan(row) for row in expected])
    assert chunk.valid_steps == wanted.sum()
    assert sorted(chunk.position[chunk.mask].tolist()) == np.flatnonzero(wanted).tolist()


def test_intervals_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "beats.csv").write_text("start,stop,label\n1,4,2\n6,10,5\n", encoding="utf-8")
    inputs = np.ones((10, 2))
    chunk = whole(tt.Stream({"inputs": inputs, "intervals": tmp_path / "beats.csv"}, 1, 4))
    spans = [1, 6], [4, 10], [2.0, 5.0]
    assert same(chunk, whole(tt.Stream({"inputs": inputs, "intervals": spans}, 1, 4)))


REFUSED: dict[str, tuple[Source, str]] = {
    "lengths": (
        {"targets": np.ones(5)},
        "10 steps of inputs and 5 of targets; .* give intervals of steps with their labels",
    ),
    "both": (
        {"targets": np.ones(10), "intervals": ([0], [1], [2])},
        "and no targets beside them",
    ),
    "no triple": (
        {"intervals": ([0], [1])},
        r"intervals are a tuple, expected \(starts, stops, labels\), or a path",
    ),
    "fractions": (
        {"intervals": ([0.5], [1.0], [2])},
        "intervals in the mapping have float64 edges, expected whole steps, such as 1200",
    ),
    "text": (
        {"intervals": (["a"], [1], [2])},
        "intervals in the mapping have <U",
    ),
    "before": (
        {"intervals": ([-1], [3], [2])},
        "intervals in the mapping: number 0, -1 to 3, leaves the recording of 10 steps",
    ),
    "beyond": (
        {"intervals": ([0, 5], [3, 11], [2, 2])},
        "intervals in the mapping: number 1, 5 to 11, leaves the recording of 10 steps",
    ),
    "unsorted": (
        {"intervals": ([5, 0], [7, 3], [2, 2])},
        "number 1, 0 to 3, begins before the end of the one before it; sort, cut or join them",
    ),
    "static of two dimensions": (
        {"static": np.ones((2, 2))},
        r"(?s)static=array.*, expected \(S,\) finite numbers",
    ),
    "static by name": (
        {"static": "age"},
        r"static='age', expected .* column of the rows is an input",
    ),
    "misspelt": ({"interval": 3}, "did you mean 'intervals'"),
    "at a lower rate": (
        {"targets": np.ones(2), "target_every": 5},
        "has the keys .*'target_every'",
    ),
}


@pytest.mark.parametrize(("source", "reason"), list(REFUSED.values()), ids=list(REFUSED))
def test_targets_that_make_no_sense_are_refused_with_what_to_do(
    source: Source, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        as_recording({"name": "it", "inputs": np.ones((10, 2)), **source}, 0)


def with_static(lengths: list[int], width: int, seed: int, *, written: bool) -> list[Source]:
    """Recordings with static features, or with these columns written out."""
    draw = np.random.default_rng(seed)
    result: list[Source] = []
    for one in recordings(lengths, seed=seed):
        static = draw.normal(size=width)
        inputs = np.concatenate([one["inputs"], np.tile(static, (len(one["inputs"]), 1))], axis=1)
        result.append(one | ({"inputs": inputs} if written else {"static": static}))
    return result


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    lanes=st.integers(1, 5),
    width=st.integers(1, 4),
    seed=seeds,
    dtype=st.sampled_from([None, torch.float32]),
)
def test_static_features_are_the_columns_written_out(
    lengths: list[int], lanes: int, width: int, seed: int, dtype: Any
) -> None:
    lanes = min(lanes, sum(lengths))
    chunk, expected = (
        whole(tt.Stream(with_static(lengths, width, seed, written=w), lanes, 9, dtype=dtype))
        for w in (False, True)
    )
    assert same(chunk, expected)


def test_static_features_are_beside_vectors_and_integers_become_what_inputs_are() -> None:
    chunk = whole(tt.Stream({"inputs": np.ones(4), "static": torch.tensor([2, 3])}, 1, 4))
    assert chunk.inputs[:, 0].tolist() == [[1, 2, 3]] * 4
    assert chunk.inputs.dtype == torch.float64


def test_static_features_are_never_written_out_for_a_recording() -> None:
    """A thousand of them for a million steps, from a file that is mapped: 8 GB if they were."""
    inputs = np.lib.stride_tricks.as_strided(np.zeros(1), (1_000_000, 1), (0, 0))
    stream = tt.Stream({"inputs": inputs, "static": np.ones(1000)}, 1, 10)
    assert allocated(lambda: stream.read(500_000, 500_010)).most < 10 * 1001 * 8 * 3


@pytest.mark.parametrize(
    "inputs", [np.ones(4, np.int64), np.ones((4, 2, 2))], ids=["tokens", "images"]
)
def test_static_features_beside_what_has_no_columns_are_refused(inputs: Array) -> None:
    with pytest.raises(DataError, match=r"static features go beside inputs \(T, D\)"):
        list(tt.Stream({"inputs": inputs, "static": np.ones(2)}, 1, 4))


@given(
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=4), steps=st.integers(1, 30), seed=seeds
)
def test_several_inputs_are_concatenated(widths: list[int], steps: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    parts = [
        draw.normal(size=(steps, width)) if width > 1 else draw.normal(size=steps)
        for width in widths
    ]
    chunk = whole(tt.Stream({"inputs": parts}, 1, 7))
    expected = np.concatenate([part.reshape(steps, -1) for part in parts], axis=1)
    assert torch.equal(chunk.inputs[:, 0], torch.from_numpy(expected))
