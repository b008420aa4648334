"""Files of every format that hold the same numbers: 103 steps of 3 columns."""

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import edfio
import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import soundfile
import zarr

from throughtime.stream.formats.table import Array

STEPS = 103


def matrix(width: int = 3, steps: int = STEPS) -> Array:
    """Numbers that 8 bits and the text of a CSV both hold exactly, within the range of audio."""
    return np.random.default_rng(0).integers(-127, 128, size=(steps, width)) / 128


def write_npy(path: Path, values: Array) -> None:
    np.save(path, values)


def write_big_endian_npy(path: Path, values: Array) -> None:
    np.save(path, np.asfortranarray(values.astype(">f8")))


def write_npz(path: Path, values: Array) -> None:
    np.savez(path, a=values[:, 0], b=values[:, 1:])


def write_odd_npz(path: Path, values: Array) -> None:
    np.savez(
        path,
        odd_name=values[:, :2].astype(">f4"),
        c=np.asfortranarray(values[:, 2:].astype(np.float16)),
    )


def write_compressed_npz(path: Path, values: Array) -> None:
    np.savez_compressed(path, a=values[:, :2], b=values[:, 2])


def write_csv(path: Path, values: Array) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c"])
        writer.writerows(values.tolist())


def write_quoted_csv(path: Path, values: Array) -> None:
    with path.open("w", newline="\n") as file:
        file.write('\ufeff"a\nline",b,"c"\n')
        file.writelines(f'"{a}", {b} ,{c:e}\n\n' for a, b, c in values.tolist())


def write_csv_without_header(path: Path, values: Array) -> None:
    path.write_text("\r\n".join(",".join(map(str, row)) for row in values.tolist()), newline="")


def write_parquet(path: Path, values: Array) -> None:
    pq.write_table(table_of(values), path, row_group_size=max(10, len(values) // 2))


def table_of(values: Array) -> pa.Table:
    return pa.table({name: values[:, i] for i, name in enumerate("abc")})


def write_arrow(path: Path, values: Array) -> None:
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_file(file, table_of(values).schema) as writer,
    ):
        writer.write_table(table_of(values), max_chunksize=max(10, len(values) // 3))


def write_feather(path: Path, values: Array) -> None:
    feather.write_feather(
        table_of(values), path, compression="zstd", chunksize=max(7, min(len(values) // 5, 65536))
    )


def write_hdf5(path: Path, values: Array) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("mean", data=values.mean(axis=0))
        file.create_dataset("names", data=["a", "b", "c"])
        file.create_dataset("a", data=values[:, 0])
        file.create_dataset(
            "deep/er/b",
            data=values[:, 1:].astype(">f4"),
            chunks=(min(4096, len(values)), 1),
            compression="gzip",
        )


def write_zarr(path: Path, values: Array) -> None:
    group = zarr.open_group(path, mode="w")
    group.create_array("a", data=values[:, 0], chunks=(max(10, len(values) // 100),))
    group.create_array(
        "deep/b", data=values[:, 1:].astype(np.float32), chunks=(max(10, len(values) // 100), 2)
    )
    group.create_array("mean", data=values.mean(axis=0))


def write_netcdf(
    path: Path, values: Array, form: Literal["NETCDF4", "NETCDF3_CLASSIC"] = "NETCDF4"
) -> None:
    with netCDF4.Dataset(path, "w", format=form) as file:
        for name, length in (("time", len(values)), ("site", 2), ("feature", 3)):
            file.createDimension(name, length)
        file.createVariable("time", "f8", ("time",))[:] = np.arange(len(values))
        file.createVariable("where", "f8", ("time",))[:] = 1
        packed = file.createVariable("a", "i2", ("time",), fill_value=-999)
        packed.scale_factor = 1 / 128
        packed.coordinates = "where"
        packed[:] = values[:, 0]
        file.createVariable("b", "f4", ("time", "site"))[:] = values[:, 1:]
        file.createVariable("mean", "f8", ("feature",))[:] = values.mean(axis=0)


def write_classic_netcdf(path: Path, values: Array) -> None:
    write_netcdf(path, values, "NETCDF3_CLASSIC")


def write_sound(path: Path, values: Array) -> None:
    subtype = {".wav": "FLOAT", ".flac": "PCM_16"}[path.suffix]
    with soundfile.SoundFile(path, "w", 8000, values.shape[1], subtype) as file:
        for start in range(
            0, len(values), 10_000
        ):  # libsndfile overflows its stack where Vorbis is long
            file.write(values[start : start + 10_000])


def write_edf(path: Path, values: Array) -> None:
    bdf = path.suffix == ".bdf"
    kind: Any = edfio.BdfSignal if bdf else edfio.EdfSignal
    signals: Any = [
        kind(values[:, i], 100, label=name, physical_range=(-1, 1)) for i, name in enumerate("aab")
    ]
    whole: Any = edfio.Bdf if bdf else edfio.Edf
    whole(signals, data_record_duration=0.01 if len(values) < 1000 else 1).write(path)


def write_wfdb(path: Path, values: Array) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        import wfdb

        wfdb.wrsamp(
            path.stem,
            360,
            ["mV"] * 3,
            ["MLII", "V5", "x"],
            d_signal=(values * 128).astype(np.int64),
            fmt=["16"] * 3,
            adc_gain=[128.0] * 3,
            baseline=[0] * 3,
            write_dir=str(path.parent),
        )


class Format(NamedTuple):
    """How a file is written, and which of its bytes hold the steps."""

    suffix: str
    write: Callable[[Path, Array], None]
    rate: float | None = None

    def make(self, path: Path, values: Array | None = None) -> Array:
        """Write the file; return the values that it stores, rounded as its format rounds."""
        values = matrix() if values is None else values
        self.write(path, values)
        if self.suffix in (".bdf", ".edf"):
            read = edfio.read_bdf if self.suffix == ".bdf" else edfio.read_edf
            return np.stack([signal.data for signal in read(path).signals], axis=1)
        return values

    def content(self, path: Path) -> Path:
        """The file that holds the steps."""
        if self.suffix == ".zarr":
            return path / "deep" / "b" / "c" / "0" / "0"
        return path.with_suffix(".dat") if self.suffix == ".hea" else path


FORMATS: dict[str, Format] = {
    "npy": Format(".npy", write_npy),
    "npy-big-endian": Format(".npy", write_big_endian_npy),
    "npz": Format(".npz", write_npz),
    "npz-odd": Format(".npz", write_odd_npz),
    "npz-compressed": Format(".npz", write_compressed_npz),
    "csv": Format(".csv", write_csv),
    "csv-quoted": Format(".csv", write_quoted_csv),
    "csv-without-header": Format(".csv", write_csv_without_header),
    "parquet": Format(".parquet", write_parquet),
    "arrow": Format(".arrow", write_arrow),
    "feather": Format(".feather", write_feather),
    "h5": Format(".h5", write_hdf5),
    "hdf5": Format(".hdf5", write_hdf5),
    "zarr": Format(".zarr", write_zarr),
    "netcdf": Format(".nc", write_netcdf),
    "netcdf-classic": Format(".nc", write_classic_netcdf),
    "wav": Format(".wav", write_sound, 8000),
    "flac": Format(".flac", write_sound, 8000),
    "edf": Format(".edf", write_edf, 100),
    "bdf": Format(".bdf", write_edf, 100),
    "wfdb": Format(".hea", write_wfdb, 360),
}
CSV = "csv", "csv-quoted", "csv-without-header"  # one cut short at the end of a line is whole
every_format = pytest.mark.parametrize("form", list(FORMATS.values()), ids=list(FORMATS))
closed_formats = pytest.mark.parametrize(
    "form",
    [f for n, f in FORMATS.items() if n not in CSV],
    ids=[n for n in FORMATS if n not in CSV],
)
