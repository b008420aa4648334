"""Files of arrays: NumPy's, memory-mapped, and those that a library slices: HDF5, Zarr, netCDF.

Opening reads the names and shapes; the longest arrays are the columns. Shorter arrays (means, names
of channels), coordinates and arrays of more than two dimensions are no columns.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from throughtime.errors import DataError, listed
from throughtime.stream.formats.table import (
    Array,
    FileArray,
    Table,
    check_exact,
    import_extra,
    unreadable,
)
from throughtime.stream.formats.times import nanoseconds

_NUMBERS, _COLUMNS = "biuf", "biufUSTOM"  # kinds: numbers; and text and times


class ArraysFile(Table):
    """Named arrays, read by slices of rows; a matrix is one wide column.

    The longest of numbers are the columns, with text and time stamps (`datetime64`) as long. Where
    there are no numbers, text.

    Args:
        path: of the file, for messages.
        arrays: by name.
        file: to keep open.
        every: whether all arrays are columns; of one that is of another length, or has no rows of
            values, there is an error when it is read.

    Raises:
        DataError: there is none, or one holds records of several fields.
    """

    def __init__(
        self,
        path: Path | str,
        arrays: Mapping[str, FileArray],
        file: Any = None,
        *,
        every: bool = False,
    ) -> None:
        ranks = {
            name: (array.dtype.kind in _NUMBERS, array.shape[0])
            for name, array in arrays.items()
            if array.dtype.kind in _COLUMNS
            and 0 < len(array.shape) <= 2 - (array.dtype.kind == "M")
        }
        self.path, self._file = path, file
        _, self.length = max(ranks.values(), default=(False, 0))
        self._arrays = {name: arrays[name] for name in ranks if ranks[name][1] == self.length}
        self.contents = listed(f"{name} {a.dtype} {a.shape}" for name, a in arrays.items())
        if not ranks or any(array.dtype.names for array in arrays.values()):
            raise self._fault("")
        self.columns = tuple(arrays if every else self._arrays)
        self.times = tuple(name for name, a in self._arrays.items() if a.dtype.kind == "M")

    def _fault(self, text: str) -> DataError:
        return DataError(
            f"{self.path}: {text}holds {self.contents or 'no array'}, expected arrays of numbers"
            " (steps,) or (steps, features), none of them of records; read it with its library, and"
            " pass the arrays by name: tt.recording({'x': array}, ...)"
        )

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        parts = list[Array]()
        for name in columns:
            if name not in self._arrays:
                raise self._fault(f"'{name}' is no column of {self.length} rows; name others; it ")
            what = f"{self.path}: '{name}'"
            rows = ArrayRows(what, self._arrays[name]).read(start, stop)
            rows = nanoseconds(rows, what) if name in self.times else rows
            parts.append(rows.reshape(stop - start, -1))
        return self.join(columns, parts)


class MatrixColumns(Table):
    """The columns of an array `(T, D)`, called `0`, `1` and so on; whole rows are read of it."""

    def __init__(self, path: Path | str, array: FileArray) -> None:
        self.path, self._array = path, ArrayRows(str(path), array)
        self.length, width = map(int, array.shape)
        self.columns = tuple(map(str, range(width)))

    def rows(self, start: int, stop: int, columns: Sequence[str]) -> Array:
        rows = self._array.read(start, stop)
        return rows if tuple(columns) == self.columns else rows[:, [int(c) for c in columns]]


@dataclass(frozen=True)
class ArrayRows:
    """The rows of an array; of one that is lazy or memory-mapped only those read are loaded.

    Of anything that slices rows. A masked value is NaN.
    """

    source: str
    array: FileArray

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def read(self, start: int, stop: int) -> Array:
        what = f"{self.source}: rows {start} to {stop} cannot be read"
        with unreadable(what, "is the file damaged?"):
            rows: Any = self.array[start:stop]
            if isinstance(rows, np.ma.MaskedArray):
                values = rows.astype(np.float64) if rows.dtype.kind in "biu" else rows
                check_exact(self.source, rows, values.dtype)
                rows = np.ma.filled(values, np.nan if values.dtype.kind == "f" else "")
            return np.asarray(rows)


def open_npy(path: Path) -> Table:
    """A vector is the column `0`; a matrix gives the columns `0`, `1`, ..."""
    with unreadable(f"{path}: not a readable .npy file"):
        array: Any = np.lib.format.open_memmap(path, mode="r")
    ArraysFile(path, {"0": array})
    return MatrixColumns(path, array if array.ndim == 2 else array[:, None])


def open_npz(path: Path) -> Table:
    """Every array is a column under its own name; a matrix is one wide column.

    All arrays that are not left out need the same number of rows. They are loaded: save large ones
    as `.npy`. Arrays of Python objects are not.
    """
    with unreadable(f"{path}: not a readable .npz file"), path.open("rb") as file:
        members: Any = np.load(file)  # of a path, it leaves a damaged file open
        arrays = dict.fromkeys(members, np.array(None))
        for name in members:
            with contextlib.suppress(ValueError):  # of objects
                arrays[name] = members[name]
    return ArraysFile(path, arrays, every=True)


def open_hdf5(path: Path) -> ArraysFile:
    """HDF5, by h5py: every vector or matrix of numbers is a column named by its path: `group/y`.

    Raises:
        MissingExtraError: h5py is not installed.
        DataError: the file is no HDF5 file, cut short, or holds no such dataset.
    """
    h5py = import_extra("h5py", path, "hdf5")
    with unreadable(f"{path}: not a readable HDF5 file"):
        arrays = arrays_of_hdf5(h5py.File(path, "r"))  # the datasets keep the file open
    return ArraysFile(path, arrays)


_PACKING = {
    *("scale_factor", "add_offset", "_FillValue", "missing_value"),
    *("valid_range", "valid_min", "valid_max", "_Unsigned"),
}


def arrays_of_hdf5(group: Any) -> dict[str, FileArray]:
    """The datasets of an open group and of the groups in it, by their paths; no scales.

    Raises:
        DataError: one is packed, or marks missing values: netCDF4 and xarray know these attributes.
    """
    members = dict[str, Any]()
    group.visititems(lambda name, member: members.update({name: member}))
    shaped = {n: m for n, m in members.items() if getattr(m, "shape", None) is not None}
    arrays = {name: m for name, m in shaped.items() if not m.is_scale}
    for name, member in arrays.items():
        if member.dtype.kind in "iuf" and (packing := _PACKING & {*member.attrs}):
            raise DataError(
                f"{group.filename}: '{name}' has the attribute {min(packing)}: rename the file .nc"
            )
    return arrays


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
    zarr = import_extra("zarr", path, "zarr")
    with unreadable(f"{path}: not a readable Zarr folder"):
        root: Any = zarr.open(path, mode="r")
        arrays = {"0": root} if isinstance(root, zarr.Array) else arrays_of_zarr(root)
    table = ArraysFile(path, arrays)
    table.files = tuple(file for name in (".zarray", "zarr.json") for file in path.rglob(name))
    return table


def arrays_of_zarr(group: Any) -> dict[str, FileArray]:
    """The arrays of an open group and of the groups in it, by their paths.

    Sorted: a folder lists its files in an order that may differ from one machine to another.

    Raises:
        DataError: xarray has written one: it knows the coordinates and the missing values.
    """
    arrays = {name: m for name, m in group.members(max_depth=None) if hasattr(m, "dtype")}
    for name, array in arrays.items():
        if getattr(array.metadata, "dimension_names", None) or "_ARRAY_DIMENSIONS" in array.attrs:
            raise DataError(
                f"{group.store}: '{name}' was written by xarray; pass xarray.open_zarr(path)"
            )
    return dict(sorted(arrays.items()))


def arrays_of_xarray(data: Any) -> dict[str, FileArray]:
    """The variables of a data set that have steps, first, and its time stamps.

    Steps are the dimension `time`, or the longest of those that are the first of a variable.
    """
    times = {name: array for name, array in data.coords.items() if array.dtype.kind == "M"}
    arrays = {**data.data_vars, **times}
    steps = _steps_of("the data set", [a.dims for a in arrays.values()], data.sizes)
    return {name: a.transpose(steps, ...) for name, a in arrays.items() if steps in a.dims}


def _steps_of(what: str, dimensions: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> str:
    """The dimension of the steps, by the dimensions of each array.

    Raises:
        DataError: another one that is the first of an array is as long.
    """
    first = [own[0] for own in dimensions if own]
    steps = "time" if "time" in sizes else max(first, key=sizes.__getitem__, default="")
    for own in dimensions:
        if own and steps not in own and sizes[own[0]] == sizes[steps]:
            raise DataError(
                f"{what}: are '{steps}' or '{own[0]}', of one length, the steps? Leave one out, and"
                f" pass the rest: xarray.open_dataset(path).drop_dims('{own[0]}')"
            )
    return steps


def open_netcdf(path: Path) -> ArraysFile:
    """netCDF, by netCDF4: every variable `(time,)` or `(time, features)` of numbers is a column.

    Packed values are unpacked; those that netCDF4 masks are NaN, so integers are float64. Time is
    the first dimension of the longest variable; coordinates and times are no columns: xarray reads
    them, `tt.recording(xarray.open_dataset(path))`.

    Raises:
        MissingExtraError: netCDF4 is not installed, or SciPy for a classic file.
        DataError: the file is no netCDF file, cut short, of the type CDF-5, or holds no such
            variable.
    """
    with path.open("rb") as file:
        if file.read(3) == b"CDF":  # netCDF4 reads zeros from one that is cut short
            file.seek(0)
            scipy = import_extra("scipy.io", path, "netcdf")
            with unreadable(
                f"{path}: SciPy cannot read this classic netCDF file",
                "is it cut short? Convert one of the type CDF-5: nccopy -k nc4 FILE COPY",
            ):
                scipy.netcdf_file(file, mmap=True).close()
    netcdf = import_extra("netCDF4", path, "netcdf")
    with unreadable(f"{path}: not a readable netCDF file"):
        data = netcdf.Dataset(path, keepweakref=True)  # no cycle would keep it open
        arrays = arrays_of_netcdf(data)
    return ArraysFile(path, arrays, data)


def arrays_of_netcdf(group: Any) -> dict[str, FileArray]:
    """The variables of an open group that are no coordinates, and no times; texts are loaded."""
    variables: dict[str, Any] = group.variables
    listed = " ".join(str(getattr(variable, "coordinates", "")) for variable in variables.values())
    coordinates = {*group.dimensions, *listed.split()}
    chosen = {
        name: variable
        for name, variable in variables.items()
        if name not in coordinates and " since " not in str(getattr(variable, "units", ""))
    }
    sizes = {name: len(dimension) for name, dimension in group.dimensions.items()}
    _steps_of(group.filepath(), [v.dimensions[:1] for v in chosen.values()], sizes)
    return {n: v[:].astype(np.str_) if v.dtype is str else v for n, v in chosen.items()}
