"""Inputs that give the target away are named before training."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import seeds
from test_cli import run
from test_run import settings
from throughtime.app.data import leaks, open_dataset
from throughtime.app.settings import Config
from throughtime.stream.layout import Layout
from throughtime.stream.sources import as_recording

LENGTH = 400


def slow(draw: Any) -> Any:
    """A label that changes every 20 steps at most."""
    return np.repeat(draw.permutation(LENGTH // 20) % 3, 20).astype(float)


def found(x: Any, y: Any) -> str:
    names = tuple(f"x{i}" for i in range(x.shape[1]))
    return "".join(leaks(as_recording({"inputs": x, "targets": y}, 0), Layout(inputs=names)))


@given(seeds, st.floats(0.1, 100), st.floats(-50, 50), st.booleans())
def test_an_affine_copy_and_equal_change_points_are_named_and_nothing_else(
    seed: int, scale: float, shift: float, negative: bool
) -> None:
    """Mutants of a copy, with noise of a hundredth or one change more, determine nothing."""
    draw = np.random.default_rng(seed)
    y = draw.normal(size=LENGTH)
    copy = np.round(y * (-scale if negative else scale) + shift, 6)
    noisy = copy + copy.std() * 0.01 * draw.normal(size=LENGTH)
    x = np.stack([draw.normal(size=LENGTH), noisy, copy, np.ones(LENGTH)], axis=1)
    assert found(x, y).startswith("input x2 determines a target;")
    y[[5, 40, 41]] = x[99, 1] = np.nan
    assert found(x, y).startswith("input x2 determines a target;")
    assert not found(x, np.full(LENGTH, np.nan))
    label = slow(draw)
    codes = np.array([7.0, -1.0, 2.5])[label.astype(int)]  # no affine map
    other = codes.copy()
    other[LENGTH // 2 + 3] += 1
    x = np.stack([draw.normal(size=LENGTH), other, codes], axis=1)
    label[7] = x[99, 0] = np.nan
    assert found(x, label).startswith("input x2 determines a target;")


def table(folder: Path, header: str, columns: list[Any]) -> Path:
    path = folder / f"{header[:3]}.csv"
    np.savetxt(path, np.stack(columns, 1), "%.5f", ",", header=header, comments="")
    return path


def test_the_command_line_names_every_input_and_those_that_leak(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    label = slow(draw)
    names = [f"sensor{i}" for i in range(12)]
    columns = [draw.normal(size=LENGTH) for _ in names]
    data = table(tmp_path, ",".join([*names, "code", "state"]), [*columns, 5 - label, label])
    words = f"train {data} --targets state --task classify --updates 1 --holdout 0".split()
    said = run(*words, "--out", tmp_path / "run")
    assert "input code determines a target; if it is not known when the net runs" in said
    assert f"inputs {', '.join(names)}, code;" in said
    said = run(*words, "--exclude", "code", "--out", tmp_path / "other")
    assert "determines" not in said


def test_the_present_value_of_a_forecast_is_no_leak_and_a_later_one_is(tmp_path: Path) -> None:
    walk = np.random.default_rng(2).normal(size=LENGTH + 3).cumsum()
    data = table(tmp_path, "OT,later", [walk[:-3], walk[3:]])
    values = settings(data, tmp_path / "run", targets=["OT"], task="regress", ahead=3, lanes=1)
    (said,) = [s for s in open_dataset(Config(**values)).remarks if "determines" in s]
    assert said.startswith("input later determines a target; if")
    values["exclude"] = ["later"]
    assert not any("determines" in s for s in open_dataset(Config(**values)).remarks)


def test_inputs_that_a_targets_file_has_too_and_levels_of_recordings_are_named(
    tmp_path: Path,
) -> None:
    draw, lines = np.random.default_rng(3), ["id,inputs,targets"]
    for i in range(5):
        y, u = slow(draw), draw.normal(size=LENGTH) + 9 * i
        (tmp_path / f"x{i}").mkdir()
        table(tmp_path / f"x{i}", "level,early", [u, draw.normal(size=LENGTH)])
        lines.append(f"r{i},x{i}/lev.csv,{table(tmp_path / f'x{i}', 'early,y', [y, u])}")
    (tmp_path / "list.csv").write_text("\n".join(lines), encoding="utf-8")
    values = settings(tmp_path / "list.csv", tmp_path / "run", targets=["y"], task="regress")
    said = "; ".join(open_dataset(Config(**values)).remarks)
    assert "input early is a column of the targets files; if it is not known" in said
    assert "input level differs more between recordings than within them; if its level" in said
    assert "--standardise first:400" in said
    values["standardise"] = "recording"
    assert "differs" not in "; ".join(open_dataset(Config(**values)).remarks)
