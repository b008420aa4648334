"""Files that are either the old one or the new one, whatever happens in between."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes to a temporary file beside `path`, syncs it, then renames it over `path`.

    A crash or a full disk leaves the previous file untouched; the temporary file is removed on
    error. Cost: one extra copy on disk while writing.

    Raises:
        OSError: as the system gave it (no space, no permission).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable; Windows cannot open folders and does not need it."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
