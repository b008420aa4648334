"""What commands print as they work: a line of progress, and errors."""

import re
from pathlib import Path

import numpy as np

from test_cli import run, signals


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    u, y = signals()
    np.savez(tmp_path / "plant.npz", inputs=u, targets=y)
    words = [
        "--task",
        "regress",
        "--hidden",
        "4",
        "--lanes",
        "2",
        "--stride",
        "20",
        "--updates",
        "50",
    ]
    said = run("train", tmp_path / "plant.npz", *words, "--out", tmp_path / "run")
    updates = re.findall(r"^update (\d+)/50  loss .* left  [\d,]+ steps/s", said, re.MULTILINE)
    assert updates == [*map(str, range(1, 51))]
