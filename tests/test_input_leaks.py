"""Inputs that give the target away are named before training."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import seeds
from test_run import settings
from throughtime.app.config import Config
from throughtime.app.dataset import open_dataset
from throughtime.app.recordings import leaks
from throughtime.stream.sources import as_recording

LENGTH = 400


def slow(draw: Any) -> Any:
    """A label that changes every 20 steps at most."""
    return np.repeat(draw.permutation(LENGTH // 20) % 3, 20).astype(float)


def found(x: Any, y: Any) -> list[str]:
    recording = as_recording({"inputs": x, "targets": y}, 0)
    (names,) = leaks(recording.read(0, LENGTH), [f"x{i}" for i in range(x.shape[1])])
    return names


@given(seeds, st.floats(0.1, 100), st.floats(-50, 50), st.booleans())
def test_an_affine_copy_and_equal_change_points_are_found_and_nothing_else(
    seed: int, scale: float, shift: float, negative: bool
) -> None:
    """Mutants of a copy, with noise of a hundredth or one change more, determine nothing."""
    draw = np.random.default_rng(seed)
    y = draw.normal(size=LENGTH)
    copy = np.round(y * (-scale if negative else scale) + shift, 6)
    noisy = copy + copy.std() * 0.01 * draw.normal(size=LENGTH)
    x = np.stack([draw.normal(size=LENGTH), noisy, copy, np.ones(LENGTH)], axis=1)
    assert found(x, y) == ["x2"]
    label = slow(draw)
    codes = np.array([7.0, -1.0, 2.5])[label.astype(int)]  # no affine map
    other = codes.copy()
    other[LENGTH // 2 + 3] += 1
    assert found(np.stack([draw.normal(size=LENGTH), other, codes], 1), label) == ["x2"]


def test_missing_targets_and_inputs_say_nothing() -> None:
    draw = np.random.default_rng(0)
    y = slow(draw)
    x = np.stack([9 - y**2, draw.normal(size=LENGTH)], axis=1)
    y[[5, 40, 41]] = x[99, 1] = np.nan
    assert found(x, y) == ["x0"]
    assert found(x, np.full(LENGTH, np.nan)) == []


def table(folder: Path, header: str, columns: list[Any]) -> Path:
    path = folder / f"{header[:3]}.csv"
    np.savetxt(path, np.stack(columns, 1), "%.5f", ",", header=header, comments="")
    return path


def test_the_present_value_of_a_forecast_is_no_leak_and_a_later_one_is(tmp_path: Path) -> None:
    walk = np.random.default_rng(2).normal(size=LENGTH + 3).cumsum()
    data = table(tmp_path, "OT,later", [walk[:-3], walk[3:]])
    values = settings(data, tmp_path / "run", targets=["OT"], task="regress", ahead=3, lanes=1)
    (said,) = [s for s in open_dataset(Config(**values)).remarks if "determines" in s]
    assert said.startswith("input later determines OT; if")
    values["exclude"] = ["later"]
    assert not any("determines" in s for s in open_dataset(Config(**values)).remarks)
