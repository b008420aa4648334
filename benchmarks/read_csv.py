"""Time to read a large CSV file: opening, one pass, and a thousand rows anywhere.

    python benchmarks/read_csv.py [--megabytes 200] [--out benchmarks/results/read_csv.json]

The file has nine columns of random numbers with all their digits. `open` is the first time, with an
empty cache folder, where there is one; `open again` follows it. A pass reads 16,384 rows at a time;
rows that are read are added up, so that mapped ones count.
Before it measures, the script checks the values against those that were written. One thread; each
number is the best of five.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

COLUMNS, ROWS_AT_ONCE, SAMPLE = 9, 16_384, 1000


def write(path: Path, megabytes: int) -> np.ndarray:
    """The file; returns its first rows."""
    draw = np.random.default_rng(0)
    first = draw.normal(size=(ROWS_AT_ONCE, COLUMNS))
    values, size = first, 0
    with path.open("w", encoding="utf-8") as file:
        file.write(",".join(f"c{i}" for i in range(COLUMNS)) + "\n")
        while size < megabytes * 1e6:
            text = "".join(",".join(map(repr, row)) + "\n" for row in values.tolist())
            size += len(text)
            file.write(text)
            values = draw.normal(size=values.shape)
    return first


def seconds(function: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - began)
    return best


def measure(path: Path, first: np.ndarray) -> dict[str, float]:
    from throughtime.stream.formats import open_table

    opened = seconds(lambda: open_table(path), times=1)
    table = open_table(path)
    np.testing.assert_array_equal(table.read(0, len(first), table.columns), first)

    def one_pass() -> None:
        for start in range(0, len(table), ROWS_AT_ONCE):
            table.read(start, start + ROWS_AT_ONCE, table.columns).sum()

    draw = np.random.default_rng(1)

    def sample() -> None:
        start = int(draw.integers(0, len(table) - SAMPLE))
        table.read(start, start + SAMPLE, table.columns).sum()

    return {
        "open": opened,
        "open again": seconds(lambda: open_table(path)),
        "one pass": seconds(one_pass),
        "1,000 rows anywhere": seconds(lambda: [sample() for _ in range(50)]) / 50,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["THROUGHTIME_CACHE"] = str(Path(folder, "cache"))
        path = Path(folder, "r.csv")
        first = write(path, options.megabytes)
        result = {
            "megabytes": path.stat().st_size / 1e6,
            "columns": COLUMNS,
            "seconds": measure(path, first),
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "pyarrow": pa.__version__,
            },
            "machine": platform.machine(),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
