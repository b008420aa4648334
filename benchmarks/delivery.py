"""The rate of delivered chunks, of a small model's consumption, and the memory of a long file.

    python benchmarks/delivery.py [--frames 4000000] [--gigabytes 4] [--out
    benchmarks/results/delivery.json]

Delivery: sixteen recordings of one input and one target, on 16 lanes in chunks of 100 steps, from
each format; all of them are first checked to give the same numbers.
Consumption: `tt.updates` with Truncated(100) and SGD on chunks that are in memory already, with
nn.RNN(1, 8) and nn.LSTM(1, 32), each with a linear readout. One thread. Each number is the best of
three epochs. (The LSTM, a fused kernel in torch, is the faster of the two: it is the one to compare
with.) The long file is one recording of eight columns, written in a temporary folder that is
removed; memory is resident memory above the start, of this process, at its highest. All files are
streamed in one process, in the order of the results.
"""

import json
import os
import shutil
import tempfile
import threading
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import torch
from torch import nn

import throughtime as tt
from record import parser_of, write
from throughtime.carry import Carried

LANES, CHUNK, COLUMNS = 16, 100, 8
STRETCH = 1_000_000  # rows written at a time


def write_npy(path: Path, values: np.ndarray) -> None:
    np.save(path, values)


def write_csv(path: Path, values: np.ndarray) -> None:
    import pyarrow as pa
    from pyarrow import csv

    csv.write_csv(pa.table({"x": values[:, 0]}), path)


def write_parquet(path: Path, values: np.ndarray) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"x": values[:, 0]}), path, row_group_size=65_536)


def write_hdf5(path: Path, values: np.ndarray) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(min(8192, len(values)), 1))


def write_wav(path: Path, values: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((values * 32768).astype("<i2").tobytes())


FORMATS: dict[str, Callable[[Path, np.ndarray], None]] = {
    "npy": write_npy,
    "parquet": write_parquet,
    "h5": write_hdf5,
    "wav": write_wav,
    "csv": write_csv,
}


def signal(steps: int, seed: int) -> np.ndarray:
    """Numbers that 16 bits hold exactly, so that every format gives the same."""
    draw = np.random.default_rng(seed)
    return (draw.integers(-32768, 32768, (steps, 1)) / 32768).astype(np.float32)


def recordings(folder: Path, suffix: str, frames: int) -> list[dict[str, Any]]:
    """Written once; targets are memory-mapped NPY with every format."""
    found: list[dict[str, Any]] = []
    for i in range(LANES):
        values, path, targets = (
            signal(frames // LANES, i),
            folder / f"{i}.{suffix}",
            folder / f"{i}_targets.npy",
        )
        if not path.exists():
            FORMATS[suffix](path, values)
        if not targets.exists():
            np.save(targets, values[::-1])
        found.append({"inputs": path, "targets": targets})
    return found


def stream_of(source: Any) -> tt.Stream:
    return tt.Stream(source, LANES, CHUNK, dtype=torch.float32)


def small(name: str) -> Carried:
    torch.manual_seed(0)
    layer, width = (nn.RNN(1, 8), 8) if name == "rnn-8" else (nn.LSTM(1, 32), 32)
    return tt.carry(nn.Sequential(layer, nn.Linear(width, 1)))


def train(name: str, source: Any) -> float:
    """Seconds of an epoch."""
    net = small(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    began = time.perf_counter()
    for _ in tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(CHUNK)):
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - began


def deliver(source: Any) -> float:
    """Seconds of an epoch."""
    stream = stream_of(source)
    began = time.perf_counter()
    for _ in stream:
        pass
    return time.perf_counter() - began


def check_same(folder: Path, frames: int) -> None:
    """Every format gives the same chunks."""
    expected = None
    for suffix in FORMATS:
        sums = torch.stack(
            [
                (c.inputs[..., 0] * c.position).double().sum()
                + 3 * torch.as_tensor(c.targets).double().sum()
                for c in stream_of(recordings(folder, suffix, frames))
            ]
        )
        expected = sums if expected is None else expected
        if not torch.equal(sums, expected):
            raise SystemExit(f"{suffix} gives other numbers")


def speeds(frames: int, turns: int = 3) -> dict[str, Any]:
    """Frames per second."""
    folder = Path(tempfile.mkdtemp(prefix="throughtime-delivery-"))
    try:
        check_same(folder, frames // 10)
        for path in folder.iterdir():
            path.unlink()
        sources = {suffix: recordings(folder, suffix, frames) for suffix in FORMATS}
        held = list(stream_of(recordings(folder, "npy", frames)))[:1000]
        runs: dict[str, Callable[[], float]] = {
            f"consume {name}": lambda name=name: train(name, held) for name in ("rnn-8", "lstm-32")
        }
        for suffix, source in sources.items():
            runs[suffix] = lambda s=source: deliver(s)
        best = {name: min(run() for _ in range(turns)) for name, run in runs.items()}
        consumed = {
            name: sum(c.steps for c in held) * LANES / best[f"consume {name}"]
            for name in ("rnn-8", "lstm-32")
        }
        arrived = {
            name: frames / seconds
            for name, seconds in best.items()
            if not name.startswith("consume")
        }
        waiting = {suffix: waited(sources[suffix]) for suffix in FORMATS}
        return {
            "frames": frames,
            "consumed_per_second": {name: round(value) for name, value in consumed.items()},
            "delivered_per_second": {name: round(value) for name, value in arrived.items()},
            "times_rnn-8": {
                name: round(value / consumed["rnn-8"], 2) for name, value in arrived.items()
            },
            "times_lstm-32": {
                name: round(value / consumed["lstm-32"], 2) for name, value in arrived.items()
            },
            "share_of_rnn-8_training_waiting": waiting,
        }
    finally:
        shutil.rmtree(folder)


def waited(source: Any, updates: int = 500) -> float:
    """Share of the time of a training that it waits for data."""
    net, stream = small("rnn-8"), stream_of(source)
    read, waits = stream.read, list[float]()

    def timed(start: int, stop: int) -> Any:
        asked = time.perf_counter()
        chunk = read(start, stop)
        waits.append(time.perf_counter() - asked)
        return chunk

    stream.read = timed
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    began = time.perf_counter()
    for i, _ in enumerate(tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(CHUNK))):
        optimizer.step()
        optimizer.zero_grad()
        if i == updates:
            break
    return round(sum(waits) / (time.perf_counter() - began), 4)


def private(process: psutil.Process) -> int:
    """Resident memory of the process, without pages of mapped files, which the system may drop."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


class Watched:
    """Peak resident memory above the start, sampled every 50 ms."""

    def __init__(self) -> None:
        self.process, self.stop = psutil.Process(), threading.Event()
        self.start = private(self.process)
        self.most = 0
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.stop.wait(0.05):
            self.most = max(self.most, private(self.process) - self.start)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()


def write_long(path: Path, gigabytes: float) -> int:
    """A file of about so many gigabytes, written stretch by stretch; its steps."""
    steps = int(gigabytes * 1e9 / (4 * COLUMNS))
    made = {".npy": long_npy, ".parquet": long_parquet, ".h5": long_hdf5, ".csv": long_csv}[
        path.suffix
    ]
    if path.suffix == ".csv":
        steps = int(gigabytes * 1e9 / 72)  # about 72 bytes a line
    made(path, steps)
    return steps


def stretches(steps: int) -> Any:
    values = np.random.default_rng(0).normal(size=(STRETCH, COLUMNS)).astype(np.float32)
    for at in range(0, steps, STRETCH):
        yield at, values[: min(STRETCH, steps - at)]


def long_npy(path: Path, steps: int) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array_header_2_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (steps, COLUMNS)}
        )
        for _, values in stretches(steps):
            file.write(values.tobytes())


def long_parquet(path: Path, steps: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names = [f"x{i}" for i in range(COLUMNS)]
    with parquet.ParquetWriter(
        path,
        pa.schema([(name, pa.float32()) for name in names]),
        compression="none",
        use_dictionary=False,
    ) as file:
        for _, values in stretches(steps):
            file.write_table(
                pa.table(dict(zip(names, values.T, strict=True))), row_group_size=65_536
            )


def long_hdf5(path: Path, steps: int) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (steps, COLUMNS), "f4", chunks=(8192, COLUMNS))
        for at, values in stretches(steps):
            data[at : at + len(values)] = values


def long_csv(path: Path, steps: int) -> None:
    import pyarrow as pa
    from pyarrow import csv

    names = [f"x{i}" for i in range(COLUMNS)]
    with csv.CSVWriter(path, pa.schema([(name, pa.float32()) for name in names])) as file:
        for _, values in stretches(steps):
            file.write_table(pa.table(dict(zip(names, values.round(4).T, strict=True))))


def memory(suffix: str, gigabytes: float) -> dict[str, Any]:
    """What streaming all of a long file takes."""
    folder = Path(tempfile.mkdtemp(prefix="throughtime-delivery-"))
    try:
        path = folder / f"long{suffix}"
        steps = write_long(path, gigabytes)
        with Watched() as watched:
            stream, began = (
                tt.Stream(path, LANES, CHUNK, seed=None),
                time.perf_counter(),
            )
            seen = sum(chunk.steps * LANES for chunk in stream)
            seconds = time.perf_counter() - began
        del stream
        if seen < steps:
            raise SystemExit(f"{seen} of {steps} steps arrived")
        return {
            "file": suffix,
            "bytes": path.stat().st_size,
            "steps": steps,
            "frames_per_second": round(steps / seconds),
            "resident_MB_above_start": round(watched.most / 1e6, 1),
        }
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = parser_of(__doc__, "delivery")
    parser.add_argument("--frames", type=int, default=4_000_000)
    parser.add_argument(
        "--gigabytes",
        type=float,
        default=4.0,
        help="of the NPY file; the others take a quarter of it",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "numpy": np.__version__,
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "memory": [
            memory(".npy", options.gigabytes),
            *(memory(suffix, options.gigabytes / 4) for suffix in (".parquet", ".h5", ".csv")),
        ],
        "speed": speeds(options.frames),
    }
    write(options.out, found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
