"""The manifest of a data set: its recordings, their entry, and what holds for a whole recording."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from throughtime.errors import DataError, counted, listed
from throughtime.stream.folder import read_folder
from throughtime.stream.formats.csv import CsvFile
from throughtime.stream.formats.table import FOLDERS, is_number

MANIFESTS = ("recordings.csv", "manifest.csv")
COLUMNS = ("id", "split", "inputs", "targets", "label")
_MAX_FAULTS = 5  # listed at most


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


def join_faults(faults: Sequence[str]) -> str:
    """Join faults into one message: five at most, and the number of others.

    A sentence that holds for several files, after their names and a colon, is written once.

    Example:
        >>> join_faults(["a", "b"]), join_faults(list("abcdefgh"))
        ('a; b', 'a; b; c; d; e; and 3 more faults')
        >>> join_faults(["a.csv: it is empty", "b.csv: it is empty", "c.csv: no column 'u'"])
        "a.csv, b.csv: it is empty; c.csv: no column 'u'"
    """
    subjects: dict[str, list[str]] = {}
    for fault in faults:
        subject, colon, sentence = fault.partition(": ")
        subjects.setdefault(colon + sentence or fault, []).append(subject if colon else "")
    texts = [
        (listed(names) if len({*names}) > 1 else names[0]) + sentence
        for sentence, names in subjects.items()
    ]
    rest = sum(len(names) for names in [*subjects.values()][_MAX_FAULTS:])
    more = [f"and {counted(rest, 'more fault')}"] if rest else []
    return "; ".join([*texts[:_MAX_FAULTS], *more])


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
    manifest = manifest_of(data)
    if manifest is not None:
        return _read(manifest, static)
    if static:
        raise DataError(
            f"{data}: static={','.join(static)} names columns of a manifest (CSV:"
            f" {', '.join(COLUMNS)}), but this is not a manifest"
        )
    if not is_folder(data):
        return [ManifestEntry(data.name, "", (data,))]
    files = read_folder(data, MANIFESTS).recordings
    entries = [ManifestEntry(file.name, file.split, (file.path,)) for file in files]
    if faults := _duplicates(entries):
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
    if path.suffix.lower() != ".csv" or not path.is_file():
        return False
    with suppress(DataError):
        return {"id", "inputs"} <= {*CsvFile(path).names}
    return False


def _read(path: Path, static: Sequence[str]) -> list[ManifestEntry]:
    """The entries of a manifest, read as text: the ids `1` and `001` are two recordings."""
    file = CsvFile(path)
    _check_columns(path, file.names, static)
    rows = [
        {name: text.strip() for name, text in row.items()}
        for batch in file.texts()
        for row in batch.to_pylist()
    ]
    if not rows:
        raise DataError(
            f"{path}: the manifest lists no recording; write a line for each, such as:"
            " a,train,a.csv"
        )
    entries = [_entry(path.parent, row, static) for row in rows]
    lines = zip(rows, entries, strict=True)
    faults = [fault for row, entry in lines for fault in _entry_faults(row, entry, static)]
    if faults := faults + _duplicates(entries):
        raise DataError(f"{path}: {join_faults(faults)}")
    return entries


def _check_columns(path: Path, columns: Sequence[str], static: Sequence[str]) -> None:
    for name in static:
        if name in COLUMNS or name not in columns:
            what = (
                f"'{name}' has another meaning in a manifest"
                if name in COLUMNS
                else f"there is no column '{name}'"
            )
            raise DataError(
                f"{path}: static={','.join(static)}, but {what}; its columns are {listed(columns)}"
            )
    unknown = [c for c in columns if c not in {*COLUMNS, *static}]
    if unknown or not {"id", "inputs"} <= {*columns}:
        hint = "; to feed a number of each recording to the net, write --static "
        raise DataError(
            f"{path}: a manifest has the columns {', '.join(COLUMNS)} (all but id and inputs"
            f" optional); got {listed(columns)}"
            + (hint + ",".join((*static, *unknown)))
            * bool(unknown)
        )


def _entry(folder: Path, row: dict[str, str], static: Sequence[str]) -> ManifestEntry:
    inputs = tuple(folder / part.strip() for part in row["inputs"].split(";"))
    targets = folder / row["targets"] if row.get("targets") else None
    label = row.get("label") if targets is None else None
    features = tuple(float(row[name]) if is_number(row[name]) else math.nan for name in static)
    return ManifestEntry(row["id"], row.get("split", ""), inputs, targets, label, features)


def _entry_faults(row: dict[str, str], entry: ManifestEntry, static: Sequence[str]) -> list[str]:
    """The faults of one line."""
    name, inputs, targets = entry.name, row["inputs"], entry.targets
    faults = [] if name else ["a recording has no id"]
    if not all(part.strip() for part in inputs.split(";")):
        fault = f"'{name}' has inputs {inputs!r}, expected a file, or several separated by ';'"
        return [*faults, fault]
    paths = entry.inputs if targets is None else (*entry.inputs, targets)
    faults += [
        f"'{name}': no such file {path}"
        for path in paths
        if not os.path.exists(path) or is_folder(path)  # noqa: PTH110  false for an impossible name
    ]
    if len({*entry.inputs}) < len(entry.inputs):
        faults.append(f"'{name}' names one of its inputs twice: {inputs}")
    if targets is not None and row.get("label"):
        faults.append(f"'{name}' has targets and the label {row['label']!r}, expected one of them")
    return faults + [
        f"'{name}' has {feature}={row[feature]!r}, and a static feature is a finite number for"
        " every recording"
        for feature, value in zip(static, entry.static, strict=True)
        if not math.isfinite(value)
    ]


def _duplicates(entries: Sequence[ManifestEntry]) -> list[str]:
    """Entries of one name, and entries of the same files under several names or links."""
    counts = Counter(entry.name for entry in entries)
    faults = [f"'{name}' is listed twice" for name, count in counts.items() if count > 1]
    owners: dict[frozenset[object], ManifestEntry] = {}
    for entry in entries:
        owner = owners.setdefault(frozenset(map(_identity, entry.inputs)), entry)
        if owner.name != entry.name:
            files = dict.fromkeys(map(str, (*owner.inputs, *entry.inputs)))
            faults.append(
                f"'{owner.name}' and '{entry.name}' are the same recording, {listed(files)}:"
                " keep one of them, in one split"
            )
    return faults


def _identity(path: Path) -> object:
    """What two names of one file have in common, whether a link of either kind or another path.

    Size and time are compared as well, since some network file systems number files carelessly.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError):  # reported where it is opened
        return path
    if not stat.st_ino:
        return path.resolve()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
