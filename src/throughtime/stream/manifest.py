"""The recordings of a data set: those of a folder, or of a manifest, and what holds for each.

A manifest is a CSV file with a line for each recording. In a folder, recordings are in splits if
sub-folders are called so. Left out are hidden files and folders, folders of runs and of
predictions, and files of an unknown format. A folder that several links lead to is read once.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from throughtime.errors import DataError, join_faults, listed
from throughtime.stream.formats.table import FOLDERS, SUFFIXES, is_number

MANIFESTS = ("recordings.csv", "manifest.csv")
COLUMNS = ("id", "split", "inputs", "targets", "label")
SPLITS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "val": "valid",
    "validation": "valid",
    "test": "test",
}
"""Names of sub-folders, in lower case, and the splits that they mean."""
OUTPUTS = ("model.safetensors", "checkpoint.safetensors", "metrics.jsonl", "predictions.json")


@dataclass(frozen=True)
class ManifestEntry:
    """The files of one recording.

    Attributes:
        name: its id, or the name of its file.
        split: empty without a split.
        inputs: its files; their columns are concatenated.
        targets: the file of its targets, if they are in a file of their own.
        label: the label of the whole recording; empty if the manifest has labels but none here;
            `None` if it has no labels.
        static: its static features, in the order of the setting.
    """

    name: str
    split: str
    inputs: tuple[Path, ...]
    targets: Path | None = None
    label: str | None = None
    static: tuple[float, ...] = ()


def find_recordings(data: Path, static: Sequence[str] = ()) -> list[ManifestEntry]:
    """List the recordings of a file, a folder or a manifest, in order.

    Args:
        data: the path.
        static: columns of the manifest that are static features.

    Raises:
        DataError: the path does not exist, the manifest lacks a file or a column, or it lists a
            recording twice.
    """
    if not data.exists():
        raise DataError(f"{data}: no such file or folder")
    manifest, faults = manifest_of(data), list[str]()
    if manifest is not None:
        data, entries = manifest, _entries(manifest, static, faults)
    elif static:
        raise DataError(
            f"{data}: static={','.join(static)} needs a manifest, with the columns id and inputs"
        )
    elif is_folder(data):
        entries, _ = read_folder(data)
    else:
        return [ManifestEntry(data.name, "", (data,))]
    if faults := faults + _duplicates(entries):
        raise DataError(f"{data}: {join_faults(faults)}")
    return entries


def is_folder(data: Path) -> bool:
    """Whether a path is a folder of recordings, rather than one recording."""
    return data.is_dir() and data.suffix.lower() not in FOLDERS


def manifest_of(data: Path) -> Path | None:
    """The manifest that a path is, or that lies in the folder; `None` if there is none."""
    if not is_folder(data):
        return data if is_manifest(data) else None
    return next((data / name for name in MANIFESTS if (data / name).is_file()), None)


def is_manifest(path: Path) -> bool:
    """Whether a file is a manifest: a CSV file with the columns `id` and `inputs`."""
    if path.suffix.lower() == ".csv" and path.is_file():
        from throughtime.stream.formats.csv import CsvFile

        with suppress(DataError):
            return {"id", "inputs"} <= {*CsvFile(path).names}
    return False


def _entries(path: Path, static: Sequence[str], faults: list[str]) -> list[ManifestEntry]:
    """The recordings of a manifest; the faults of its lines are added to the others.

    Fields are read as text: the ids `1` and `001` are two recordings.
    """
    from throughtime.stream.formats.csv import CsvFile

    file, known = CsvFile(path), {*COLUMNS, *static}
    names = {*file.names} - {"__index_level_0__"}  # of pandas
    if not {"id", "inputs", *static} <= names <= known or len(known) < len(COLUMNS) + len(static):
        raise DataError(
            f"{path}: a manifest has the columns {', '.join(COLUMNS)} (all but id and inputs"
            f" optional), and static features under other names; got {listed(file.names)} and"
            f" static={','.join(static)}; to feed one to the net write --static and its column"
        )
    rows = [row for batch in file.texts() for row in batch.to_pylist()]
    if not rows:
        raise DataError(
            f"{path}: the manifest lists no recording; write for each a line: a,train,a.csv"
        )
    return [
        _entry(path.parent, {name: text.strip() for name, text in row.items()}, static, faults)
        for row in rows
    ]


def _entry(
    folder: Path, row: Mapping[str, str], static: Sequence[str], faults: list[str]
) -> ManifestEntry:
    """The recording of a line; its faults are added to the others."""
    name, inputs = row["id"], [part.strip() for part in row["inputs"].split(";")]
    targets, label = row.get("targets", ""), row.get("label")
    features = {n: float(row[n]) if is_number(row[n]) else math.nan for n in static}
    paths = [folder / file for file in (*inputs, *([targets] if targets else []))]
    absent = [path for path in paths if not os.path.exists(path) or is_folder(path)]  # noqa: PTH110  false for an impossible name
    texts = {
        "a recording has no id": not name,
        f"'{name}' has inputs {row['inputs']!r}, expected a file, or several separated by ';'": (
            not all(inputs)
        ),
        f"'{name}': no such file {listed(absent)}": all(inputs) and absent,
        f"'{name}' has targets and the label {label!r}, expected one of them": targets and label,
    } | {
        f"'{name}' has {n}={row[n]!r}, and a static feature is a finite number": (
            not math.isfinite(value)
        )
        for n, value in features.items()
    }
    faults += [text for text, is_wrong in texts.items() if is_wrong]
    files = paths[: len(inputs)]
    return ManifestEntry(
        name,
        row.get("split", ""),
        tuple(files),
        folder / targets if targets else None,
        None if targets else label,
        tuple(features.values()),
    )


def _duplicates(entries: Sequence[ManifestEntry]) -> list[str]:
    """Entries of one name, and entries of the same files under several names or symbolic links."""
    counts = Counter(entry.name for entry in entries)
    faults = [f"'{name}' is listed twice" for name, count in counts.items() if count > 1]
    owners: dict[frozenset[Path], ManifestEntry] = {}
    for entry in entries:
        owner = owners.setdefault(frozenset(path.resolve() for path in entry.inputs), entry)
        if owner.name != entry.name:
            faults.append(
                f"'{owner.name}' and '{entry.name}' are the same recording,"
                f" {listed(dict.fromkeys((*owner.inputs, *entry.inputs)))}: keep one of them"
            )
    return faults


def read_folder(folder: Path) -> tuple[list[ManifestEntry], list[str]]:
    """The recordings of a folder and its sub-folders, and the names of files of other formats.

    Raises:
        DataError: it holds no recording, a manifest in a sub-folder, or recordings in and beside
            folders of splits.

    Cost: a listing of each folder; no file is opened.
    """
    entries, others = list[ManifestEntry](), list[str]()
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        splits = {SPLITS[part] for part in name.lower().split("/")[:-1] if part in SPLITS}
        if len(splits) > 1:
            raise DataError(
                f"{folder}: '{name}' lies in folders of the splits {' and '.join(sorted(splits))}"
            )
        if path.suffix.lower() in SUFFIXES:
            entries.append(ManifestEntry(name, next(iter(splits), ""), (path,)))
        else:
            others.append(name)
    if not entries:
        raise DataError(
            f"{folder}: has no {', '.join(SUFFIXES)} file, and no {' or '.join(MANIFESTS)}"
        )
    beside = [entry.name for entry in entries if not entry.split]
    if 0 < len(beside) < len(entries):
        raise DataError(
            f"{folder}: {listed(beside, quoted=True)} lie beside folders of splits; move them"
        )
    return sorted(entries, key=lambda entry: entry.name), sorted(others)


def _walk(folder: Path) -> Iterator[Path]:
    """The files of a folder, and folders that are one recording (`.zarr`)."""
    visited = set[Path]()  # links may lead to a folder twice, or in a loop
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root)
        if here.resolve() in visited or (here != folder and {*OUTPUTS} & {*files}):
            folders.clear()
            continue
        visited.add(here.resolve())
        recordings = [name for name in folders if Path(name).suffix.lower() in FOLDERS]
        yield from (here / name for name in (*files, *recordings) if not name.startswith("."))
        others = {*folders} - {"__pycache__", "__MACOSX", *recordings}
        folders[:] = sorted(name for name in others if not name.startswith("."))
