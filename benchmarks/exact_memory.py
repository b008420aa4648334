"""The memory of the exact gradient of 1,000,000 steps beside that of 10,000. Linux only.

    python benchmarks/exact_memory.py [--steps 10000,1000000] [--out FILE]

A class with a two-layer LSTM of 8 units, batch 1, float32, MSE, one thread. Inputs and targets are
mapped from files. Each number of steps runs in a fresh process. Its memory is the anonymous part of
the resident set (RssAnon of /proc/self/status), without pages of files, read every 2 ms. Above it
the peak of one update of `tt.Exact()` is printed, and its time per step beside `tt.Truncated(100)`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

import throughtime as tt
from record import parser_of, write
from throughtime.carry import Carried

FEATURES, HIDDEN, STRIDE = 3, 8, 100
SHORT, TIMED = 2_000, 100_000  # steps of the update that warms up; steps of the truncated ones
PERIOD = 0.002  # seconds between two looks


class Tagger(nn.Module):
    """Takes and returns its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, HIDDEN, num_layers=2)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, after = self.lstm(x, state)
        return self.head(y), after


def anonymous_bytes() -> int:
    """The resident memory of this process that is mapped from no file."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("RssAnon is not in /proc/self/status: this needs Linux 4.5 or later")


class Peak:
    """The most anonymous memory inside a `with`."""

    def __enter__(self) -> Self:
        self.start = self.bytes = anonymous_bytes()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(PERIOD):
            self.bytes = max(self.bytes, anonymous_bytes())


def mapped(folder: Path, steps: int) -> dict[str, Any]:
    """A recording of the first steps of the files."""
    return {
        name: np.load(folder / f"{name}.npy", mmap_mode="r")[:steps]
        for name in ("inputs", "targets")
    }


def sweep(net: Carried, recording: dict[str, Any], gradient: Any) -> float:
    """All updates of a recording; their seconds."""
    stream = tt.Stream(recording, lanes=1, chunk=STRIDE)
    began = time.perf_counter()
    for _ in tt.updates(net, stream, nn.MSELoss(), gradient=gradient):
        net.zero_grad()
    return time.perf_counter() - began


def measure(folder: Path, steps: int) -> dict[str, float]:
    """What a fresh process runs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = tt.carry(Tagger())
    for gradient in (tt.Exact(), tt.Truncated(STRIDE)):
        sweep(net, mapped(folder, SHORT), gradient)
    recording = mapped(folder, steps)
    with Peak() as peak:
        seconds = sweep(net, recording, tt.Exact())
    timed = min(steps, TIMED)
    return {
        "start": peak.start,
        "peak": peak.bytes,
        "seconds_per_step": seconds / steps,
        "truncated_seconds_per_step": sweep(net, mapped(folder, timed), tt.Truncated(STRIDE))
        / timed,
    }


def main() -> None:
    parser = parser_of(__doc__, "exact_memory")
    parser.add_argument("--steps", default="10000,1000000", help="of each process")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        folder, steps = options.measure
        print(json.dumps(measure(Path(folder), int(steps))))
        return
    counts, rows = [int(count) for count in options.steps.split(",")], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(0)
        for name, columns in (("inputs", FEATURES), ("targets", 1)):
            series = random.standard_normal((max(counts), columns), dtype=np.float32)
            np.save(Path(folder, name), series)
        for steps in counts:
            command = [sys.executable, __file__, "--measure", folder, str(steps)]
            result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            row = rows[str(steps)] = json.loads(result.stdout)
            ours, other = row["seconds_per_step"], row["truncated_seconds_per_step"]
            print(
                f"{steps:9,} steps: peak {row['peak'] / 1e6:6.1f} MB,"
                f" {(row['peak'] - row['start']) / 1e6:5.1f} MB above the start,"
                f" {ours * 1e6:.2f} us a step, {ours / other:.2f} of Truncated({STRIDE})'s"
            )
    peaks = [row["peak"] for row in rows.values()]
    print(f"{(peaks[-1] - peaks[0]) / 1e6:.1f} MB more for {counts[-1]:,} than for {counts[0]:,}")
    write(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
