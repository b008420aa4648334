"""Inputs that give the target away are named before training."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import seeds
from test_run import settings
from throughtime.app.data import leaks, open_dataset
from throughtime.app.settings import Config
from throughtime.stream.layout import Layout
from throughtime.stream.sources import as_recording

LENGTH = 400


def found(x: Any, y: Any) -> str:
    names = tuple(f"x{i}" for i in range(x.shape[1]))
    return "".join(leaks(as_recording({"inputs": x, "targets": y}, 0), Layout(inputs=names)))


@given(seeds, st.floats(0.1, 100), st.floats(-50, 50), st.booleans())
def test_an_affine_copy_is_named_and_nothing_else(
    seed: int, scale: float, shift: float, negative: bool
) -> None:
    """A mutant of a copy, with noise of a hundredth, determines nothing."""
    draw = np.random.default_rng(seed)
    y = draw.normal(size=LENGTH)
    copy = np.round(y * (-scale if negative else scale) + shift, 6)
    noisy = copy + copy.std() * 0.01 * draw.normal(size=LENGTH)
    x = np.stack([draw.normal(size=LENGTH), noisy, copy, np.ones(LENGTH)], axis=1)
    assert found(x, y).startswith("input x2 determines a target;")
    y[[5, 40, 41]] = x[99, 1] = np.nan
    assert found(x, y).startswith("input x2 determines a target;")
    assert not found(x, np.full(LENGTH, np.nan))


def table(folder: Path, header: str, columns: list[Any]) -> Path:
    path = folder / f"{header[:3]}.csv"
    np.savetxt(path, np.stack(columns, 1), "%.5f", ",", header=header, comments="")
    return path


def test_the_present_value_of_a_forecast_is_no_leak_and_a_later_one_is(tmp_path: Path) -> None:
    walk = np.random.default_rng(2).normal(size=LENGTH + 3).cumsum()
    data = table(tmp_path, "OT,later", [walk[:-3], walk[3:]])
    values = settings(data, tmp_path / "run", targets=["OT"], task="regress", ahead=3, lanes=1)
    (said,) = [s for s in open_dataset(Config(**values)).remarks if "determines" in s]
    assert said.startswith("input later determines a target; if")
    values["exclude"] = ["later"]
    assert not any("determines" in s for s in open_dataset(Config(**values)).remarks)
