"""DATA of the command line: a file, a folder or a manifest becomes recordings in splits.

Shapes: `T` steps, `D` input features, `C` target columns.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from throughtime.errors import DataError
from throughtime.stream import formats
from throughtime.stream.collate import IGNORED
from throughtime.stream.formats import csv
from throughtime.stream.formats.table import Array
from throughtime.stream.recording import Columns, Part, Recording, Steps, columns

MANIFESTS = ("recordings.csv", "manifest.csv")
_MANIFEST_COLUMNS = ("id", "split", "inputs", "targets")
_FAULTS = 5  # listed at most


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
    if not data.exists():
        raise DataError(f"{data}: no such file or folder")
    if data.is_dir():
        manifest = next((data / name for name in MANIFESTS if (data / name).is_file()), None)
        if manifest is not None:
            return _manifest(manifest)
        paths = sorted(p for p in data.iterdir() if p.suffix.lower() in formats.SUFFIXES)
        if not paths:
            raise DataError(f"{data}: the folder holds no {', '.join(formats.SUFFIXES)} file and no {' or '.join(MANIFESTS)}")
        return [Files(path.name, "", path, None) for path in paths]
    table = formats.open_table(data)
    if data.suffix.lower() == ".csv" and {"id", "inputs"} <= set(table.columns):
        return _manifest(data)
    return [Files(data.name, "", data, None)]


def _manifest(path: Path) -> list[Files]:
    """A manifest is text: the ids `1` and `001` are two recordings."""
    columns = csv.read_columns(path)
    unknown = [c for c in columns if c not in _MANIFEST_COLUMNS]
    if unknown or not {"id", "inputs"} <= set(columns):
        raise DataError(
            f"{path}: a manifest has the columns {', '.join(_MANIFEST_COLUMNS)} (split and targets optional); got {', '.join(columns)}"
        )
    rows = [dict(zip(columns, map(str.strip, row), strict=True)) for row in zip(*columns.values(), strict=True)]
    if not rows:
        raise DataError(f"{path}: the manifest lists no recording")
    found = [
        Files(row["id"], row.get("split", ""), path.parent / row["inputs"], path.parent / row["targets"] if row.get("targets") else None)
        for row in rows
    ]
    names = Counter(files.name for files in found)
    faults = [f"'{name}' is listed twice" for name, count in names.items() if count > 1]
    faults += [f"'{f.name}': no such file {p}" for f in found for p in (f.inputs, f.targets) if p is not None and not p.is_file()]
    if faults:
        more = f"; and {len(faults) - _FAULTS} more faults" if len(faults) > _FAULTS else ""
        raise DataError(f"{path}: " + "; ".join(faults[:_FAULTS]) + more)
    return found


def of_splits(found: Sequence[Files], wanted: Sequence[str]) -> list[Files]:
    """The recordings of some splits, and those that no split is named for; all of them if there is none such."""
    chosen = [files for files in found if files.split in {*wanted, ""}]
    return chosen or list(found)


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
    labels = table if apart is None else apart
    wanted = tuple(targets) or (apart.columns if apart is not None else ("targets",) if "targets" in table.columns else ())
    if not need_targets:
        return columns(files.name, table, tuple(inputs) or tuple(c for c in table.columns if apart is not None or c not in wanted))
    if not wanted:
        raise DataError(f"{files.inputs}: which columns are the targets? The file has {', '.join(table.columns)}; name them with --targets")
    chosen = tuple(inputs) or tuple(c for c in table.columns if apart is not None or c not in wanted)
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
                fields = values.reshape(len(values), -1)
                step, text = next((i, v) for i, row in enumerate(fields.tolist()) for v in row if not csv.is_number(v))
                raise DataError(
                    f"{table.path}: the {role} hold text, such as {text!r} at step {start + step}, expected numbers; choose columns with "
                    f"--{role} (the file has {', '.join(table.columns)})"
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
    if re.fullmatch(r"-?[0-9]+", text):
        return str(int(text))
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
