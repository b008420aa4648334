"""Peak memory while a stream plays a large lazy object of each kind.

Each kind is played in a process of its own: 600 chunks of 100 steps on 16 lanes, which begin at 16
places of the object. The memory of the process just before, with the same libraries
imported, is subtracted; pages of files that the system may drop do not count. Sparse files and
arrays of a fill value take no disk (the value is not 0: the system would give zeros no memory).
Arrow, Parquet and CSV files have to be written, and are smaller.

    python benchmarks/data_memory.py [--gigabytes 4] [--json results.json]
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil

LANES, CHUNK, FEATURES = 16, 100, 8
CHUNKS = 600  # played, of an epoch
DASK = 262_144  # rows of a piece: Dask takes a while to slice an array of very many pieces


def memory_map(path: Path, rows: int) -> Any:
    return np.lib.format.open_memmap(path / "x.npy", "w+", np.float32, (rows, FEATURES))


def npy_file(path: Path, rows: int) -> Any:
    memory_map(path, rows)
    return path / "x.npy"


def hdf5(path: Path, rows: int) -> Any:
    import h5py

    with h5py.File(path / "x.h5", "w") as file:
        file.create_dataset("x", (rows, FEATURES), np.float32, chunks=(4096, FEATURES), fillvalue=1)
    return path / "x.h5"


def zarr_array(path: Path, rows: int) -> Any:
    import zarr

    return zarr.create_array(
        path / "x.zarr",
        shape=(rows, FEATURES),
        chunks=(16_384, FEATURES),
        dtype="f4",
        fill_value=1,
    )


def xarray(path: Path, rows: int, **options: Any) -> Any:
    import xarray as xr

    hdf5(path, rows)
    return xr.open_dataset(path / "x.h5", engine="netcdf4", **options)["x"]


def dask(path: Path, rows: int) -> Any:
    import dask.array

    return dask.array.from_zarr(zarr_array(path, rows), chunks=(DASK, FEATURES))


def arrow(path: Path, rows: int) -> Any:
    import pyarrow as pa

    batch = pa.record_batch({f"c{i}": np.zeros(65_536, np.float32) for i in range(FEATURES)})
    with pa.OSFile(str(path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as out:
        for _ in range(-(-rows // 65_536)):
            out.write_batch(batch)
    return path / "x.arrow"


def parquet(path: Path, rows: int) -> Any:
    import pyarrow as pa
    from pyarrow import parquet as pq

    values = np.random.default_rng(0).normal(size=65_536).astype(np.float32)
    batch = pa.table({f"c{i}": values for i in range(FEATURES)})
    with pq.ParquetWriter(path / "x.parquet", batch.schema) as out:
        for _ in range(-(-rows // 65_536)):
            out.write_table(batch)
    return path / "x.parquet"


def csv(path: Path, rows: int) -> Any:
    block = "\n".join(",".join(f"{i + j / 10:.4f}" for j in range(FEATURES)) for i in range(4096))
    with (path / "x.csv").open("w", encoding="utf-8") as file:
        file.write(",".join(f"c{i}" for i in range(FEATURES)) + "\n")
        for _ in range(-(-rows // 4096)):
            file.write(block + "\n")
    return path / "x.csv"


def edf(path: Path, rows: int) -> Any:
    """EDF written by hand: one header, and records of one second that a sparse file leaves zero."""
    rate, seconds = 1000, rows // 1000
    fields = (
        ("0", 8), ("", 80), ("", 80), ("01.01.26", 8), ("00.00.00", 8),
        (str(256 * (FEATURES + 1)), 8), ("", 44), (str(seconds), 8), ("1", 8), (str(FEATURES), 4),
    )  # fmt: skip
    signals = (
        ([f"EEG {i}" for i in range(FEATURES)], 16), ([""] * FEATURES, 80), (["uV"] * FEATURES, 8),
        (["-1"] * FEATURES, 8), (["1"] * FEATURES, 8), (["-32768"] * FEATURES, 8),
        (["32767"] * FEATURES, 8), ([""] * FEATURES, 80), ([str(rate)] * FEATURES, 8),
        ([""] * FEATURES, 32),
    )  # fmt: skip
    head = "".join(text.ljust(width) for text, width in fields)
    head += "".join(text.ljust(width) for texts, width in signals for text in texts)
    with (path / "x.edf").open("wb") as file:
        file.write(head.encode("ascii"))
        file.truncate(len(head) + seconds * rate * FEATURES * 2)
    return path / "x.edf"


KINDS: dict[str, tuple[str, Callable[[Path, int], Any], float]] = {
    # the line to write, the maker, and the share of the size that is made
    "memory map": ("np.load(path, mmap_mode='r')", memory_map, 1),
    "Zarr array": ("zarr.open_array(path)", zarr_array, 1),
    "xarray": ("xarray.open_dataset(path)['x']", xarray, 1),
    "xarray on Dask": (
        "xarray.open_dataset(path, chunks={'time': 262_144})['x']",
        lambda path, rows: xarray(path, rows, chunks={"phony_dim_0": DASK}),
        1,
    ),
    "Dask array": ("dask.array.from_zarr(path)", dask, 1),
    "NumPy file": ("'x.npy'", npy_file, 1),
    "HDF5 file": ("'x.h5'", hdf5, 1),
    "EDF file": ("'x.edf'", edf, 1),
    "Arrow file": ("'x.arrow'", arrow, 0.25),
    "Parquet file": ("'x.parquet'", parquet, 0.25),
    "CSV file": ("'x.csv'", csv, 0.05),
}


def play(kind: str, gigabytes: float) -> dict[str, Any]:
    """Plays one kind in this process: its size and how much its memory grew, in MB."""
    import throughtime as tt

    _, make, share = KINDS[kind]
    width = 2 if "EDF" in kind else 4
    rows = int(gigabytes * share * 1e9) // (FEATURES * width) // 1000 * 1000
    with tempfile.TemporaryDirectory() as folder:
        data = make(Path(folder), rows)
        list(tt.Stream(np.zeros((100, FEATURES)), 1, 100))  # all imports of the stream
        gc.collect()
        process, peak, ended = psutil.Process(), 0, threading.Event()
        before = private(process)

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.005):
                peak = max(peak, private(process))

        watcher = threading.Thread(target=watch, daemon=True)  # an error ends the process
        watcher.start()
        began = time.perf_counter()
        stream = tt.Stream(data, LANES, CHUNK, seed=None)
        steps = sum(chunk.steps * LANES for chunk in islice(stream, CHUNKS))
        seconds = time.perf_counter() - began
        ended.set()
        watcher.join()
    size = rows * FEATURES * width / 1e9
    return {"gigabytes": size, "peak_mb": (peak - before) / 1e6, "frames": steps, "s": seconds}


def private(process: psutil.Process) -> int:
    """Resident memory of the process, without pages of files that the system may drop."""
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", choices=list(KINDS))
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(play(options.kind, options.gigabytes)))
        return
    results: dict[str, Any] = {"machine": platform.platform(), "cores": os.cpu_count()}
    print("| kind | the line | GB | peak MB |\n|---|---|---|---|")
    for kind, (line, _, _) in KINDS.items():
        command = [sys.executable, __file__, "--kind", kind, "--gigabytes", str(options.gigabytes)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results[kind] = row = json.loads(output.splitlines()[-1])
        print(f"| {kind} | `{line}` | {row['gigabytes']:.1f} | {row['peak_mb']:.0f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
