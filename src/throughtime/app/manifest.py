"""Manifest: which recordings there are, in which files, and what is known of each as a whole."""

import csv as lines
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from throughtime.errors import DataError
from throughtime.stream import formats
from throughtime.stream.formats import csv
from throughtime.stream.formats.csv import is_number

MANIFESTS = ("recordings.csv", "manifest.csv")
COLUMNS = ("id", "split", "inputs", "targets", "label")
_FAULTS = 5  # listed at most
# bytes: the header of a manifest is shorter, the first line of another file may be as long as
# memory
_HEADER = 65_536


@dataclass(frozen=True)
class Files:
    """One recording.

    Attributes:
        name: its id, or the name of its file.
        split: empty if nothing says.
        inputs: its files, whose columns stand side by side.
        targets: the file of its targets, if they have one of their own.
        label: that of the whole recording; empty where the manifest has labels and none for this
            one; `None` if it has none at all.
        static: its static features, in the order asked for.
    """

    name: str
    split: str
    inputs: tuple[Path, ...]
    targets: Path | None = None
    label: str | None = None
    static: tuple[float, ...] = ()


def together(faults: Sequence[str]) -> str:
    """Faults in one message, five at most and how many more there are.

    Example:
        >>> together(["a", "b"]), together(list("abcdefgh"))
        ('a; b', 'a; b; c; d; e; and 3 more faults')
    """
    rest = len(faults) - _FAULTS
    return "; ".join(faults[:_FAULTS]) + (
        f"; and {rest} more fault{'s' if rest > 1 else ''}" if rest > 0 else ""
    )


def find(data: Path, static: Sequence[str] = ()) -> list[Files]:
    """The recordings of a file, a folder or a manifest, in order.

    Args:
        data: where they are.
        static: columns of the manifest that are static features.

    Raises:
        DataError: nothing there, or a manifest with a missing file or column, or a recording listed
            twice.
    """
    if not data.exists():
        raise DataError(f"{data}: no such file or folder")
    folder = data.is_dir() and data.suffix.lower() not in formats.SUFFIXES
    manifest = (
        next((data / name for name in MANIFESTS if (data / name).is_file()), None)
        if folder
        else data
    )
    if manifest is not None and (folder or _is_manifest(manifest)):
        return _read(manifest, static)
    if static:
        raise DataError(
            f"{data}: static={','.join(static)} names columns of a manifest (CSV:"
            f" {', '.join(COLUMNS)}), and this is none"
        )
    if not folder:
        return [Files(data.name, "", (data,))]
    paths = sorted(p for p in data.iterdir() if p.suffix.lower() in formats.SUFFIXES)
    if not paths:
        raise DataError(
            f"{data}: the folder holds no {', '.join(formats.SUFFIXES)} file and no"
            f" {' or '.join(MANIFESTS)}"
        )
    return [Files(path.name, "", (path,)) for path in paths]


def header_of(path: Path) -> tuple[str, ...]:
    """The fields of the first line of a CSV file; none of another one."""
    if path.suffix.lower() != ".csv" or not path.is_file():
        return ()
    with path.open("rb") as file:
        first = file.readline(_HEADER).decode("utf-8-sig", errors="replace")
    try:
        return tuple(field.strip() for field in next(lines.reader([first]), []))
    except lines.Error:
        return ()


def _is_manifest(path: Path) -> bool:
    return {"id", "inputs"} <= set(header_of(path))


def _read(path: Path, static: Sequence[str]) -> list[Files]:
    """A manifest is text: the ids `1` and `001` are two recordings."""
    columns = csv.read_columns(path)
    _check_columns(path, list(columns), static)
    rows = [
        dict(zip(columns, map(str.strip, row), strict=True))
        for row in zip(*columns.values(), strict=True)
    ]
    if not rows:
        raise DataError(
            f"{path}: the manifest lists no recording; write a line for each, such as:"
            " a,train,a.csv"
        )
    found = [_files(path.parent, row, static) for row in rows]
    faults = [
        fault
        for row, files in zip(rows, found, strict=True)
        for fault in _faults(row, files, static)
    ] + _listed_twice(found)
    if faults:
        raise DataError(f"{path}: {together(faults)}")
    return found


def _check_columns(path: Path, columns: Sequence[str], static: Sequence[str]) -> None:
    reserved = [name for name in static if name in COLUMNS]
    absent = [name for name in static if name not in columns]
    if reserved or absent:
        what = (
            f"'{reserved[0]}' says something else in a manifest"
            if reserved
            else f"there is no column '{absent[0]}'"
        )
        raise DataError(
            f"{path}: static={','.join(static)}, but {what}; its columns are {', '.join(columns)}"
        )
    unknown = [c for c in columns if c not in {*COLUMNS, *static}]
    if unknown or not {"id", "inputs"} <= set(columns):
        hint = (
            "; a number of each recording that the net is to see: --static"
            f" {','.join((*static, *unknown))}"
            if unknown
            else ""
        )
        raise DataError(
            f"{path}: a manifest has the columns {', '.join(COLUMNS)} (all but id and inputs"
            f" optional); got {', '.join(columns)}{hint}"
        )


def _files(folder: Path, row: dict[str, str], static: Sequence[str]) -> Files:
    inputs = tuple(folder / part.strip() for part in row["inputs"].split(";"))
    targets = folder / row["targets"] if row.get("targets") else None
    label = row.get("label") if targets is None else None
    features = tuple(float(row[name]) if is_number(row[name]) else math.nan for name in static)
    return Files(row["id"], row.get("split", ""), inputs, targets, label, features)


def _faults(row: dict[str, str], files: Files, static: Sequence[str]) -> list[str]:
    """What is wrong with one line."""
    name = files.name
    faults = [] if name else ["a recording has no id"]
    if not all(part.strip() for part in row["inputs"].split(";")):
        return [
            *faults,
            f"'{name}' has inputs {row['inputs']!r}, expected a file, or several separated by ';'",
        ]
    paths = [*files.inputs, *([files.targets] if files.targets is not None else [])]
    faults += [f"'{name}': no such file {path}" for path in paths if not _is_there(path)]
    if len(set(files.inputs)) < len(files.inputs):
        faults.append(f"'{name}' names one of its inputs twice: {row['inputs']}")
    if row.get("targets") and row.get("label"):
        faults.append(f"'{name}' has targets and the label {row['label']!r}, expected one of them")
    faults += [
        f"'{name}' has {feature}={row[feature]!r}, and a static feature is a finite number for"
        " every recording"
        for feature, value in zip(static, files.static, strict=True)
        if not math.isfinite(value)
    ]
    return faults


def _is_there(path: Path) -> bool:
    try:
        return path.is_file() or (path.is_dir() and path.suffix.lower() in formats.SUFFIXES)
    except OSError:  # a name that no file can have
        return False


def _listed_twice(found: Sequence[Files]) -> list[str]:
    faults: list[str] = []
    names: set[str] = set()
    owners: dict[tuple[Path, ...], str] = {}
    for files in found:
        if files.name in names:
            faults.append(f"'{files.name}' is listed twice")
        names.add(files.name)
        owner = owners.setdefault(
            tuple(path.resolve() if _is_there(path) else path for path in files.inputs), files.name
        )
        if owner != files.name:
            same = ", ".join(map(str, files.inputs))
            faults.append(
                f"'{owner}' and '{files.name}' are the same recording, {same}: list it once, in one"
                " split"
            )
    return faults
