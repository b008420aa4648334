"""The recordings of a folder and its sub-folders, in splits if sub-folders are called so.

Left out are hidden files and folders, folders of runs and of predictions, and files of an unknown
format. A folder that several links lead to is read once.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from throughtime.errors import DataError, listed
from throughtime.stream import formats
from throughtime.stream.formats.table import FOLDERS

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
_OTHER_FOLDERS = ("__pycache__", "__MACOSX")


class FolderFile(NamedTuple):
    """A recording in a folder: its path from the folder on, with slashes, and its split.

    The split is empty without one.
    """

    name: str
    split: str
    path: Path


class FolderContent(NamedTuple):
    """The recordings of a folder by name, and the names of files of an unknown format."""

    recordings: list[FolderFile]
    others: list[str]


def read_folder(folder: Path, manifests: tuple[str, ...] = ()) -> FolderContent:
    """List the recordings of a folder and its sub-folders.

    Args:
        folder: the path.
        manifests: names of files that no sub-folder may hold.

    Raises:
        DataError: it holds no recording, a manifest in a sub-folder, or recordings in and beside
            folders of splits.

    Cost: a listing of each folder; no file is opened.
    """
    files, others = list[FolderFile](), list[str]()
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if path.name in manifests:
            raise DataError(
                f"{folder}: the sub-folder {path.parent.name} has a manifest of its own, {name};"
                f" name {path.parent} as the data, or write one manifest for all in {folder}"
            )
        if path.suffix.lower() in formats.SUFFIXES:
            files.append(FolderFile(name, _split_of(folder, name), path))
        else:
            others.append(name)
    if not files:
        raise DataError(
            f"{folder}: the folder and its sub-folders hold no {', '.join(formats.SUFFIXES)} file"
            f" and no {' or '.join(manifests)}"
        )
    beside = [file.name for file in files if not file.split]
    if 0 < len(beside) < len(files):
        splits = sorted({file.split for file in files if file.split})
        raise DataError(
            f"{folder}: {listed(beside, quoted=True)} lie beside the folders of the splits"
            f" {', '.join(splits)}; move them into one of them, rename the folders, or write a"
            f" manifest: {manifests[0] if manifests else 'recordings.csv'}"
        )
    return FolderContent(sorted(files), sorted(others))


def _walk(folder: Path) -> Iterator[Path]:
    """The files of a folder, and folders that are one recording (`.zarr`)."""
    visited = set[tuple[int, int]]()
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root)
        stat = here.stat()
        known = (stat.st_dev, stat.st_ino)
        run = here != folder and any(name in files for name in OUTPUTS)
        if known in visited or run:
            folders.clear()
            continue
        visited.add(known)
        recordings = [name for name in folders if Path(name).suffix.lower() in FOLDERS]
        yield from (here / name for name in (*files, *recordings) if not name.startswith("."))
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name not in (*_OTHER_FOLDERS, *recordings)
        )


def _split_of(folder: Path, name: str) -> str:
    """The split that the folders of a file name, if any."""
    splits = {SPLITS[part] for part in name.lower().split("/")[:-1] if part in SPLITS}
    if len(splits) > 1:
        raise DataError(
            f"{folder}: '{name}' lies in folders of the splits {' and '.join(sorted(splits))};"
            " keep it in one of them"
        )
    return next(iter(splits), "")
