"""A long recording of any format streams in flat memory, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from format_files import FORMATS, matrix

MEASURE = """
import sys, threading, time, psutil
from pathlib import Path
import numpy as np
from throughtime.stream.formats import open_table
own, small, large = psutil.Process(), *map(Path, sys.argv[1:3])
def private():  # without pages of mapped files, which the system may drop
    memory = own.memory_info()
    return memory.rss - memory.shared
table = open_table(small)
for start in range(0, len(table), 20):
    table.read(start, start + 20, table.columns)
base, peak, done = private(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, private())
        time.sleep(0.001)
watcher = threading.Thread(target=watch); watcher.start()
table = open_table(large)
starts = range(0, len(table), 5000)
blocks = (table.read(start, start + 5000, table.columns) for start in starts)
total = sum(float(block.sum(dtype=np.float64)) for block in blocks)
if sys.argv[3] == "hoard":
    hoard = [table.read(start, start + 5000, table.columns).copy() for start in starts]
done = True; watcher.join()
print(total, (peak - base) / 2**20)
"""
LOADED = {"npz", "npz-odd", "npz-compressed"}
LIKE_OTHERS = {"npy-big-endian", "csv-without-header", "hdf5"}
STEPS = 2_500_000  # 60 MB of float64, 50 MB of text


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FORMATS) - LIKE_OTHERS - LOADED))
def test_a_recording_of_60_mb_streams_in_half_of_it(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    values = np.tile(matrix(steps=25_000), (STEPS // 25_000, 1))
    form.make(tmp_path / f"small{form.suffix}")
    expected = form.make(tmp_path / f"large{form.suffix}", values).sum()
    words = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / f"small{form.suffix}"),
        str(tmp_path / f"large{form.suffix}"),
    ]
    total, grown = map(
        float,
        subprocess.run(
            [*words, "stream"], capture_output=True, text=True, check=True
        ).stdout.split(),
    )
    assert total == pytest.approx(expected, rel=1e-4)
    assert grown < 28, grown


@pytest.mark.slow
def test_the_measure_detects_a_recording_kept_in_memory(tmp_path: Path) -> None:
    FORMATS["csv"].make(tmp_path / "small.csv")
    FORMATS["csv"].make(tmp_path / "large.csv", np.tile(matrix(steps=25_000), (STEPS // 25_000, 1)))
    words = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / "small.csv"),
        str(tmp_path / "large.csv"),
        "hoard",
    ]
    assert (
        float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1])
        > 50
    )
