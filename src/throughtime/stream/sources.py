"""What a stream plays: whatever a user has, as recordings.

Two kinds of objects hold steps. An *array* has `shape`, `dtype` and slices of rows (NumPy, torch,
h5py, Zarr, xarray, Dask). A *table* has named columns (a file, a frame, an Arrow table, a group of
arrays, an MNE `Raw`). All else is made of them: pairs, mappings, lists, data sets, folders.

Shapes: `T` steps, `D` input features, `C` target columns, `S` static features, `N` recordings.
"""

import glob
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import DataLoader, Dataset

from throughtime.errors import DataError, did_you_mean, listed
from throughtime.stream.formats.objects import has, has_columns, is_series
from throughtime.stream.formats.table import Table
from throughtime.stream.layout import Intervals, Label, Layout, Targets, as_static, lay_out
from throughtime.stream.manifest import find_recordings, is_folder, is_manifest
from throughtime.stream.recording import Part, Recording
from throughtime.stream.rows import as_rows, as_table, is_array, is_rows
from throughtime.stream.tables import recording
from throughtime.stream.targets import horizons, shift_targets

Recordings: TypeAlias = Any
"""Whatever `as_recordings` accepts."""
_SETTINGS = ("target_every", "target_at", "ahead", "allow_target_as_input")
_KEYS = ("inputs", "targets", "intervals", *_SETTINGS, "static", "name")


def as_recordings(data: Recordings) -> list[Recording]:
    """The recordings of whatever holds them; lazy where that is lazy.

    Args:
        data: one recording, or several. One is

            an array `(T, D)` or `(T,)`: the inputs; a tuple `(inputs, targets)` of arrays, series,
            frames; a table, or the path of a file: its columns `inputs` and `targets`, or, without
            these, all columns but time stamps as inputs; an object with `name`, `__len__` and
            `read(start, stop)`; or a mapping with

            `inputs`: `(T, D)` or `(T,)`: an array, a table, the path of a file, or a list of them,
            side by side;
            `targets`: `(T,)` or `(T, C)`, one for each step; a single number, for the whole
            recording; with `target_every`, one for every so many steps;
            `intervals`: instead of targets, `(starts, stops, labels)` in steps, or a file with
            these columns, in order and without overlap;
            `target_at`: "all" steps of such a span carry its label, or only the "last"; default:
            all of an interval, the last of others;
            `ahead`: the target of a step is that of so many steps later, of an input or another
            column; the last steps have none;
            `allow_target_as_input`: whether an input may be the target of the same step;
            `static`: `(S,)` numbers of the recording, appended to the inputs of every step;
            `name`: the name in messages and reports;
            any other name: a series `(T,)` or `(T, ...)`, such as a `weight` of each step, that
            chunks have as `chunk["weight"]`.

            Several are a list, or another iterable, of these; a folder or a glob pattern; or a
            `torch.utils.data.Dataset`, each sample of which, `(T, D)` or `((T, D), targets)`, is
            one recording.

    Raises:
        DataError: another kind of object, inputs and targets of different lengths, or a shape that
            may be one recording or several; the message has the line to write.
    """
    return _expand(data, None)


def as_recording(data: Recordings, index: int | None = None) -> Recording:
    """The only recording of `data`; `index` is that in a list, and names it if nothing else does.

    Raises:
        DataError: as for `as_recordings`, or there are several.
    """
    recordings = _expand(data, index)
    if len(recordings) != 1:
        raise DataError(
            f"expected one recording, got {len(recordings)} ({listed(r.name for r in recordings)});"
            " write a loop over them: for recording in ..."
        )
    return recordings[0]


def windows(recordings: Recordings, length: int) -> list[Part]:
    """Every recording cut into windows of `length` steps, the last one shorter.

    A stream of windows starts each of them from the initial state: training as most people do it,
    for comparison with training on the unbroken recordings. `examples/policies/starts.py` has two
    policies that start them from other states.

    Args:
        recordings: as for `tt.Stream`.
        length: steps of a window.

    Returns:
        A recording for each window, named after its source, for `tt.Stream`. No data are copied.

    Raises:
        DataError: windows of less than one step.

    Example:
        >>> import numpy as np, throughtime as tt
        >>> [len(window) for window in tt.windows(np.zeros((250, 3)), 100)]
        [100, 100, 50]
    """
    if length < 1:
        raise DataError(f"windows of {length} steps: expected at least 1")
    return [
        Part(r, start, min(start + length, len(r)))
        for r in as_recordings(recordings)
        for start in range(0, len(r), length)
    ]


def _expand(data: Any, index: int | None) -> list[Recording]:
    """The recordings of an object; `index` is that of an item of a list."""
    name = str(index or 0)
    if isinstance(data, Recording) and callable(data.read):  # a frame may have a column 'read'
        return [data]
    if isinstance(data, (str, Path)):
        return _from_path(str(data))
    if has_columns(data):
        return [_from_table(name, as_table(data))]
    if isinstance(data, Mapping):
        return [_from_mapping(data, str(data.get("name", name)))]
    if is_series(data) or is_array(data):
        return [_from_pair((data,), index, name)]
    if isinstance(data, tuple) and any(map(is_rows, data[:1])):
        return [_from_pair(data, index, name)]
    if isinstance(data, Dataset) and has(data, "__len__"):
        return _from_dataset(data)
    if isinstance(data, DataLoader):
        raise DataError(
            "a DataLoader makes batches, and so does a stream: pass its dataset, loader.dataset,"
            " each sample of which is a recording"
        )
    if index is None and isinstance(data, Iterable):
        return [r for i, item in enumerate(data) for r in _expand(item, i)]
    hint = ": np.asarray(values)" if isinstance(data, (list, int, float)) else ""
    raise DataError(
        f"recording {index or 0} is a {type(data).__name__}, expected a mapping with 'inputs' and"
        " 'targets', an array, a table, a tuple (inputs, targets), a path, or an object with name,"
        f" __len__ and read(start, stop){hint}"
    )


def _from_pair(pair: tuple[Any, ...], index: int | None, name: str) -> Recording:
    """The recording of `(inputs,)` or `(inputs, targets)`; alone it must not mean several."""
    inputs, targets = (*pair, None)[:2]
    shape, fault = tuple(getattr(inputs, "shape", ())), ""
    if len(pair) > 2:
        fault = f"a tuple of {len(pair)}: expected (inputs, targets) of one recording"
    elif index is None and isinstance(inputs, (str, Path)) and isinstance(targets, (str, Path)):
        fault = f"a tuple of two paths, '{inputs}' and '{targets}', may be two recordings"
    elif index is None and len(shape) > 2:
        fault = f"inputs of shape {shape} may be {shape[0]} recordings or one of {shape[0]} steps"
    if fault:
        raise DataError(
            f"{fault}; write [a, b] or list(zip(x, y)) for several recordings, {{'inputs': x,"
            " 'targets': y} for one"
        )
    return _from_mapping({"inputs": inputs, "targets": targets}, name)


def _from_dataset(data: Any) -> list[Recording]:
    """A recording of each sample."""
    recordings: list[Recording] = []
    for i in range(len(data)):
        sample: Any = data[i]
        sample = tuple(sample) if isinstance(sample, list) else sample
        inputs: Any = next(iter(sample), None) if isinstance(sample, tuple) else sample
        if is_array(inputs) and len(inputs.shape) < 2:
            name = type(data).__name__
            rows = "dataset.tensors" if hasattr(data, "tensors") else "(x, y)"
            raise DataError(
                f"sample {i} of the {name} has inputs of shape {tuple(inputs.shape)}: a step, or a"
                f" recording of one column? For one recording of {len(data)} steps write"
                f" tt.Stream({rows}, ...); for {len(data)} recordings, tt.Stream([*dataset], ...)"
            )
        recordings += _expand(sample, i)
    return recordings


def _from_table(name: str, table: Table) -> Recording:
    """The columns `inputs` and `targets`; without these, all columns but time stamps as inputs."""
    if "inputs" not in table.columns:
        return recording(table, name=name)
    return recording(
        table, name=name, inputs="inputs", targets=[c for c in table.columns if c == "targets"]
    )


def _from_path(location: str) -> list[Recording]:
    """The recordings of a file, of a folder or of the files that match a pattern."""
    path = Path(location)
    if glob.has_magic(location) and not path.exists():
        matches = sorted(glob.glob(location, recursive=True))  # noqa: PTH207  the pattern may be absolute
        if not matches:
            raise DataError(f"{location}: no file matches the pattern")
        return [r for match in matches for r in _from_path(match)]
    if not is_folder(path) and not is_manifest(path):
        return [_from_table(path.name, as_table(path))]
    entries = find_recordings(path)
    splits = list(dict.fromkeys(entry.split for entry in entries))
    if splits != [""] or any(entry.label is not None for entry in entries):
        reason = f"has the splits {listed(splits)}" if splits != [""] else "has labels"
        choice = f"tt.recordings('{path}')['{splits[0] or 'train'}']"
        raise DataError(f"{path}: {reason}; write tt.Stream({choice}, ...)")
    return [
        _from_mapping({"inputs": [first, *others], "targets": entry.targets}, entry.name)
        if others or entry.targets is not None
        else _from_table(entry.name, as_table(first))
        for entry in entries
        for first, *others in [entry.inputs]
    ]


def _from_mapping(source: Mapping[str, Any], name: str) -> Recording:
    values = {key: value for key, value in source.items() if value is not None}
    series = {key: value for key, value in values.items() if key not in _KEYS}
    similar = {key.rstrip("s") for key in _KEYS}  # 'target', 'input'
    unknown = [
        str(key)
        for key, value in series.items()
        if str(key).rstrip("s") in similar or not (is_array(value) or is_series(value))
    ]
    if "inputs" not in values or unknown:
        hint = did_you_mean(unknown[0], _KEYS) if unknown else ""
        raise DataError(
            f"recording '{name}' has the keys {listed(map(str, source), quoted=True)}, expected"
            f" 'inputs' and optionally {', '.join(_KEYS[1:])}, and arrays by other names, one row"
            f" per step{hint or '; several recordings are a list: list(data.values())'}"
        )
    targets = _targets(values, name)
    settings: dict[str, Any] = {key: values[key] for key in _SETTINGS if key in values}
    if settings and targets is None:
        raise DataError(
            f"recording '{name}' has '{min(settings)}' and no targets that it could belong to"
        )
    settings["ahead"] = horizons(values.get("ahead", 0))
    result = lay_out(
        name,
        as_rows(values["inputs"], name, "inputs"),
        Layout(**settings),
        targets,
        static=as_static(values["static"], name) if "static" in values else None,
        series={key: as_rows(value, name, f"series '{key}'") for key, value in series.items()},
    )
    return shift_targets(result, values.get("ahead", 0))


def _targets(values: Mapping[str, Any], name: str) -> Targets | None:
    """The targets of a mapping, in whichever form it has them."""
    value, intervals = values.get("targets"), values.get("intervals")
    if intervals is None:
        if value is None:
            return None
        if (np.isscalar(value) and not isinstance(value, str)) or getattr(
            value, "shape", None
        ) == ():
            return Label("the mapping", value)
        return as_rows(value, name, "targets")
    if value is not None:
        raise DataError(
            f"recording '{name}' has targets and intervals, expected one of them: a step has one"
            " target"
        )
    if isinstance(intervals, (str, Path)):
        return Intervals.of(as_table(intervals))
    if isinstance(intervals, (list, tuple)) and len(intervals) == 3:
        return Intervals("the mapping", *intervals)
    raise DataError(
        f"recording '{name}': intervals are a {type(intervals).__name__}, expected (starts, stops,"
        " labels), or a path"
    )
