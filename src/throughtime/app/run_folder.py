"""The folder of a run: its files, and how models and checkpoints are stored in them.

Models and checkpoints are safetensors files with a description in JSON, no pickle. A checkpoint
holds any nesting of plain values and tensors. Every line of the log has a checksum.

One process at a time trains a run: it holds the lock of its folder. Readers need none, since every
file is replaced as a whole.
"""

import json
import os
import warnings
import zlib
from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from throughtime import tensor_files
from throughtime.app.settings import CODE, Config, read_toml
from throughtime.app.user_class import kept_class
from throughtime.errors import ConfigError, RunError, join_faults, listed
from throughtime.files import exclusive, named_errors, sync, write_atomically, write_together
from throughtime.state import differences, map_tensors

T = TypeVar("T")
MODEL = "throughtime.model/1"
_CHECKPOINT = "throughtime.checkpoint/1"
_NO_CHECKPOINT = (
    "no checkpoint to go on from; put back a copy, or begin the run again with another --out"
)
_LOG = "put back a copy of it, or remove it: the run then continues with a new log"


class RunFolder:
    """The files of a run, and what they say of it besides weights and numbers.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        config: the resolved settings.
        model: weights and description: all that is needed to run the model.
        checkpoint: all that a run needs to resume: weights, optimizer, state, position, random
            state.
        metrics: the log: one JSON object per line.
        report: the HTML report.
        audit: the results of `audit`.
        facts: the first line of the log.
        description: plain values that the model file holds beside the weights.
        parts: what a training must go on with besides its recordings, in words by name; empty:
            optimizer, schedule and loss.
        checkpoint_every: seconds between two checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.model = path / "model.safetensors"
        self.checkpoint = path / "checkpoint.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.report = path / "report.html"
        self.audit = path / "audit.json"
        self.facts: Mapping[str, Any] = {}
        self.description: Mapping[str, Any] = {}
        self.parts: Mapping[str, str] = {}
        self.checkpoint_every = 30.0

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the lock of the folder, which is made; a process that ends holds none.

        Files that an interrupted write has left are removed. Warns if the file system has no locks.

        Raises:
            RunError: another process holds it.
            OSError: the folder is not writable.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / ".lock"
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive(path, wait=False))
            except TimeoutError as error:
                raise RunError(
                    f"{self.path}: another process is training this run; wait until it has ended,"
                    " or choose another --out"
                ) from error
            except OSError as error:  # if the folder is not writable, what follows says so
                warnings.warn(
                    f"{path}: cannot be locked ({error.strerror}), so a second process could train"
                    " the same run",
                    stacklevel=2,
                )
            for temporary in self.path.glob("*.tmp"):
                temporary.unlink()
            yield

    def check_free(self) -> None:
        """Refuse a folder in which a new run cannot start; a start that failed is replaced.

        Raises:
            RunError: it holds a run, or other files than a start without a checkpoint
                leaves, which begins with the log.
        """
        left = (self.config.name, self.metrics.name, ".py", ".tmp") if self.metrics.exists() else ()
        every = (path.name for path in self.path.glob("[!.]*"))
        if others := sorted(name for name in every if not name.endswith(left)):
            raise RunError(
                f"{self.path}: holds a run already, or other files ({listed(others)}); continue a"
                f" run with --resume {self.path}, or choose another --out"
            )
        self.read_metrics()  # raises if the log is of another origin

    def create(self, config: Config) -> None:
        """Create the folder, with the resolved settings and the user's files that they name.

        Raises:
            RunError: as `check_free`, or another process trains a run in it.
        """
        with self.locked():
            self.check_free()
            self.metrics.touch()
            for own in config.code():
                write_atomically(self.path / own.path.name, own.path.read_bytes())
            write_atomically(self.config, config.kept().to_toml().encode())

    def with_own_code(
        self, config: Config, names: Collection[str] = CODE, *, trust_code: bool
    ) -> Config:
        """The settings with a user's classes in the copies of their files that the run keeps.

        Args:
            config: of the run.
            names: of the settings.
            trust_code: whether this process may execute the copies.

        Raises:
            RunError: a copy is missing, or lies outside of the folder.
        """
        for named in config.code():
            if named.setting in names:
                own = kept_class(self.path, named, trust_code=trust_code)
                config = config.changed(**{own.setting: str(own)})
        return config

    def read_config(self) -> Config:
        """The settings of the run.

        Raises:
            RunError: the folder holds no run.
        """
        if not self.config.is_file():
            raise RunError(
                f"{self.path}: no run there (no {self.config.name}); give the folder that"
                " `throughtime train --out` wrote"
            )
        try:
            return Config(**read_toml(self.config))
        except ConfigError as error:
            raise RunError(
                f"{self.config}: was changed, or written by another version of throughtime; mend"
                f" it, train again or use that version: {error}"
            ) from error

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The content of the checkpoint, with tensors on the CPU; `None` before the first one.

        Raises:
            RunError: it is damaged, belongs to something else, or is lost while its model remains.
        """
        if not (os.path.lexists(self.checkpoint) or os.path.lexists(self.model)):
            return None
        content = load_checkpoint(self.checkpoint)
        if "done" not in content:
            raise RunError(f"{self.checkpoint}: not a checkpoint of a run; {_NO_CHECKPOINT}")
        return content

    def save(self, content: Mapping[str, Any], model: bytearray) -> None:
        """Write checkpoint and model, after the lines of the log that the checkpoint counts.

        Raises:
            OSError: the disk is full or not writable; the previous ones are untouched.
        """
        if self.metrics.exists():
            sync(self.metrics)
        checkpoint = checkpoint_bytes(content)
        write_together({self.checkpoint: checkpoint, self.model: model})

    def model_bytes(self, weights: Mapping[str, Tensor], update: int) -> bytearray:
        """The content of the model file: weights and statistics by name, and the description.

        Args:
            weights: by name.
            update: the one that they are of.
        """
        values = {**self.description, "update": update}
        return tensor_files.to_bytes(MODEL, values, to_cpu(dict(weights)))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of the log; a last line that a kill has cut is dropped.

        Raises:
            RunError: a line that `throughtime train` did not write.
        """
        lines = self.metrics.read_bytes().split(b"\n") if self.metrics.exists() else []
        rows = [_row_of(line) for line in lines]
        if lines and rows[-1] is None and _row_of(lines[-1][:-1]) is None:  # else its end is wrong
            del rows[-1]
        if None in rows:
            raise RunError(
                f"{self.metrics}: line {rows.index(None) + 1} is damaged (its checksum differs);"
                f" {_LOG}"
            )
        return [row for row in rows if row]

    def truncate_metrics(self, count: int) -> int:
        """Drop the lines written after the checkpoint from which the run resumes.

        Args:
            count: the lines written before it.

        Returns:
            The lines that remain: `count`, or 0 if the log was removed.

        Raises:
            RunError: some of these lines are lost or damaged.
        """
        if not self.metrics.exists():
            return 0
        rows = self.read_metrics()
        if len(rows) < count:
            raise RunError(
                f"{self.metrics}: has {len(rows)} complete lines, and the checkpoint was written"
                f" after {count}; {_LOG}"
            )
        write_atomically(self.metrics, b"".join(map(_line_of, rows[:count])))
        return count

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a line to the log."""
        with named_errors(self.metrics), self.metrics.open("ab") as file:
            file.write(_line_of(row))


def _line_of(row: Mapping[str, Any]) -> bytes:
    """A line of the log, with a checksum as its last entry."""
    checksum = f"{zlib.crc32(json.dumps(row).encode()):08x}"
    return json.dumps({**row, "crc32": checksum}).encode() + b"\n"


def _row_of(line: bytes) -> dict[str, Any] | None:
    """The entries of a line, or `None` if it is not as `_line_of` wrote it."""
    try:
        row = json.loads(line)
        del row["crc32"]
    except (ValueError, TypeError, KeyError):
        return None
    return row if _line_of(row) == line + b"\n" else None


def load_tensors(path: Path, kind: str, hint: str) -> tuple[Any, dict[str, Tensor]]:
    """The description and the tensors of a file of this kind.

    Raises:
        RunError: no such file, a damaged one, or one of another kind; `hint` says what to do.
    """
    try:
        return tensor_files.read_tensors(path, kind)
    except (OSError, ValueError) as error:
        why = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else error
        raise RunError(f"{path}: {why}; {hint}") from error


def check_layout(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse tensors of other names, shapes or types than those expected.

    Raises:
        ValueError: how they differ.
    """
    if faults := differences(values, expected, "tensor"):
        raise ValueError(join_faults(faults))


def checkpoint_bytes(content: Mapping[str, Any]) -> bytearray:
    """The content of a checkpoint file: the tensors, the other leaves, and their structure.

    Raises:
        RunError: a leaf that is neither a tensor nor a plain value.
    """
    leaves, structure = tree_flatten(to_cpu(content))
    tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    plain = [[] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    try:
        return tensor_files.to_bytes(_CHECKPOINT, [treespec_dumps(structure), plain], tensors)
    except TypeError as error:
        raise RunError(f"a checkpoint holds tensors and plain values: {error}") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a file of `checkpoint_bytes`, with tensors on the CPU.

    Raises:
        RunError: no such file, or one that is no checkpoint.
    """
    description, tensors = load_tensors(path, _CHECKPOINT, _NO_CHECKPOINT)
    try:
        structure, plain = description
        # A copy in torch's own memory: the alignment of a tensor decides how a kernel rounds, and a
        # resumed run must round as before.
        leaves = [tensors[str(i)].clone() if leaf == [] else leaf for i, leaf in enumerate(plain)]
        content = tree_unflatten(leaves, treespec_loads(structure))
    except (TypeError, ValueError, KeyError, NotImplementedError) as error:
        raise RunError(
            f"{path}: not what `throughtime train` wrote ({error!r}); {_NO_CHECKPOINT}"
        ) from error
    return content


def to_cpu(content: T) -> T:
    """The content with its tensors copied to the CPU, each into memory of its own."""
    return map_tensors(
        lambda tensor: tensor.detach().cpu().clone(memory_format=torch.contiguous_format), content
    )
