"""Damage files of a format at random and compare what is read of them with the format's library.

    python tests/damaged_files.py both 'npy 0' 'npy 1'

Run in a process of its own, because a library may crash on a damaged file. Prints one JSON line
per file, before and after each read, so that the file of a crash is known.
"""

import json
import random
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import edfio
import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import soundfile
import zarr
from pyarrow import parquet

from format_files import FORMATS
from throughtime.errors import DataError
from throughtime.stream.formats import open_table
from throughtime.stream.formats.table import Array

ROWS = 200  # read of a damaged file, which may promise any number
HANG = 20  # seconds for one file
Columns = Mapping[str, Any]


def numpy_columns(path: Path) -> Columns:
    array = np.load(path)
    return {str(i): array[:, i] for i in range(array.shape[1])}


def npz_columns(path: Path) -> Columns:
    with path.open("rb") as file:
        return dict(np.load(file))


def hdf5_columns(path: Path) -> Columns:
    return h5py.File(path, "r")


def zarr_columns(path: Path) -> Columns:
    return zarr.open_group(path, mode="r")  # pyright: ignore[reportReturnType]


def netcdf_columns(path: Path) -> Columns:
    return netCDF4.Dataset(path).variables


def sound_columns(path: Path) -> Columns:
    samples = soundfile.read(path, dtype="float32", always_2d=True)[0]
    return {str(i): samples[:, i] for i in range(samples.shape[1])}


def edf_columns(path: Path) -> Columns:
    """Signals in their order; edfio warns where the file has other records than its header says."""
    read: Any = edfio.read_bdf if path.suffix == ".bdf" else edfio.read_edf
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*records.*|.*truncated.*")
        signals = read(path, header_encoding="latin-1").signals
        return {str(i): one.data for i, one in enumerate(signals)}


def wfdb_columns(path: Path) -> Columns:
    import wfdb

    record: Any = wfdb.rdrecord(str(path.with_suffix("")))
    return {name: record.p_signal[:, i] for i, name in enumerate(record.sig_name)}


def parquet_columns(path: Path) -> Columns:
    return columns_of(parquet.ParquetFile(path).read())


def arrow_columns(path: Path) -> Columns:
    return columns_of(pa.ipc.open_file(pa.OSFile(str(path))).read_all())


def columns_of(table: Any) -> Columns:
    return {name: table.column(name).to_numpy() for name in table.column_names}


LIBRARIES: dict[str, Callable[[Path], Columns]] = {
    "npy": numpy_columns,
    "npz": npz_columns,
    "npz-compressed": npz_columns,
    "h5": hdf5_columns,
    "zarr": zarr_columns,
    "netcdf": netcdf_columns,
    "netcdf-classic": netcdf_columns,
    "wav": sound_columns,
    "flac": sound_columns,
    "edf": edf_columns,
    "bdf": edf_columns,
    "wfdb": wfdb_columns,
    "parquet": parquet_columns,
    "arrow": arrow_columns,
    "feather": arrow_columns,
}


def damage(rng: random.Random, content: bytes) -> bytes:
    """Cut short, with a range replaced, or with up to eight flipped bits.

    These are half of the time in the first 512 bytes.
    """
    kind = rng.random()
    if kind < 0.25:
        return content[: rng.randrange(len(content))]
    data = bytearray(content)
    end = len(data) if rng.random() < 0.5 else min(len(data), 512)
    if kind < 0.5:
        at, size = rng.randrange(end), rng.choice([1, 4, 16, 64])
        data[at : at + size] = rng.choice([bytes(size), rng.randbytes(size)])[: len(data) - at]
        return bytes(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(data)


def damaged(name: str, seed: int, folder: Path) -> Path:
    """A file of the format, one of whose files is damaged."""
    rng = random.Random(f"{name} {seed}")
    path = folder / f"r{FORMATS[name].suffix}"
    FORMATS[name].make(path)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file = rng.choice([path] if path.is_file() and rng.random() < 0.5 else files)
    file.write_bytes(damage(rng, file.read_bytes()))
    return path


def ours(path: Path) -> dict[str, Array]:
    """The columns in pieces, as a stream reads them."""
    table = open_table(path)
    count = min(len(table), ROWS)
    columns: dict[str, Array] = {}
    for name in table.columns:
        pieces = [table.read(i, min(i + 40, count), [name]) for i in range(0, count, 40)]
        columns[name] = np.concatenate(pieces or [table.read(0, 0, [name])])
    return columns


def verdict(name: str, path: Path) -> str:
    """What became of a file: read as the library reads it, refused, or a fault."""
    try:
        columns = ours(path)
    except DataError:
        return "refused"
    except Exception as error:  # noqa: BLE001  a fault of the reader, to be reported
        return f"FAULT raised {error!r}"
    try:
        expected = LIBRARIES[name](path)
        by_index = path.suffix in (".edf", ".bdf")
        for index, (column, values) in enumerate(columns.items()):
            rows = expected[str(index) if by_index else column][: len(values)]
            rows = (
                np.ma.filled(rows.astype(float), np.nan) if np.ma.isMA(rows) else np.asarray(rows)
            )
            assert len(rows) == len(values)
            np.testing.assert_array_equal(values, rows.reshape(values.shape))
    except Exception as error:  # noqa: BLE001  libraries raise anything
        return f"FAULT not as the library: {error!r}"
    return "read"


def one(name: str, seed: int, *, alone: bool) -> str:
    """What becomes of a damaged file; `alone` reads it by the library only."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = damaged(name, seed, Path(folder))
        print(json.dumps([f"{name} {seed}", "started"]), flush=True)
        if not alone:
            return verdict(name, path)
        for values in LIBRARIES[name](path).values():
            np.asarray(values[:ROWS])
        return "read by the library"


def main() -> None:
    warnings.simplefilter("ignore")
    for file in sys.argv[2:]:
        signal.alarm(HANG)
        name, seed = file.split()
        result = one(name, int(seed), alone=sys.argv[1] == "alone")
        print(json.dumps([file, result]), flush=True)


if __name__ == "__main__":
    main()
