"""What a stream refuses: recordings and settings that make no sense, and everything that would tear
its lanes apart.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler

import throughtime as tt
from strategies import recordings
from test_stream import Counting
from throughtime.errors import DataError
from throughtime.stream.recording import StepArrays

BAD: list[tuple[Any, dict[str, Any], str]] = [
    ({"input": np.ones(4)}, {}, r"recording '0' has the keys \['input'\], expected 'inputs'"),
    (
        {"inputs": np.ones(4), "label": 3, "name": "x"},
        {},
        r"recording 'x' has the keys \['inputs', 'label', 'name'\]",
    ),
    ({"inputs": np.ones(4), "targets": np.ones(5)}, {}, "4 steps of inputs and 5 of targets"),
    ({"inputs": np.ones((0, 2)), "name": "x"}, {}, "recording 'x' .*is empty"),
    ([], {}, "no recordings"),
    (
        {"inputs": [1, 2, 3]},
        {},
        "recording '0': inputs are a list of shape None and type None, expected an array",
    ),
    (
        {"inputs": np.array(["a", "b"])},
        {},
        r"inputs are a ndarray of shape \(2,\) and type <U1, expected an array of numbers",
    ),
    ({"inputs": np.float64(3)}, {}, r"inputs are a float64"),
    (
        {"inputs": np.ones(4), "targets": np.array([None] * 4)},
        {},
        r"targets are a ndarray of shape \(4,\) and type object",
    ),
    ([3], {}, "recording 0 is a int, expected a mapping with 'inputs'"),
    ({"inputs": np.ones(4)}, {"lanes": 5}, "5 lanes, but the recordings have 4 steps in all"),
    ({"inputs": np.ones(4)}, {"lanes": 3, "rank": 0, "ranks": 2}, "6 lanes, but the recordings"),
    ({"inputs": np.ones(4)}, {"lanes": 2.0}, "expected a whole number"),
    ({"inputs": np.ones(4)}, {"lanes": 0}, "lanes=0: expected a whole number of at least 1"),
    ({"inputs": np.ones(4)}, {"chunk": 0}, "chunk=0: expected a whole number of at least 1"),
    ({"inputs": np.ones(4)}, {"warm_up": -1}, "warm_up=-1"),
    ({"inputs": np.ones(4)}, {"missing": "drop"}, "missing='drop'"),
    ("nowhere.csv", {}, "nowhere.csv: no such file"),
    ("day*.csv", {}, r"no such file; for a pattern write the list .*glob"),
]


@pytest.mark.parametrize(
    ("source", "options", "reason"), BAD, ids=[reason[:40] for _, _, reason in BAD]
)
def test_bad_recordings_and_settings_are_refused(
    source: Any, options: dict[str, Any], reason: str
) -> None:
    setting: dict[str, Any] = {"lanes": 1, "chunk": 2} | options
    with pytest.raises(DataError, match=reason):
        tt.Stream(source, **setting)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (
            {"inputs": np.ones((4, 3)), "targets": np.ones(4)},
            r"'b' has inputs: \(T, 3\) of float64 numbers, recording 'a': \(T, 2\) of float64",
        ),
        (
            {"inputs": np.ones((4, 2)), "targets": np.ones((4, 1))},
            r"'b' has targets: \(T, 1\) .* 'a': \(T\) of",
        ),
        (
            {"inputs": np.ones((4, 2)), "targets": np.ones(4, np.int64)},
            r"'b' has targets: \(T\) of integer numbers",
        ),
        ({"inputs": np.ones((4, 2))}, "'b' has targets: none, recording 'a': "),
    ],
    ids=["features", "target shape", "target kind", "no targets"],
)
def test_recordings_with_different_columns_are_refused(second: dict[str, Any], reason: str) -> None:
    first = {"name": "a", "inputs": np.ones((4, 2)), "targets": np.ones(4)}
    stream = tt.Stream([first, second | {"name": "b"}], lanes=1, chunk=8, seed=None)
    with pytest.raises(DataError, match=reason):
        list(stream)


def test_recording_that_gives_fewer_steps_than_it_promised_is_refused() -> None:
    class Shrunk(Counting):
        def read(self, start: int, stop: int) -> StepArrays:
            return super().read(start, min(stop, 7))

    with pytest.raises(
        DataError,
        match=(
            r"recording 'counting' gave 7 of the 9 steps asked for at step 0, as inputs; it said"
            r" that it has 9"
        ),
    ):
        list(tt.Stream(Shrunk(9), lanes=1, chunk=9))


def prepared(stream: Any) -> Any:
    from accelerate import Accelerator

    return next(iter(Accelerator(cpu=True).prepare(DataLoader(stream, batch_size=None))))


def sharded(stream: Any) -> Any:
    """By Accelerate, between two processes."""
    from accelerate.data_loader import prepare_data_loader

    options: dict[str, Any] = {"num_processes": 2, "process_index": 1, "put_on_device": False}
    return next(iter(prepare_data_loader(DataLoader(stream, batch_size=1), **options)))


def sampler(stream: Any) -> Any:
    return DistributedSampler(stream, num_replicas=2, rank=0)


LOADS: dict[str, Callable[[Any], Any]] = {
    "shuffle": lambda stream: next(iter(DataLoader(stream, shuffle=True, batch_size=2))),
    "in order": lambda stream: next(iter(DataLoader(stream, batch_size=None))),
    "distributed in a loader": lambda stream: next(
        iter(DataLoader(stream, sampler=sampler(stream)))
    ),
    "distributed": lambda stream: [stream[i] for i in sampler(stream)],
    "accelerate": prepared,
    "accelerate, two processes": sharded,
}


@pytest.mark.parametrize("load", list(LOADS.values()), ids=list(LOADS))
def test_stream_behind_a_sampler_is_refused_with_the_reason_and_the_call(
    load: Callable[[Any], Any],
) -> None:
    stream = tt.Stream(recordings([40]), lanes=2, chunk=5)
    with pytest.raises(
        DataError,
        match=r"a Stream is not indexed: its chunks follow one another.*would tear its lanes apart",
    ) as error:
        load(stream)
    for call in (
        "for chunk in stream",
        "tt.updates",
        "plays on each rank of torch.distributed its own",
    ):
        assert call in str(error.value)


def test_one_file_as_inputs_and_targets_is_refused_with_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = "".join(f"{i},{3 * i}\n" for i in range(30))
    path.write_text("u,label\n" + rows, encoding="utf-8")
    link = tmp_path / "b.csv"
    link.symlink_to(path)
    for inputs, targets in ((path, path), (str(path), link)):
        with pytest.raises(
            DataError,
            match=r"are inputs and targets of the same step",
        ):
            tt.Stream({"inputs": inputs, "targets": targets}, lanes=1, chunk=2)
