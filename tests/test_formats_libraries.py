"""What a library says of its format: missing values, bits of a sample, dates, sizes, groups."""

from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import soundfile
import xarray as xr

import throughtime as tt
from format_files import FORMATS, STEPS, matrix
from throughtime.errors import DataError
from throughtime.stream.formats import open_table


@pytest.mark.parametrize("form", ["NETCDF4", "NETCDF3_CLASSIC"])
def test_values_that_netcdf_masks_are_nan(form: Any, tmp_path: Path) -> None:
    """Also those that were never written, and those outside the valid range. Mutant: xarray."""
    with netCDF4.Dataset(tmp_path / "r.nc", "w", format=form) as file:
        file.createDimension("time", 5)
        for kind in ("i1", "i2", "i4", "f4", "f8"):
            file.createVariable(kind, kind, ("time",))[:3] = [1, 2, 3]
            ranged = file.createVariable(f"{kind}_range", kind, ("time",))
            ranged.valid_range = np.array([0, 10], kind)
            ranged[:] = [1, 20, 3, 4, -1]
    table = open_table(tmp_path / "r.nc")
    for kind in ("i1", "i2", "i4", "f4", "f8"):
        values = table.read(0, 5, [kind, f"{kind}_range"])
        assert values.dtype == ("f4" if kind == "f4" else "f8")
        gap = np.nan
        np.testing.assert_array_equal(values.T, [[1, 2, 3, gap, gap], [1, gap, 3, 4, gap]])
        assert table.read(0, 1, [kind]).dtype == values.dtype


def test_integers_of_netcdf_that_float64_rounds_are_refused(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "r.nc", "w") as file:
        file.createDimension("time", 3)
        file.createVariable("u", "i8", ("time",))[:2] = [1, 2**53]
        file.createVariable("v", "i8", ("time",))[:] = [1, 2, 2**53 + 1]
    table = open_table(tmp_path / "r.nc")
    np.testing.assert_array_equal(table.read(0, 3, ["u"])[:, 0], [1, 2**53, np.nan])
    with pytest.raises(DataError, match=r"r\.nc: 'v': whole numbers .*float64"):
        table.read(0, 3, ["v"])


def test_packed_hdf5_and_records_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """Mutant: the numbers as they are stored."""
    pairs = np.zeros(4, dtype=[("a", "i4"), ("b", "f8")])
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["in/u"] = np.arange(4, dtype="i2")
        file["in/u"].attrs.update(scale_factor=0.5)
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["pair"] = pairs
    np.save(tmp_path / "r.npy", pairs)
    np.savez(tmp_path / "r.npz", pair=pairs)
    with pytest.raises(DataError, match=r"'in/u' has the attribute scale_factor: rename the file"):
        open_table(tmp_path / "r.h5")
    for name in ("s.h5", "r.npy", "r.npz"):
        with pytest.raises(
            DataError, match=r"expected arrays of numbers .* none of them of records"
        ):
            open_table(tmp_path / name)


def test_edf_with_more_records_than_it_says_is_refused(tmp_path: Path) -> None:
    FORMATS["edf"].make(tmp_path / "r.edf")
    content = (tmp_path / "r.edf").read_bytes()
    for records in (b"-1", b"102", b"0"):  # -1: it was not closed
        (tmp_path / "r.edf").write_bytes(content[:236] + records.ljust(8) + content[244:])
        with pytest.raises(
            DataError, match=rf"its header promises {records.decode()} data records"
        ):
            open_table(tmp_path / "r.edf")


def test_a_wav_file_beyond_4_gb_is_refused_where_it_is_cut_short(tmp_path: Path) -> None:
    """libsndfile reads what is left of it without a word; its header is RF64."""
    with soundfile.SoundFile(tmp_path / "r.wav", "w", 8000, 1, "PCM_16", format="RF64") as file:
        file.write(matrix(1))
    assert len(open_table(tmp_path / "r.wav")) == STEPS
    content = (tmp_path / "r.wav").read_bytes()
    (tmp_path / "r.wav").write_bytes(content[:-50])
    assert soundfile.info(tmp_path / "r.wav").frames == STEPS - 25
    with pytest.raises(DataError, match=r"r\.wav: holds \d+ bytes, its header promises"):
        open_table(tmp_path / "r.wav")


def test_wfdb_signals_of_several_samples_a_frame_are_refused(tmp_path: Path) -> None:
    """wfdb gives their means by default."""
    FORMATS["wfdb"].make(tmp_path / "r.hea")
    lines = (tmp_path / "r.hea").read_text().splitlines()
    for sizes in ((2, 2, 2), (1, 2, 1)):
        count = 3 * STEPS // sum(sizes)
        signals = [lines[1 + i].replace(" 16 ", f" 16x{size} ") for i, size in enumerate(sizes)]
        (tmp_path / "r.hea").write_text("\n".join([f"r 3 360 {count}", *signals]))
        with pytest.raises(DataError, match=r"r\.hea: .* or does a frame have several samples\?"):
            open_table(tmp_path / "r.hea")


def test_a_zarr_store_of_xarray_is_refused_and_played_as_a_data_set(tmp_path: Path) -> None:
    """Its values may be packed, and its coordinates are no inputs."""
    values = np.random.default_rng(0).normal(size=STEPS).round(3)
    xr.Dataset({"u": ("time", values)}).to_zarr(tmp_path / "r.zarr", consolidated=False)
    with pytest.raises(DataError, match=r"r\.zarr: 'u' was written by xarray; pass"):
        open_table(tmp_path / "r.zarr")
    data = xr.open_zarr(tmp_path / "r.zarr", consolidated=False)
    np.testing.assert_array_equal(tt.recording(data).read(0, STEPS).inputs[:, 0], values)
