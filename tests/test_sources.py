"""What a stream accepts: every kind of object plays as its materialised array does, to the bit, and
is read as far as it is played.

Shapes: `T` steps, `D` input features.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import xarray as xr
import zarr
from pyarrow import parquet
from torch.utils.data import TensorDataset

import throughtime as tt
from test_stream import all_same, rest_of_epoch
from throughtime.chunk import Chunk
from throughtime.errors import DataError
from throughtime.stream.sources import as_recordings

T, D = 307, 3
NAMES = ["a", "b", "c"]


def values() -> np.ndarray[Any, Any]:
    """Numbers that float32 would round."""
    return np.random.default_rng(0).normal(size=(T, D))


def target() -> np.ndarray[Any, Any]:
    """The first column, doubled: equal values would be a copy of an input."""
    return values()[:, 0] * 2


def hdf5(folder: Path) -> h5py.File:
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=values(), chunks=(50, 2))
        file["y"] = target()
        for i, name in enumerate(NAMES):
            file[f"columns/{name}"] = values()[:, i]
    return h5py.File(folder / "x.h5", "r")


def zarr_group(folder: Path) -> Any:
    group = zarr.open_group(folder / "x.zarr", mode="w")
    group.create_array("x", data=values(), chunks=(50, 2))
    columns = group.create_group("columns")
    for i, name in enumerate(NAMES):
        columns.create_array(name, data=values()[:, i])
    return zarr.open_group(folder / "x.zarr", mode="r")


def netcdf(folder: Path, **options: Any) -> Any:
    data = {name: (("time",), values()[:, i]) for i, name in enumerate(NAMES)}
    times = pd.date_range("2026-01-01", periods=T, freq="h")
    matrix = {"x": (("time", "channel"), values()), "y": (("time",), target())}
    xr.Dataset(data, coords={"time": times}).to_netcdf(folder / "columns.nc")
    xr.Dataset(matrix, coords={"time": times}).to_netcdf(folder / "matrix.nc")
    return xr.open_dataset(folder / "matrix.nc", **options)


def memory_map(folder: Path) -> Any:
    np.save(folder / "x.npy", values())
    return np.load(folder / "x.npy", mmap_mode="r")


def csv(folder: Path) -> Path:
    pd.DataFrame(values(), columns=NAMES).to_csv(folder / "x.csv", index=False)
    return folder / "x.csv"


def parquet_file(folder: Path) -> Path:
    parquet.write_table(pa.table(frame()), folder / "x.parquet", row_group_size=100)
    return folder / "x.parquet"


def frame() -> pd.DataFrame:
    return pd.DataFrame(values(), columns=NAMES)


def with_date(table: pd.DataFrame) -> pd.DataFrame:
    table.index = pd.date_range("2026-01-01", periods=T, freq="h")
    return table


KINDS: dict[str, Callable[[Path], Any]] = {
    "numpy": lambda _: values(),
    "numpy, Fortran order": lambda _: np.asfortranarray(values()),
    "memory map": memory_map,
    "tensor": lambda _: torch.from_numpy(values()),
    "tensor with a gradient": lambda _: torch.from_numpy(values()).requires_grad_(),
    "masked array": lambda _: np.ma.masked_array(values()),
    "zarr array": lambda folder: zarr_group(folder)["x"],
    "zarr group": lambda folder: zarr_group(folder)["columns"],
    "xarray": lambda folder: netcdf(folder)["x"],
    "xarray on dask": lambda folder: netcdf(folder, chunks={"time": 40})["x"],
    "xarray dataset": lambda folder: (netcdf(folder), xr.open_dataset(folder / "columns.nc"))[1],
    "dask": lambda folder: netcdf(folder, chunks={"time": 40})["x"].data,
    "pandas": lambda _: frame(),
    "pandas with dates as index": lambda _: with_date(frame()),
    "polars": lambda _: pl.DataFrame(values(), schema=NAMES),
    "arrow": lambda _: pa.table(frame()),
    "arrow batch": lambda _: pa.RecordBatch.from_pandas(frame()),
    "CSV": csv,
    "Parquet": parquet_file,
    "folder": lambda folder: parquet_file(folder).parent,
}
PAIRS: dict[str, Callable[[Path], Any]] = {
    "arrays": lambda _: (values(), target()),
    "frame and series": lambda _: (frame(), pd.Series(target(), name="y")),
    "polars": lambda _: (pl.from_pandas(frame()), pl.Series("y", target())),
    "arrow": lambda _: (pa.table(frame()), pa.chunked_array([target()])),
    "xarray": lambda folder: ((data := netcdf(folder))["x"], data["y"]),
    "list": lambda _: [(values(), target())],
    "zip": lambda _: zip([values()], [target()], strict=True),
}


def play(data: Any, **options: Any) -> list[Chunk]:
    return list(tt.Stream(data, lanes=3, chunk=20, **options))


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_plays_as_its_array_resumes_and_can_be_pickled(
    kind: str, tmp_path: Path
) -> None:
    expected, data = play({"inputs": values()}), KINDS[kind](tmp_path)
    assert all_same(play(data), expected)
    assert not all_same(play(values() * (1 + 1e-16) + 1e-15), expected)  # a mutant
    stream, resumed = (tt.Stream(data, lanes=3, chunk=20) for _ in range(2))
    stream.take(33)
    copied = pickle.loads(pickle.dumps(stream))
    resumed.load_state_dict(stream.state_dict())
    rest = rest_of_epoch(stream, 20)
    assert all_same(rest, rest_of_epoch(copied, 20))
    assert all_same(rest, rest_of_epoch(resumed, 20))


@pytest.mark.parametrize("kind", list(PAIRS))
def test_every_pair_plays_as_its_arrays(kind: str, tmp_path: Path) -> None:
    expected = play({"inputs": values(), "targets": target()})
    assert all_same(play(PAIRS[kind](tmp_path)), expected)


class SpyArray:
    """An array that keeps the spans that are read of it."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype, self.spans = shape, np.dtype(np.float32), list[tuple[int, int]]()

    def __getitem__(self, rows: slice) -> Any:
        self.spans.append((rows.start, rows.stop))
        return np.zeros((rows.stop - rows.start, *self.shape[1:]), np.float32)


def test_a_lazy_array_is_read_as_far_as_it_is_played() -> None:
    spy = SpyArray(10**12, 4)
    stream = tt.Stream((spy, spy), lanes=2, chunk=100, seed=None)
    assert spy.spans == []
    stream.take(100)
    half = 10**12 // 2
    block = (0, 8100), (half, half + 8100)
    assert sorted(spy.spans) == sorted([*block, *block])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "(N, T, D)": (
        lambda _: np.zeros((4, 5, 2)),
        r"\(4, 5, 2\) may be one recording or several; write .* {'inputs': x",
    ),
    "a pair of (N, T, D)": (
        lambda _: (np.zeros((4, 5, 2)), np.zeros((4, 5))),
        r"list\(zip\(x, y\)\)",
    ),
    "two paths": (
        lambda _: ("x.npy", "y.npy"),
        r"a tuple of 2 whose first is x.npy.*{'inputs': x, 'targets': y}",
    ),
    "three arrays": (lambda _: (np.ones(3),) * 3, "a tuple of 3 "),
    "lengths": (lambda _: (np.ones(3), np.ones(4)), "3 steps of inputs and 4 of targets"),
    "a series of the frame": (
        lambda _: (frame(), frame()["b"]),
        r"\['b'\] are inputs and targets.* name other inputs",
    ),
    "recordings by name": (lambda _: {"a": frame(), "b": frame()}, r"list\(data.values\(\)\)"),
    "numbers": (lambda _: [1.0, 2.0], r"recording 0 is a float.*np.asarray\(values\)"),
    "lists of numbers": (lambda _: [[1.0, 2.0]], r"recording 0 is a list.*np.asarray\(values\)"),
    "a lazy frame": (
        lambda _: {"inputs": pl.DataFrame({"a": [1]}).lazy()},
        "collect a lazy frame",
    ),
    "times": (lambda _: np.array(["2026-01-01", "NaT"], "M8[s]"), "leave times out"),
    "objects": (lambda _: np.array([None, 1.0]), "type object, expected an array of numbers"),
    "a structured array": (lambda _: np.zeros(3, [("u", "f4")]), "take one field of records"),
    "time last": (
        lambda folder: netcdf(folder)["x"].transpose("channel", "time"),
        "one row per step, time first",
    ),
    "a data set": (
        lambda _: TensorDataset(torch.zeros(4, 30, 3), torch.zeros(4, 30)),
        r"pass the samples, each of them a recording: \[data\[i\]",
    ),
    "h5py": (lambda folder: hdf5(folder)["x"], "belong to an open file; give its path"),
    "nothing": (lambda _: None, "recording 0 is a NoneType"),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_cannot_be_played_is_refused_with_the_line_to_write(kind: str, tmp_path: Path) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(DataError, match=reason):
        tt.Stream(make(tmp_path), lanes=1, chunk=2)


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (["x", "y"], r"column 'note' of the inputs holds text, such as \['x', 'y'\].*exclude="),
        (pd.to_timedelta(["1s", None]), "column 'note' has the type duration"),
    ],
    ids=["text", "durations"],
)
def test_a_column_that_holds_no_numbers_is_named(column: Any, reason: str) -> None:
    data = pd.DataFrame({"u": [1.0, 2.0], "note": column})
    with pytest.raises(DataError, match=reason):
        list(tt.Stream(data, lanes=1, chunk=2))
    assert tt.recording(data, inputs="u").read(0, 2).inputs[:, 0].tolist() == [1.0, 2.0]
    chunk = next(iter(tt.Stream(data[["u"]], lanes=1, chunk=2)))
    assert chunk.inputs.flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("column", [[1, "y"], pd.arrays.SparseArray([1, 0])])
def test_a_frame_with_a_column_that_arrow_lacks_is_refused(column: Any) -> None:
    data = pd.DataFrame({"u": [1.0, 2.0], "note": column})
    with pytest.raises(DataError, match=r"the DataFrame: .*note.*frame\.drop\(columns="):
        tt.recording(data, inputs="u")
    assert len(tt.recording(data.drop(columns="note"))) == 2


def test_missing_values_of_frames_are_nan_and_their_integers_floating() -> None:
    columns = {"u": pd.array([1, None, 3], "Int64"), "v": [True, False, True]}
    for data in (pd.DataFrame(columns), pl.DataFrame({"u": [1, None, 3], "v": columns["v"]})):
        stream = tt.Stream(data, lanes=1, chunk=1, missing="mask", seed=None)
        assert torch.cat([c.inputs for c in stream])[:, 0].tolist() == [[1, 1], [0, 0], [3, 1]]


def test_labels_of_whole_recordings_and_samples_of_any_length() -> None:
    lengths = (7, 4, 9)
    samples = [(np.ones((n, 2)), i) for i, n in enumerate(lengths)]
    for data in (samples, iter(samples)):
        recordings = as_recordings(data)
        assert [r.name for r in recordings] == ["0", "1", "2"]
        assert [len(r) for r in recordings] == [*lengths]
        targets = [r.read(0, len(r)).targets for r in recordings]
        assert [t[-1] for t in targets if t is not None] == [0, 1, 2]


def test_evaluate_predict_and_windows_accept_the_same() -> None:
    net = tt.carry(torch.nn.Sequential(torch.nn.GRU(D, 4), torch.nn.Linear(4, 1)).double())
    pair = (frame(), pd.Series(target(), name="y"))
    arrays = {"inputs": values(), "targets": target()}
    results = [tt.evaluate(net, data, torch.nn.MSELoss()).loss for data in (pair, arrays)]
    assert results[0] == results[1]
    outputs = [tt.predict(net, data)[0] for data in (frame(), pair, values(), arrays)]
    assert all(torch.equal(outputs[0], other) for other in outputs)
    assert [len(w) for w in tt.windows(frame(), 100)] == [100, 100, 100, 7]
    with pytest.raises(DataError, match="expected one recording, got 2"):
        tt.predict(net, [frame(), frame()])


def test_splits_of_a_folder_are_not_mixed(tmp_path: Path) -> None:
    csv(tmp_path)
    rows = "id,split,inputs\na,train,x.csv\n"
    (tmp_path / "manifest.csv").write_text(rows, encoding="utf-8")
    for path in (tmp_path, tmp_path / "manifest.csv"):
        with pytest.raises(
            DataError, match=r"has splits or labels; .*tt.recordings\('.*'\)\['train'\]"
        ):
            tt.Stream(path, lanes=1, chunk=2)
    (tmp_path / "manifest.csv").write_text("id,inputs\na,x.csv\n", encoding="utf-8")
    assert [r.name for r in as_recordings(tmp_path)] == ["a"]


def columns(**values: Any) -> pd.DataFrame:
    return pd.DataFrame({name: np.atleast_1d(value) for name, value in values.items()})


def files(folder: Path, *texts: str) -> Path:
    for i, text in enumerate(texts):
        (folder / f"{i}.csv").write_text(text)
    return folder


OTHER_COLUMNS: dict[str, Callable[[Path], Any]] = {
    "a folder": lambda path: files(path, "u,v\n1,2\n", "v,u\n2,1\n"),
    "recordings": lambda path: [
        tt.recording(p) for p in sorted(files(path, "u,v\n1,2\n", "p,q\n2,1\n").iterdir())
    ],
    "frames": lambda _: [columns(u=1.0, v=2.0), columns(v=2.0, u=1.0)],
    "mappings": lambda _: [{"inputs": columns(u=1.0)}, {"inputs": columns(v=1.0)}],
    "targets": lambda _: [
        {"inputs": columns(u=1.0), "targets": targets}
        for targets in (columns(y=1.0, z=2.0), columns(z=2.0, y=1.0))
    ],
}


@pytest.mark.parametrize("kind", OTHER_COLUMNS)
def test_columns_of_other_names_or_in_another_order_are_not_joined(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"has the columns .* in one order: tt\.recording"):
        tt.Stream(OTHER_COLUMNS[kind](tmp_path), 1, 5)


def test_columns_that_are_named_or_series_may_have_other_names() -> None:
    frame = columns(u=[1.0, 2.0], v=[3.0, 4.0])
    for recordings in (
        [tt.recording(frame, inputs=name) for name in "uv"],
        [frame["u"], frame["v"]],
        [(values()[:2, :1], frame["u"]), (values()[:2, :1], frame["v"])],
    ):
        assert len(tt.Stream(recordings, 1, 5).recordings) == 2


def test_a_frame_of_inputs_alone_plays_in_a_list() -> None:
    (chunk,) = tt.Stream([columns(inputs=[1.0, 2.0])], 1, 5)
    assert chunk.targets is None
    assert chunk.inputs.flatten().tolist() == [1, 2]


LARGE: dict[str, Callable[[Path], Any]] = {
    "wrapped": lambda _: np.full((3, 1), 2**63 + 8, np.uint64),
    "wrapped to missing": lambda _: (np.zeros(3), np.full(3, 2**64 - 100, np.uint64)),
    "wrapped ahead": lambda _: {
        "inputs": np.zeros(3),
        "targets": np.full(3, 2**64 - 100, np.uint64),
        "ahead": 1,
    },
    "regression": lambda path: (
        np.savez(path / "x.npz", u=[0.5, 1.0], y=[2**53 + 1, 1]),
        tt.recordings(path, targets=["y"], task="regress")["train"],
    )[1],
    "frame": lambda _: columns(u=[2**53 + 1, 2**53], v=[0.5, 1.5]),
    "mapping": lambda _: tt.recording({"u": np.array([2**53 + 1]), "v": np.array([0.5])}),
    "static": lambda _: {"inputs": np.array([[2**53 + 1]]), "static": [0.5]},
}


@pytest.mark.parametrize("kind", LARGE)
def test_whole_numbers_that_a_type_would_change_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"whole numbers have so many digits that .*64"):
        list(tt.Stream(LARGE[kind](tmp_path), 1, 5))


def test_whole_numbers_that_the_dtype_of_a_stream_merges_are_refused() -> None:
    """float32 rounds large counts, as always; from 2^53 on they may be labels."""
    for dtype in (torch.float32, torch.float64):
        (chunk,) = tt.Stream(np.array([[20_000_000]]), 1, 5, dtype=dtype)
        assert chunk.inputs.item() == 20_000_000
        with pytest.raises(DataError, match="whole numbers have so many digits that float64"):
            list(tt.Stream(np.array([[2**53], [2**53 + 1]]), 1, 5, dtype=dtype))


def test_steps_of_a_data_set_are_one_dimension_by_name() -> None:
    x, y = np.arange(9.0).reshape(3, 3), np.arange(3.0)
    data = xr.Dataset({"x": (("ch", "time"), x), "y": ("time", y), "z": ("space", y[1:])})
    recording = tt.recording(data, inputs="x", targets="y")
    assert np.array_equal(recording.read(0, 3).inputs, x.T)
    with pytest.raises(DataError, match=r"\['z'\] asked for, it has x float64 \(3, 3\), y"):
        tt.recording(data, inputs="z")


def test_dimensions_of_one_length_are_not_both_the_steps(tmp_path: Path) -> None:
    """A variable over another one was left out, or, of a file, a column."""
    y = np.arange(3.0)
    data = xr.Dataset({"y": ("time", y), "z": ("space", y), "x": (("ch", "time"), np.eye(3))})
    square = data[["y", "x"]]
    data.to_netcdf(tmp_path / "two.nc")
    square.to_netcdf(tmp_path / "square.nc")
    for source, other in (
        (data, "space"),
        (tmp_path / "two.nc", "space|ch"),
        (tmp_path / "square.nc", "ch"),
    ):
        with pytest.raises(DataError, match=rf"'time' or '({other})', of one length.*drop_dims"):
            tt.recording(source, targets="y")
    assert np.array_equal(tt.recording(square, inputs="x").read(0, 3).inputs, np.eye(3))


def test_text_of_a_netcdf_file_is_a_column(tmp_path: Path) -> None:
    """It was left out without a word; its class is read, and as an input it is refused."""
    path, labels = tmp_path / "x.nc", np.array(["N", "V", "N"], object)
    xr.Dataset({"u": ("time", [1.0, 2, 3]), "y": ("time", labels)}).to_netcdf(path)
    targets = tt.recording(path, targets="y", classes=["N", "V"]).read(0, 3).targets
    assert targets is not None
    assert targets.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match="column 'y' of the inputs holds text"):
        tt.recording(path)


def test_a_forecast_needs_targets() -> None:
    """Without them `ahead` was ignored."""
    with pytest.raises(DataError, match=r"ahead=2 of a recording without targets"):
        tt.Stream({"inputs": np.zeros(9), "ahead": 2}, 1, 5)
    with pytest.raises(DataError, match=r"ahead=range\(1, 3\) of a recording without targets"):
        tt.recording(np.zeros((9, 1)), ahead=range(1, 3))


def test_a_column_may_be_its_number() -> None:
    rows = tt.recording(values(), inputs=1, targets=0).read(0, T)
    assert np.array_equal(rows.inputs[:, 0], values()[:, 1])


def test_arrays_that_are_no_columns_are_named_and_the_others_are_read(tmp_path: Path) -> None:
    meta = np.array({"rate": 1}, object)
    np.savez(tmp_path / "x.npz", x=values(), rate=250.0, meta=meta)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.update({"x": values()[:2], "y": ["N", "V"], "short": np.ones(1)})
    assert np.array_equal(tt.recording(tmp_path / "x.npz", inputs="x").read(0, T).inputs, values())
    with pytest.raises(DataError, match=r"'rate' is no column.* rate float64 \(\), meta object"):
        tt.recording(tmp_path / "x.npz")
    labels = tt.recording(tmp_path / "x.h5", inputs="x", targets="y", classes=["N", "V"])
    assert str(labels.read(0, 2).targets) == "[0 1]"
    (tmp_path / "files").mkdir()
    (tmp_path / "x.h5").rename(tmp_path / "files" / "x.h5")
    assert tt.recordings(tmp_path / "files", inputs=["x"], targets=["y"]).classes == ("N", "V")
    (tmp_path / "files" / "x.h5").rename(tmp_path / "x.h5")
    with pytest.raises(DataError, match=r"\['short'\] asked for, it has short float64 \(1,\), x"):
        tt.recording(tmp_path / "x.h5", inputs="x", targets="short")
