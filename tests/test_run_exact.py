"""A run with the exact gradient: its updates, its settings, and resuming to the bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_run import finish, goes_on, settings, stop_at, write_recordings
from throughtime.app.fit import updates_per_epoch
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.gradient import executor


def test_an_exact_run_of_whole_recordings_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """One lane: an update for each recording, at the run's own segment length."""
    more = {"gradient": "exact", "stride": None, "lanes": 1, "updates": None, "epochs": 4}
    whole = goes_on(tmp_path, 3, **more)
    updates = [row["update"] for row in whole.read_metrics() if row["kind"] == "train"]
    assert updates == list(range(1, 9))


def test_an_exact_run_is_cut_into_the_same_segments_wherever_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a window is cut into segments decides how its sums are rounded."""
    lengths, plain = list[int](), executor.automatic_chunk

    def automatic_chunk(*sizes: Any) -> int:
        lengths.append(plain(*sizes))
        return lengths[-1]

    monkeypatch.setattr(executor, "automatic_chunk", automatic_chunk)
    np.savez(
        tmp_path / "long.npz",
        inputs=np.random.default_rng(0).normal(size=(60_000, 3)),
        targets=np.arange(60_000) // 7 % 3,
    )
    more = {
        "gradient": "exact",
        "stride": None,
        "cut_every": 3000,
        "lanes": 8,
        "hidden": 32,
        "updates": 3,
        "valid_every": 0,
        "holdout": 0.0,
    }
    whole = finish(settings(tmp_path / "long.npz", tmp_path / "whole", **more))
    expected = [*lengths]
    assert len(expected) == 3
    assert expected[0] < 3000  # more than one segment, or nothing could differ
    stopped = Training.begin(
        Config(**settings(tmp_path / "long.npz", tmp_path / "stopped", **more))
    )
    stop_at(stopped, 1)
    lengths.clear()
    resumed = Training.resume(stopped.folder.path)
    assert resumed.done.count == 1
    resumed.run()
    assert lengths == expected[1:]
    assert whole.model.read_bytes() == resumed.folder.model.read_bytes()


@pytest.mark.parametrize(
    ("lanes", "more", "expected"),
    [
        (1, {"gradient": "exact"}, 2),
        (2, {"gradient": "exact"}, 1),
        (2, {"gradient": "exact", "cut_every": 90}, 5),
        (2, {"stride": 90}, 5),
    ],
)
def test_an_epoch_makes_as_many_updates_as_are_announced(
    tmp_path: Path, lanes: int, more: dict[str, Any], expected: int
) -> None:
    values = {"stride": None, "lanes": lanes, "updates": None, "epochs": 1, **more}
    training = Training.begin(
        Config(**{**settings(write_recordings(tmp_path / "data"), tmp_path / "run"), **values})
    )
    assert updates_per_epoch(training.policy, training.stream, 1) == expected
    training.run()
    assert training.done.count == expected
