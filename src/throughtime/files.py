"""Files that are either the old ones or the new ones, and locks that one process at a time holds.

The system releases a lock when its process ends, however it ends. On NFS `flock` holds between
machines unless the mount says `nolock` or `local_lock`; on Lustre it needs the mount option
`flock`, without which the system refuses it.
"""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


def user_folder(kind: str, systems: Mapping[str, str]) -> Path:
    """Our folder among the caches (kind `cache`) or settings (`config`) of the user.

    `systems` has the path of all of them in the home folder by `sys.platform`; others have `.kind`.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(
        os.environ.get(f"XDG_{kind.upper()}_HOME")
        or Path.home() / systems.get(sys.platform, f".{kind}"),
        "throughtime",
    )


def write_atomically(path: Path, content: bytes | bytearray) -> None:
    """Write a temporary file beside `path`, sync it, then rename it over `path`.

    A crash or a full disk leaves the previous file untouched; the temporary file is removed on
    error. Cost: one extra copy on disk while writing.

    Raises:
        OSError: as the system gave it (no space, no permission), with the name of the file.
    """
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes | bytearray]) -> None:
    """Write several files: all of them are on the disk before the first is renamed.

    A full disk leaves all previous files. A crash between two renames leaves the first files new
    and the last ones old, in the order of `contents`.

    Raises:
        OSError: as `write_atomically`.
    """
    temporaries = {path: path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, temporary in temporaries.items():
            with named_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("wb") as file:
                    file.write(contents[path])
                    file.flush()
                    os.fsync(file.fileno())
        for path, temporary in temporaries.items():
            with named_errors(path):
                temporary.replace(path)
    except BaseException:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in contents}:
        sync(folder)


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable; Windows cannot open folders.

    Raises:
        OSError: as the system gave it.
    """
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Errors of the system inside it name this file; a failed write by itself names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def exclusive(path: Path, *, wait: bool) -> Generator[None]:
    """Hold the lock of a file, which is made for it and removed afterwards.

    A forked child does not hold it.

    Args:
        path: the file, of the lock alone.
        wait: for the process that holds it.

    Raises:
        TimeoutError: another process holds it, and `wait` is false.
        OSError: the folder is not writable, or its file system has no locks.
    """
    from filelock import FileLock  # 15 ms, for the few that lock

    lock = FileLock(path, blocking=wait, thread_local=False)
    with named_errors(path):
        lock.acquire()
    try:
        yield
    finally:
        if lock.is_locked:  # not in a forked child
            with suppress(PermissionError):  # Windows removes no open file
                path.unlink(missing_ok=True)
        lock.release()
