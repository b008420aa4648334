"""What a stream plays: whatever a user has, as recordings.

Arrays and tables hold steps, see `rows.py`. All else is made of them: pairs, mappings, lists,
folders.

Shapes: `T` steps, `D` input features, `C` target columns, `S` static features, `N` recordings.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import DataLoader

from throughtime.errors import DataError, check_whole, did_you_mean, listed
from throughtime.stream.formats.arrays import ArrayRows
from throughtime.stream.formats.table import RowSource, Table
from throughtime.stream.layout import Labels, Layout, Targets, as_static, lay_out
from throughtime.stream.manifest import find_recordings, is_folder, is_manifest
from throughtime.stream.recording import Part, Recording, innermost
from throughtime.stream.rows import (
    as_rows,
    as_table,
    check_columns,
    has_columns,
    is_array,
    is_rows,
    is_series,
)
from throughtime.stream.targets import horizons, shift_targets, with_classes

Recordings: TypeAlias = Any
"""Whatever `as_recordings` accepts."""
_KEYS = ("inputs", "targets", "intervals", "ahead", "allow_target_as_input", "static", "name")


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
            recording, that of its last step;
            `intervals`: instead of targets, `(starts, stops, labels)` in steps, or a file with
            these columns, in order and without overlap;
            `ahead`: the target of a step is that of so many steps later, of an input or another
            column; the last steps have none;
            `allow_target_as_input`: whether an input may be the target of the same step;
            `static`: `(S,)` numbers of the recording, appended to the inputs of every step;
            `name`: the name in messages and reports;
            any other name: a series `(T,)` or `(T, ...)`, such as a `weight` of each step, that
            chunks have as `chunk["weight"]`.

            Several are a list, or another iterable, of these, or a folder.

    Raises:
        DataError: another kind of object, inputs and targets of different lengths, or a shape that
            may be one recording or several; the message has the line to write.
    """
    recordings = _expand(data, None)
    tables = [table for r in recordings if (table := innermost(r)[0]) and table.unnamed]
    for table in tables:
        if table.unnamed != tables[0].unnamed:
            raise DataError(
                f"recording '{table.name}' has the columns {listed(table.unnamed, quoted=True)},"
                f" '{tables[0].name}' {listed(tables[0].unnamed, quoted=True)}; name them"
                " in one order: tt.recording(path, inputs=[...], targets=...)"
            )
    return recordings


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


def recording(
    source: Any,
    *,
    inputs: str | int | Sequence[str | int] | None = None,
    targets: Any = None,
    static: Any = None,
    start: int = 0,
    stop: int | None = None,
    name: str | None = None,
    series: Mapping[str, str | Sequence[str]] | None = None,
    exclude: str | Sequence[str] | None = None,
    delimiter: str | None = None,
    decimal: str | None = None,
    classes: Sequence[Any] | None = None,
    ahead: int | Sequence[int] = 0,
    allow_target_as_input: bool = False,
) -> Recording:
    """One recording, its columns chosen by name.

    `tt.recordings` makes those of a folder or manifest. Of the groups of a frame make a list:
    `[tt.recording(part, name=key) for key, part in frame.groupby("patient")]`.

    Args:
        source: the path of a file, a pandas or polars frame, an Arrow table, an `xarray.Dataset`,
            an open group of Zarr, a mapping of arrays by name, or an array `(T, D)`, whose columns
            are called "0", "1" and so on.
        inputs: columns, in this order; default: all that have no other use and are no time stamps,
            and of a forecast (`ahead`) the targets as well.
        targets: columns; or the targets themselves, `(T,)` or `(T, C)`, as an array or a series.
        static: `(S,)` numbers of the whole recording, appended to the inputs of every step.
        start: the first step.
        stop: the step after the last one; default: the end.
        name: in messages and reports; default: that of the file.
        series: further columns by name, one or several each, such as `{"weight": "w"}`, which
            chunks have as `chunk["weight"]`. They are no inputs by default.
        exclude: columns that are not used.
        delimiter: the character between the fields of a CSV file; default: detected.
        decimal: the decimal mark of a CSV file; default: detected.
        classes: the names of the classes in the order of their indices, where the targets are
            names. A target without a name is -100; one that is no class is an error when it is
            read.
        ahead: the target of a step is that of so many steps later, within `start` and `stop`; the
            last steps have none. Those of several, such as `range(1, 25)`, lie side by side.
        allow_target_as_input: whether an input may be the target of the same step.

    Returns:
        A recording for `tt.Stream`, which reads its rows as they are played.

    Raises:
        DataError: a column that does not exist, is named twice, holds no numbers, or is an input
            and the target of the same step; a class that is named twice; a start and stop that
            leave no step.

    Cost: the header of a file and one row.

    Example:
        >>> import pandas, throughtime as tt
        >>> frame = pandas.DataFrame({"u": [0.1, 0.2, 0.3], "v": [1.0, 2.0, 3.0], "y": [0, 0, 1]})
        >>> stream = tt.Stream(tt.recording(frame, inputs=["u", "v"], targets="y"), 1, chunk=3)
        >>> next(iter(stream))
        Chunk(inputs (3, 1, 2), targets (3, 1), valid=3, resets=1)
    """
    named: Any = series or {}
    if not isinstance(named, Mapping):
        raise DataError(
            f"series={series!r}: expected the columns of each series by its name: {{'weight': 'w'}}"
        )
    table = as_table(source, delimiter, decimal)
    title = name or (Path(source).name if isinstance(source, (str, Path)) else "0")
    items: Any = targets if isinstance(targets, (list, tuple)) else [targets]
    by_name = isinstance(targets, int) or all(isinstance(item, str) for item in items)
    layout = Layout(
        inputs=names_of(inputs),
        targets=names_of(targets) if by_name else (),
        exclude=names_of(exclude),
        series={key: names_of(names) for key, names in named.items()},
        ahead=horizons(ahead),
        allow_target_as_input=allow_target_as_input,
    )
    if layout.exclude:
        check_columns(table, layout.exclude, "exclude", table.columns)
    labels: RowSource | None = layout.target_rows(table)
    if targets is not None and not layout.targets:
        is_text = classes is not None and is_array(targets)
        labels = ArrayRows("targets", targets) if is_text else as_rows(targets, title, "targets")
    whole = lay_out(
        title,
        layout.input_rows(table, layout.targets),
        layout,
        labels,
        static=as_static(static, title),
        series=layout.series_rows(table),
        named=classes is not None,
    )
    result = with_classes(whole, classes)
    end = len(result) if stop is None else stop
    if not 0 <= start < end <= len(result):
        raise DataError(
            f"recording '{title}': start={start}, stop={stop} of {len(result)} steps; expected"
            " 0 <= start < stop <= the number of steps"
        )
    return shift_targets(result if end - start == len(result) else Part(result, start, end), ahead)


def names_of(value: Any) -> tuple[str, ...]:
    """Names of columns; pandas also has numbers as such."""
    if value is None:
        return ()
    return (str(value),) if isinstance(value, (str, int)) else tuple(map(str, value))


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
    length = check_whole("length", length, 1, DataError)
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
        return _from_path(Path(data))
    if has_columns(data):
        return [_from_table(name, as_table(data))]
    if isinstance(data, Mapping):
        return [_from_mapping(data, str(data.get("name", name)))]
    pair = (data,) if is_series(data) or is_array(data) else data
    if isinstance(pair, tuple) and any(map(is_rows, pair[:1])):
        return [_from_pair(pair, index, name)]
    if index is None and isinstance(data, Iterable) and not isinstance(data, DataLoader):
        return [r for i, item in enumerate(data) for r in _expand(item, i)]
    raise DataError(
        f"recording {name} is a {type(data).__name__}, expected a mapping with 'inputs' and"
        " 'targets', an array (np.asarray(values)), a table, a tuple (inputs, targets), a path, or"
        " a list; of a loader pass the samples, each of them a recording: [data[i] for i in ...]"
    )


def _from_pair(pair: tuple[Any, ...], index: int | None, name: str) -> Recording:
    """The recording of `(inputs,)` or `(inputs, targets)`; alone it must not mean several."""
    inputs, targets = (*pair, None)[:2]
    shape = tuple(getattr(inputs, "shape", ()))
    paths = all(isinstance(part, (str, Path)) for part in (inputs, targets))
    if len(pair) > 2 or (index is None and (paths or len(shape) > 2)):
        raise DataError(
            f"a tuple of {len(pair)} whose first is {inputs if paths else shape} may be one"
            " recording or several; write [a, b], list(zip(x, y)) or {'inputs': x, 'targets': y}"
        )
    return _from_mapping({"inputs": inputs, "targets": targets}, name)


def _from_table(name: str, table: Table) -> Recording:
    """The columns `inputs` and `targets`; without these, all columns but time stamps as inputs."""
    if "inputs" not in table.columns:
        return recording(table, name=name)
    return recording(
        table,
        name=name,
        inputs="inputs",
        targets="targets" if "targets" in table.columns else None,
    )


def _from_path(path: Path) -> list[Recording]:
    """The recordings of a file or a folder."""
    if not is_folder(path) and not is_manifest(path):
        return [_from_table(path.name, as_table(path))]
    entries = find_recordings(path)
    if any(entry.split or entry.label is not None for entry in entries):
        raise DataError(
            f"{path}: has splits or labels; write"
            f" tt.Stream(tt.recordings('{path}')['{entries[0].split or 'train'}'], ...)"
        )
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
        raise DataError(
            f"recording '{name}' has the keys {listed(map(str, source), quoted=True)}, expected"
            f" 'inputs' and optionally {', '.join(_KEYS[1:])}, and arrays by other names"
            f"{did_you_mean(unknown[0], _KEYS) if unknown else ''}; of several: list(data.values())"
        )
    ahead = values.get("ahead", 0)
    result = lay_out(
        name,
        as_rows(values["inputs"], name, "inputs"),
        Layout(
            ahead=horizons(ahead),
            allow_target_as_input=values.get("allow_target_as_input", False),
        ),
        _targets(values, name),
        static=as_static(values.get("static"), name),
        series={key: as_rows(value, name, f"series '{key}'") for key, value in series.items()},
    )
    return shift_targets(result, ahead)


def _targets(values: Mapping[str, Any], name: str) -> Targets | None:
    """The targets of a mapping, in whichever form it has them."""
    value, intervals = values.get("targets"), values.get("intervals")
    if intervals is None:
        if value is None:
            return None
        is_scalar = np.isscalar(value) and not isinstance(value, str)
        if is_scalar or getattr(value, "shape", None) == ():
            return Labels("the mapping", [value])
        return as_rows(value, name, "targets")
    if value is None and isinstance(intervals, (str, Path)):
        return Labels.of(as_table(intervals))
    if value is None and isinstance(intervals, (list, tuple)) and len(intervals) == 3:
        starts, stops, labels = intervals
        return Labels("the mapping", labels, starts, stops)
    raise DataError(
        f"recording '{name}': intervals are a {type(intervals).__name__}, expected (starts, stops,"
        " labels), or a path, and no targets beside them"
    )
