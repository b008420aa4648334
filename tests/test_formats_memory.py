"""A long recording of any format streams in flat memory, measured in a process of its own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from format_files import FORMATS, Format, matrix
from throughtime.stream.formats.table import Array

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


def measured(form: Format, values: Array, mode: str, folder: Path) -> tuple[float, float]:
    """The sum of all numbers that were read of a file, and the growth of memory in MiB."""
    paths = [folder / f"{size}{form.suffix}" for size in ("small", "large")]
    form.make(paths[0])
    form.make(paths[1], values)
    words = [sys.executable, "-c", MEASURE, *map(str, paths), mode]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    total, grown = map(float, said.split())
    return total, grown


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FORMATS) - LIKE_OTHERS - LOADED))
def test_a_recording_of_60_mb_streams_in_half_of_it(name: str, tmp_path: Path) -> None:
    values = np.tile(matrix(steps=25_000), (STEPS // 25_000, 1))
    total, grown = measured(FORMATS[name], values, "stream", tmp_path)
    assert total == pytest.approx(values.sum(), rel=1e-4)
    assert grown < 28, grown
    if name == "csv":  # the measure detects a recording that is kept
        assert measured(FORMATS[name], values, "hoard", tmp_path)[1] > 50
