"""Files of named arrays that a library slices: HDF5, Zarr and netCDF.

Opening reads the names and shapes; the longest arrays are the columns. Shorter arrays (means, names
of channels) and those of more than two dimensions are no columns.
"""

import re
from base64 import standard_b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import (
    Array,
    FileArray,
    TableFile,
    import_extra,
    refuse_shorter,
    unreadable,
)

SIGNATURE = b"\x89HDF\r\n\x1a\n"
ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_EIGHT_BYTES = re.compile(r"[A-Za-z0-9+/]{11}=")  # in base 64
_DAMAGED = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    IndexError,
)  # what the libraries raise on damaged files
_LIBRARY_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # on damaged files


class ArraysFile(TableFile):
    """Named arrays of one length, read by slices of rows; a matrix is one wide column.

    Arrays of `datetime64` are time stamps.
    """

    def __init__(self, path: Path, arrays: Mapping[str, FileArray]) -> None:
        self.path, self._arrays, self.columns = path, arrays, tuple(arrays)
        self.times = tuple(name for name, array in arrays.items() if array.dtype.kind == "M")
        self.length = next((array.shape[0] for array in arrays.values()), 0)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        parts = [self._rows(name, start, stop) for name in columns]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _rows(self, name: str, start: int, stop: int) -> Array:
        what = f"{self.path}: steps {start} to {stop} of '{name}' cannot be read"
        with unreadable(what, _DAMAGED, "is the file damaged?"):
            rows = ArrayRows(name, self._arrays[name]).read(start, stop)
        return rows.reshape(stop - start, -1)


class MatrixColumns(TableFile):
    """The columns of an array `(T, D)`, called `0`, `1` and so on; whole rows are read of it."""

    def __init__(self, array: FileArray) -> None:
        self._array = ArrayRows("the columns", array)
        self.length, width = map(int, array.shape)
        self.columns = tuple(map(str, range(width)))

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        rows = self._array.read(start, stop)
        return rows if tuple(columns) == self.columns else rows[:, [int(c) for c in columns]]


@dataclass(frozen=True)
class ArrayView:
    """An array whose slices are computed from those of another; of its shape and type."""

    array: FileArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def __getitem__(self, rows: slice, /) -> Array:
        return self.array[rows]


@dataclass(frozen=True)
class FieldArray(ArrayView):
    """A field of a structured array."""

    field: str

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.array.shape, *self.array.dtype[self.field].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype[self.field].base

    def __getitem__(self, rows: slice, /) -> Array:
        return self.array[rows][self.field]


def with_fields(arrays: Mapping[str, FileArray]) -> dict[str, FileArray]:
    """The arrays, and in the place of a structured one its fields: `name/field`, or the fields."""
    single = len(arrays) == 1
    return {
        field if single and field else f"{name}/{field}" if field else name: (
            FieldArray(array, field) if field else array
        )
        for name, array in arrays.items()
        for field in array.dtype.names or ("",)
    }


@dataclass(frozen=True)
class ArrayRows:
    """The rows of an array; of one that is lazy or memory-mapped only those read are loaded.

    Of anything that slices rows. A masked value is NaN. A lazy array of Dask is computed in this
    thread: its pool of threads does not survive a fork.
    """

    source: str
    array: FileArray

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def read(self, start: int, stop: int) -> Array:
        rows: Any = self.array[start:stop]
        graph = getattr(rows, "__dask_graph__", None)
        if graph is not None and graph() is not None:
            rows = rows.compute(scheduler="synchronous")
        if isinstance(rows, np.ma.MaskedArray):
            rows = np.ma.filled(rows if rows.dtype.kind == "f" else rows.astype(np.float64), np.nan)
        return np.asarray(rows)


def longest_arrays(path: Path, arrays: Mapping[str, FileArray]) -> dict[str, FileArray]:
    """The longest numeric vectors and matrices, and time stamps of that length: the columns.

    Raises:
        DataError: there is none.
    """
    usable = {
        name: array
        for name, array in with_fields(arrays).items()
        if len(array.shape) in (1, 2) and array.dtype.kind in "biufM"
    }
    numeric = {name: array for name, array in usable.items() if array.dtype.kind != "M"}
    if not numeric:
        contents = (
            listed(f"{name} {array.dtype} {array.shape}" for name, array in arrays.items())
            or "no array"
        )
        raise DataError(
            f"{path}: holds {contents}, expected arrays of numbers with one row per step"
        )
    longest = max(array.shape[0] for array in numeric.values())
    return {name: array for name, array in usable.items() if array.shape[0] == longest}


def open_hdf5(path: Path) -> ArraysFile:
    """HDF5, by h5py: every vector or matrix of numbers is a column named by its path: `group/y`.

    Raises:
        MissingExtraError: h5py is not installed.
        DataError: the file is no HDF5 file, cut short, or holds no such dataset.
    """
    h5py = import_extra("h5py", path, "HDF5", "hdf5")
    _refuse_short_hdf5(path)
    with unreadable(f"{path}: not a readable HDF5 file", _LIBRARY_ERRORS):
        arrays = arrays_of_hdf5(h5py.File(path, "r"))  # the datasets keep the file open
    return ArraysFile(path, longest_arrays(path, arrays))


def arrays_of_hdf5(group: Any) -> dict[str, FileArray]:
    """The datasets of an open group and of the groups in it, by their paths; no scales."""
    arrays: dict[str, FileArray] = {}

    def add(name: str, member: Any) -> None:
        if getattr(member, "shape", None) is not None:  # a group has none, an empty dataset None
            _ = member.dtype  # raises TypeError for a type that NumPy does not have
            if not member.is_scale:
                arrays[name] = unpacked(member, member.attrs)

    group.visititems(add)
    return arrays


def _refuse_short_hdf5(path: Path) -> None:
    """Refuse a file that ends before its superblock says (HDF5 File Format Specification, II.A).

    The library checks this too, but not where it has the same file open already.
    """
    with path.open("rb") as file:
        head = file.read(96)
    if head[:8] != SIGNATURE:
        return  # no HDF5, or after a block of the user's: the library searches for it
    if len(head) < 96:
        raise DataError(
            f"{path}: not a readable HDF5 file, for it ends after {len(head)} bytes; the file is"
            " cut short"
        )
    version = head[8]
    width, start = (head[13], 24 + 4 * version) if version < 2 else (head[9], 12)
    refuse_shorter(path, int.from_bytes(head[start + 2 * width : start + 3 * width], "little"))


def open_zarr(path: Path) -> ArraysFile:
    """Zarr folders: every vector or matrix of numbers is a column; a single array is `0`.

    A piece without a file reads as the array's fill value, as the format defines it: a lost piece
    cannot be told from an empty one.

    Raises:
        MissingExtraError: zarr is not installed.
        DataError: the folder is no Zarr group or array, or holds no such array.

    Cost: a whole piece of an array is decoded for any row in it: write pieces of some 100,000
    numbers.
    """
    zarr = import_extra("zarr", path, "Zarr", "zarr")
    with unreadable(f"{path}: not a readable Zarr folder", _LIBRARY_ERRORS):
        root: Any = zarr.open(path, mode="r")
        arrays = {"0": root} if isinstance(root, zarr.Array) else arrays_of_zarr(root)
    return ArraysFile(path, longest_arrays(path, arrays))


def arrays_of_zarr(group: Any) -> dict[str, FileArray]:
    """The arrays of an open group and of the groups in it that are no coordinates, by their paths.

    Sorted: a folder lists its files in an order that may differ from one machine to another.
    """
    members = sorted(group.members(max_depth=None), key=lambda member: member[0])
    named = [(name, m, dict(m.attrs)) for name, m in members if hasattr(m, "shape")]
    coordinates = set(" ".join(str(a.get("coordinates", "")) for *_, a in named).split())
    arrays: dict[str, FileArray] = {}
    for name, array, attributes in named:
        own = name.rpartition("/")[2]
        dimensions = attributes.get("_ARRAY_DIMENSIONS")  # of xarray, in version 2 of the format
        if dimensions and array.fill_value is not None:
            attributes.setdefault("_FillValue", array.fill_value)
        fill = attributes.get("_FillValue")  # of xarray, in version 3: a float64 as text
        if array.dtype.kind == "f" and isinstance(fill, str) and _EIGHT_BYTES.fullmatch(fill):
            attributes["_FillValue"] = np.frombuffer(standard_b64decode(fill), "<f8")
        dimensions = dimensions or getattr(array.metadata, "dimension_names", None)
        if own not in coordinates and [own] != list(dimensions or ()):
            arrays[name] = unpacked(array, attributes)
    return arrays


def zarr_files(path: Path) -> tuple[Path, ...]:
    """The files that must not change: the metadata of the group and of its own arrays."""
    metadata = (
        folder / name
        for folder in (path, *sorted(p for p in path.iterdir() if p.is_dir()))
        for name in ZARR_METADATA
    )
    return tuple(file for file in metadata if file.is_file())


def open_netcdf(path: Path) -> ArraysFile:
    """netCDF, by netCDF4: every variable `(time,)` or `(time, features)` of numbers is a column.

    Packed values are unpacked, missing ones are NaN. Time is the first dimension of the longest
    variable; coordinates are no columns.

    Raises:
        MissingExtraError: netCDF4 is not installed, or SciPy for a classic file.
        DataError: the file is no netCDF file, cut short, of the type CDF-5, or holds no such
            variable.
    """
    netcdf = import_extra("netCDF4", path, "netCDF", "netcdf")
    with path.open("rb") as file:
        if file.read(3) == b"CDF":  # netCDF4 reads zeros from one that is cut short
            file.seek(0)
            scipy = import_extra("scipy.io", path, "classic netCDF", "netcdf")
            with unreadable(
                f"{path}: SciPy cannot read this classic netCDF file",
                (IndexError, KeyError, TypeError, ValueError),
                "is it cut short? One of the type CDF-5: nccopy -k nc4 FILE COPY",
            ):
                scipy.netcdf_file(file, mmap=True).close()
        else:
            _refuse_short_hdf5(path)
    with unreadable(f"{path}: not a readable netCDF file", (OSError, RuntimeError, ValueError)):
        data: Any = netcdf.Dataset(path, mode="r")
    return ArraysFile(path, longest_arrays(path, arrays_of_netcdf(data)))


def arrays_of_netcdf(group: Any) -> dict[str, FileArray]:
    """The variables of an open group that are no coordinates."""
    variables: dict[str, Any] = group.variables
    listed = " ".join(str(getattr(variable, "coordinates", "")) for variable in variables.values())
    coordinates = {*group.dimensions, *listed.split()}
    return {
        name: NetcdfVariable(variable)
        for name, variable in variables.items()
        if isinstance(variable.dtype, np.dtype) and name not in coordinates
    }


_PACKING = ("scale_factor", "add_offset", "_FillValue", "missing_value")


def unpacked(array: FileArray, attributes: Mapping[str, Any]) -> FileArray:
    """An array as its attributes say: stored values are `(value - add_offset) / scale_factor`.

    These are the CF conventions, which netCDF4 applies by itself; missing values are NaN.
    """
    numbers = {
        name: values
        for name in _PACKING
        if name in attributes and (values := np.ravel(attributes[name])).dtype.kind in "iuf"
    }
    return PackedArray(array, numbers) if numbers and array.dtype.kind in "iuf" else array


@dataclass(frozen=True)
class PackedArray(ArrayView):
    """An array of packed numbers, or with marks for missing ones, that unpacks its slices."""

    numbers: Mapping[str, Array]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype if self.array.dtype.kind == "f" else np.dtype(np.float64)

    def __getitem__(self, rows: slice, /) -> Array:
        stored = self.array[rows]
        scale, offset = (self.numbers.get(name) for name in _PACKING[:2])
        values = stored * (1.0 if scale is None else scale[0])
        values = (values + (0.0 if offset is None else offset[0])).astype(self.dtype)
        for name in _PACKING[2:]:
            marks = np.asarray(self.numbers.get(name, ()))
            marks = marks.astype(stored.dtype) if stored.dtype.kind == "f" else marks  # rounded
            values[np.isin(stored, marks)] = np.nan
        return values


@dataclass(frozen=True)
class NetcdfVariable(ArrayView):
    """A variable that unpacks its slices, always to the same type."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Floating if values are packed or may be missing."""
        stored = np.dtype(self.array.dtype)
        marked = set(_PACKING) & set(self.array.ncattrs())
        return np.dtype(np.float64) if marked and stored.kind in "biu" else stored

    def __getitem__(self, rows: slice, /) -> Array:
        values = self.array[rows]
        if self.dtype.kind == "f":
            return np.ma.filled(values.astype(self.dtype), np.nan)
        return np.ma.getdata(values)
