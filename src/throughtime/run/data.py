"""DATA of the command line: a file, a folder or a manifest becomes recordings in splits.

Shapes: `T` steps, `D` input features, `C` target columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream import formats
from throughtime.stream.collate import IGNORED
from throughtime.stream.formats.table import Array, Table
from throughtime.stream.recording import Columns, Part, Recording, Steps, columns

MANIFESTS = ("recordings.csv", "manifest.csv")
_MANIFEST_COLUMNS = ("id", "split", "inputs", "targets")


@dataclass(frozen=True)
class Files:
    """Where one recording is: its name, its split (empty if nothing says), and its tables."""

    name: str
    split: str
    inputs: Path
    targets: Path | None


def find(data: Path) -> list[Files]:
    """The recordings of a file, a folder or a manifest, in order.

    Raises:
        DataError: nothing there, or a manifest with a missing file or column, or a recording listed twice.
    """
    if data.is_dir():
        manifest = next((data / name for name in MANIFESTS if (data / name).is_file()), None)
        if manifest is not None:
            return _manifest(manifest, formats.open_table(manifest))
        paths = sorted(p for p in data.iterdir() if p.suffix.lower() in formats.SUFFIXES)
        if not paths:
            raise DataError(f"{data}: the folder holds no {', '.join(formats.SUFFIXES)} file and no {' or '.join(MANIFESTS)}")
        return [Files(path.name, "", path, None) for path in paths]
    table = formats.open_table(data)
    if data.suffix.lower() == ".csv" and {"id", "inputs"} <= set(table.columns):
        return _manifest(data, table)
    return [Files(data.name, "", data, None)]


def _manifest(path: Path, table: Table) -> list[Files]:
    unknown = [c for c in table.columns if c not in _MANIFEST_COLUMNS]
    if unknown or not {"id", "inputs"} <= set(table.columns):
        raise DataError(
            f"{path}: a manifest has the columns {', '.join(_MANIFEST_COLUMNS)} (split and targets optional); got "
            f"{', '.join(table.columns)}"
        )
    if not len(table):
        raise DataError(f"{path}: the manifest lists no recording")
    cells = {c: _cells(table.read(0, len(table), [c])[:, 0]) for c in table.columns}
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    found = [
        Files(row["id"], row.get("split", ""), path.parent / row["inputs"], path.parent / row["targets"] if row.get("targets") else None)
        for row in rows
    ]
    faults = [f"'{f.name}' is listed twice" for i, f in enumerate(found) if f.name in {g.name for g in found[:i]}]
    faults += [f"'{f.name}': no such file {p}" for f in found for p in (f.inputs, f.targets) if p is not None and not p.is_file()]
    if faults:
        raise DataError(f"{path}: " + "; ".join(faults))
    return found


def _cells(values: Array) -> list[str]:
    """The fields of a manifest as text; a column of numbers was read as numbers."""
    if values.dtype.kind == "U":
        return [str(v).strip() for v in values]
    return ["" if np.isnan(v) else f"{v:g}" if v != int(v) else str(int(v)) for v in values]


def open_recordings(
    found: Sequence[Files], inputs: Sequence[str], targets: Sequence[str], *, need_targets: bool
) -> list[tuple[str, Columns]]:
    """Opens every recording with the columns asked for; `(split, recording)` in order.

    Raises:
        DataError: missing columns, targets of another length, an empty recording, an unreadable file.
    """
    return [(files.split, _opened(files, inputs, targets, need_targets)) for files in found]


def _opened(files: Files, inputs: Sequence[str], targets: Sequence[str], need_targets: bool) -> Columns:
    table = formats.open_table(files.inputs)
    apart = formats.open_table(files.targets) if files.targets is not None else None
    labels = apart or table
    wanted = tuple(targets) or (apart.columns if apart else ("targets",) if "targets" in table.columns else ())
    if not need_targets:
        return columns(files.name, table, tuple(inputs) or tuple(c for c in table.columns if apart or c not in wanted))
    if not wanted:
        raise DataError(f"{files.inputs}: which columns are the targets? The file has {', '.join(table.columns)}; name them with --targets")
    chosen = tuple(inputs) or tuple(c for c in table.columns if apart or c not in wanted)
    if not chosen:
        raise DataError(f"{files.inputs}: no column is left for the inputs, {', '.join(wanted)} being the targets; name them with --inputs")
    return columns(files.name, table, chosen, labels, wanted)


@dataclass(frozen=True)
class Numeric:
    """A recording whose inputs, and targets if the task is regression, must be numbers."""

    source: Columns
    check_targets: bool

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, stop: int) -> Steps:
        steps = self.source.read(start, stop)
        named = (("inputs", steps.inputs), ("targets", steps.targets if self.check_targets else None))
        for role, values in named:
            if values is not None and values.dtype.kind not in "biuf":
                table = self.source.inputs if role == "inputs" else self.source.targets or self.source.inputs
                raise DataError(
                    f"{table.path}: the {role} hold text, such as {str(values.flat[0])!r}, expected numbers; choose columns with --{role} "
                    f"(the file has {', '.join(table.columns)})"
                )
        return steps


@dataclass(frozen=True)
class Labelled:
    """A recording whose targets are classes by name: read as their indices, -100 where there is none."""

    source: Recording
    classes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, stop: int) -> Steps:
        steps = self.source.read(start, stop)
        if steps.targets is None:
            return steps
        return Steps(steps.inputs, self._indices(steps.targets, start))

    def _indices(self, targets: Array, start: int) -> Array:
        if targets.ndim > 1:
            raise DataError(
                f"recording '{self.name}': classification needs one column of targets, got {targets.shape[1]}; choose it with --targets"
            )
        values, inverse = np.unique(targets, return_inverse=True)
        index = {name: i for i, name in enumerate(self.classes)}
        codes = np.array([IGNORED if name == "" else index.get(name, -1) for name in map(class_name, values)], dtype=np.int64)
        if (codes == -1).any():
            wrong = values[codes == -1][0]
            at = start + int(np.argmax(targets == wrong))
            raise DataError(
                f"recording '{self.name}': unknown class '{class_name(wrong)}' at step {at}; the training split has "
                f"{', '.join(self.classes)}"
            )
        return codes[inverse]


def class_name(value: object) -> str:
    """A class as it is called everywhere: whole numbers without a point; empty for a missing one."""
    text = str(value).strip()
    try:
        number = float(text)
    except ValueError:
        return text
    if np.isnan(number):
        return ""
    return str(int(number)) if number.is_integer() else text


def split(recordings: Sequence[tuple[str, Recording]], holdout: float) -> tuple[dict[str, list[Recording]], str]:
    """Recordings by split, and in words where the splits come from.

    Without a split column the last recordings by name are held out as `valid`; of a single recording, its end.
    """
    if any(name for name, _ in recordings):
        splits: dict[str, list[Recording]] = {}
        for name, recording in recordings:
            splits.setdefault(name or "train", []).append(recording)
        return splits, "splits as in the manifest"
    everything = [recording for _, recording in recordings]
    if holdout == 0:
        return {"train": everything}, "nothing held out (--holdout 0): the scores are those of the training data"
    if len(everything) == 1:
        whole, cut = everything[0], round(len(everything[0]) * (1 - holdout))
        if not 0 < cut < len(whole):
            raise DataError(f"recording '{whole.name}' has {len(whole)} steps, too few to hold out a share of {holdout}; take --holdout 0")
        return {
            "train": [Part(whole, 0, cut)],
            "valid": [Part(whole, cut, len(whole))],
        }, f"the last {holdout:.0%} of the recording held out"
    count = max(1, round(len(everything) * holdout))
    return {
        "train": everything[:-count],
        "valid": everything[-count:],
    }, f"{count} of {len(everything)} recordings held out, the last by name"


def choose(splits: Mapping[str, list[Recording]], name: str) -> list[Recording]:
    """The recordings of one split; `all` is every one.

    Raises:
        DataError: there is no such split.
    """
    chosen = [r for rs in splits.values() for r in rs] if name == "all" else splits.get(name, [])
    if not chosen:
        raise DataError(f"no recordings in split '{name}'; there are {', '.join(f'{k} ({len(v)})' for k, v in splits.items())}")
    return chosen
