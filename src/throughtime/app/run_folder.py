"""The folder of a run: its files, and how models and checkpoints are stored in them.

Models and checkpoints are safetensors files with a description in JSON, no pickle. A checkpoint
holds any nesting of plain values and tensors.

One process at a time trains a run: it holds the lock of its folder. Readers need none, since every
file is replaced as a whole.
"""

import errno
import json
import math
import os
import socket
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from throughtime import _safetensors
from throughtime._files import exclusive, named_errors, sync, write_atomically
from throughtime.app.config import Config, make_config
from throughtime.app.user_class import kept_class
from throughtime.app.values import read_toml
from throughtime.errors import RunError, ThroughtimeError
from throughtime.state import map_tensors

_CHECKPOINT = "throughtime.checkpoint/1"
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_NO_CHECKPOINT = (
    "no checkpoint to go on from; put back a copy, or begin the run again with another --out"
)
_LOG = "put back a copy of it, or remove it: the run then continues with a new log"
_NUMBER = (int, float)
_COMMON = {
    "update": int,
    "frames": int,
    "seconds": _NUMBER,
    "training_seconds": _NUMBER,
    "peak_memory": (int, NoneType),
}
_LINES: dict[str, dict[str, Any]] = {
    "data": {"train": int, "valid": int, "steps": int, "remarks": list},
    "train": {"epoch": int, "loss": _NUMBER, "lr": _NUMBER},
    "valid": {"loss": _NUMBER, "recordings": dict},
}
"""The kinds of log lines, and what each has besides `_COMMON` and the metrics."""


class RunFolder:
    """The files of a run.

    Attributes:
        path: the folder.
        config: the resolved settings.
        model: weights and description: all that is needed to run the model.
        checkpoint: all that a run needs to resume: weights, optimizer, state, position, random
            state.
        metrics: the log: one JSON object per line.
        report: the HTML report.
        audit: the results of `audit`.
        loggers: the ids by which loggers continue.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.model = path / "model.safetensors"
        self.checkpoint = path / "checkpoint.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.report = path / "report.html"
        self.audit = path / "audit.json"
        self.loggers = path / "loggers.json"
        self._lock = ExitStack()

    def lock(self) -> None:
        """Hold the lock of the folder until `unlock`, or until this process ends.

        Warns if the file system has no locks.

        Raises:
            RunError: another process holds it.
            OSError: the folder does not exist or is not writable.
        """
        path = self.path / ".lock"
        try:
            self._lock.enter_context(exclusive(path, wait=False))
        except TimeoutError as error:
            owner = ""
            with suppress(OSError):
                owner = path.read_text(encoding="utf-8", errors="replace")
            raise RunError(
                f"{self.path}: {owner or 'another process'} is training this run; wait until it"
                " has ended, or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(
                f"{path}: the file system has no locks ({error.strerror}), so nothing keeps a"
                " second process from training the same run",
                stacklevel=2,
            )
        else:
            with suppress(PermissionError):  # Windows locks the content as well
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}", "utf-8")

    def unlock(self) -> None:
        """Let another process train the run; nothing happens if this one holds no lock."""
        self._lock.close()

    def check_free(self) -> None:
        """Refuse a folder in which a new run cannot start.

        Raises:
            RunError: it is a file, holds a run with a checkpoint or a model, or another process
                trains in it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path}: is a file; choose another --out")
        if self.path.exists():
            self.lock()
            try:
                self._refuse_run()
            finally:
                self.unlock()

    def create(self, config: Config) -> None:
        """Create the folder, lock it, and write the resolved settings.

        What a start without a checkpoint has left there is replaced.

        Raises:
            RunError: as `check_free`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock()
        try:
            self._refuse_run()
            self.remove_temporary_files()
            self.metrics.unlink(missing_ok=True)
            self.loggers.unlink(missing_ok=True)
            for own in config.code():
                write_atomically(self.path / own.path.name, own.path.read_bytes())
            write_atomically(self.config, config.kept().to_toml().encode())
        except BaseException:
            self.unlock()
            raise

    def with_own_code(
        self, config: Config, saved: Mapping[str, Any] | None, *, trust_code: bool
    ) -> Config:
        """The settings with a user's classes in the copies of their files that the run keeps.

        Args:
            config: of the run.
            saved: its checkpoint.
            trust_code: whether this process may execute the copies.

        Raises:
            RunError: a copy is missing, or is not the file that the run was started with.
        """
        hashes = {} if saved is None else saved["code"]
        for named in config.code():
            own = kept_class(self.path, named, hashes.get(named.setting), trust_code=trust_code)
            config = replace(config, **{own.setting: str(own)})
        return config

    def changes(self, config: Config, saved: Mapping[str, Any] | None) -> list[str]:
        """A remark on the settings that differ from those of the checkpoint."""
        now = plain_settings(config)
        before = now if saved is None else saved["settings"]
        changed = ", ".join(
            f"{name} {before.get(name)} to {now.get(name)}"
            for name in sorted(dict(before.items() ^ now.items()))
        )
        return [f"{self.config.name} has changed since: {changed}"] if changed else []

    def _refuse_run(self) -> None:
        """Refuse a folder with more than an unfinished start: settings that we wrote, and a log."""
        results = (self.model, self.checkpoint, self.report, self.audit)
        if os.path.lexists(self.checkpoint):
            raise RunError(
                f"{self.path}: holds a run already; continue it with --resume {self.path}, or"
                " choose another --out"
            )
        names = [path.name for path in results if os.path.lexists(path)]
        if not names and self.config.exists() and not self._has_own_config():
            names = [f"a {self.config.name} that `throughtime train` did not write"]
        if names:
            raise RunError(
                f"{self.path}: holds {', '.join(names)} and no checkpoint to continue from; choose"
                " another --out, or remove the folder"
            )

    def _has_own_config(self) -> bool:
        try:
            return self.read_config().to_toml() == self.config.read_text(encoding="utf-8")
        except (ThroughtimeError, OSError, ValueError):
            return False

    def scores(self, split: str) -> Path:
        """The scores that `eval` wrote for a split."""
        return self.path / f"scores-{split}.json"

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
        return make_config(read_toml(self.config), source=f"{self.config}: ")

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The content of the checkpoint, with tensors on the CPU; `None` before the first one.

        Raises:
            RunError: it is damaged, belongs to something else, or is lost while its model remains.
        """
        if not (os.path.lexists(self.checkpoint) or os.path.lexists(self.model)):
            return None
        content = load_checkpoint(self.checkpoint)
        counts = content.get("counts")
        kept = all(isinstance(content.get(name), dict) for name in ("code", "settings"))
        if not (kept and isinstance(counts, list) and counts):
            raise RunError(f"{self.checkpoint}: not a checkpoint of a run; {_NO_CHECKPOINT}")
        return content

    def read_metrics(self, names: Iterable[str] = ()) -> list[dict[str, Any]]:
        """The lines of the log; an incomplete last line is dropped.

        Args:
            names: the metrics that lines of training and validation must have.

        Raises:
            RunError: a complete line that `throughtime train` did not write.
        """
        return self._rows(self._complete_lines(), tuple(names))

    def _complete_lines(self) -> list[bytes]:
        try:
            return self.metrics.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"{self.metrics}: cannot be read ({error.strerror}); {_LOG}") from error

    def _rows(self, lines: Iterable[bytes], names: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                _check_row(row, names)
            except (TypeError, ValueError) as error:
                raise RunError(
                    f"{self.metrics}: line {number} is damaged ({error}); {_LOG}"
                ) from error
            rows.append(row)
        return rows

    def remove_temporary_files(self) -> None:
        """Remove files left by an interrupted write."""
        for path in self.path.glob("*.tmp"):
            path.unlink()

    def remove_scores(self) -> None:
        """Remove the scores: they become stale when training continues."""
        for path in self.path.glob("scores-*.json"):
            path.unlink()

    def restore_model(self, content: bytes | bytearray) -> None:
        """Write the model of the checkpoint if a kill or damage has left another, or none."""
        if not (self.model.is_file() and self.model.read_bytes() == content):
            write_atomically(self.model, content)

    def truncate_metrics(self, count: int) -> int:
        """Drop the lines written after the checkpoint from which the run resumes.

        Args:
            count: the lines written before it.

        Returns:
            The lines that remain: `count`, or 0 if the log was removed.

        Raises:
            RunError: some of these lines are lost or damaged.
        """
        lines = self._complete_lines()
        if not lines:
            return 0
        if len(lines) < count:
            raise RunError(
                f"{self.metrics}: has {len(lines)} complete lines, and the checkpoint was written"
                f" after {count}; {_LOG}"
            )
        self._rows(lines[:count])
        write_atomically(self.metrics, b"".join(line + b"\n" for line in lines[:count]))
        return count

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a line to the log."""
        with named_errors(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sync_metrics(self) -> None:
        """Make the lines so far durable, before a checkpoint that counts them."""
        if self.metrics.exists():
            sync(self.metrics)


def plain_settings(config: Config) -> dict[str, str]:
    """The settings as a checkpoint keeps them, in JSON."""
    return {name: json.dumps(value) for name, value in config.kept().settings().items()}


def _check_row(row: Any, names: Iterable[str]) -> None:
    """Refuse what is no line of the log, with these metrics.

    Raises:
        TypeError, ValueError: what is wrong with it.
    """
    kind = row.get("kind") if isinstance(row, dict) else None
    if kind not in _LINES:
        raise ValueError(f"expected an object whose 'kind' is one of {', '.join(_LINES)}")
    metrics = dict.fromkeys(names, _NUMBER)
    _check_types(row, _COMMON | _LINES[kind] | (metrics if kind != "data" else {}))
    for name, scores in row["recordings"].items() if kind == "valid" else ():
        if not isinstance(scores, dict):
            raise TypeError(f"expected the metrics of recording '{name}', got {scores!r}")
        _check_types(scores, metrics)


def _check_types(values: dict[str, Any], types: Mapping[str, Any]) -> None:
    for name, kind in types.items():
        value = values.get(name)
        if not isinstance(value, kind):
            raise TypeError(f"'{name}' is {'missing' if name not in values else repr(value)}")


def json_safe(value: Any) -> Any:
    """The value with `None` for floats that are not finite, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: Any, value: Any) -> Any:
    """The value of a type of which JSON keeps the plain values, as `dataclasses.asdict` has them.

    Fields that JSON lacks get their defaults; a number that it cannot express is read as infinite.

    Args:
        kind: a dataclass, a named tuple, or a type of their fields.
        value: as `json.loads` returns it.

    Raises:
        TypeError: a value of another type, or a field without a default that is missing.
        ValueError: a named tuple with more or fewer values.
    """
    origin, options = get_origin(kind), get_args(kind)
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields"):
        types = get_type_hints(kind)
        values = value if isinstance(value, dict) else dict(zip(types, value, strict=True))
        known = types.keys() & values.keys()
        return kind(**{name: from_plain(types[name], values[name]) for name in known})
    if origin is tuple and isinstance(value, list):
        return tuple(from_plain(options[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {options[0](key): from_plain(options[1], item) for key, item in value.items()}
    if NoneType in options:
        return None if value is None else from_plain(options[0], value)
    if kind is float and value is None:
        return math.inf
    fits = (
        value in options
        if origin is Literal
        else type(value) in ({kind, int} if kind is float else {kind, *options})
    )
    if not fits:
        raise TypeError(f"{value!r} is not of the type {kind}")
    return value


def load_tensors(path: Path, kind: str, hint: str) -> tuple[Any, dict[str, Tensor]]:
    """The description and the tensors of a file of this kind.

    Raises:
        RunError: no such file, a damaged one, or one of another kind; `hint` says what to do.
    """
    try:
        return _safetensors.read_tensors(path, kind)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); {hint}") from error
    except ValueError as error:
        raise RunError(f"{path}: {error}; {hint}") from error


def checkpoint_bytes(content: Mapping[str, Any]) -> bytes | bytearray:
    """The content of a checkpoint file."""
    tensors: dict[str, Tensor] = {}
    description = _flatten(content, tensors)
    return _safetensors.to_bytes(_CHECKPOINT, description, tensors)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a file of `checkpoint_bytes`, with tensors on the CPU.

    Raises:
        RunError: no such file, or one that is no checkpoint.
    """
    plan, tensors = load_tensors(path, _CHECKPOINT, _NO_CHECKPOINT)
    unused = set(tensors)
    try:
        content = _unflatten(plan, tensors, unused)
        if not isinstance(content, dict):
            raise TypeError(f"expected a dict, got {content!r:.40}")
        if unused:
            raise ValueError(f"tensor '{min(unused)}' belongs to no value")
    except (TypeError, ValueError, KeyError) as error:
        raise RunError(
            f"{path}: not what `throughtime train` wrote ({error!r}); {_NO_CHECKPOINT}"
        ) from error
    return content


def to_cpu(content: Any) -> Any:
    """The content with its tensors copied to the CPU, to be sent to another process."""
    return map_tensors(_copy, content)


def _copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU in memory of its own: safetensors refuses tensors that share memory."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _flatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON, each tensor replaced by its number.

    JSON has no tuples, and only text as keys.
    """
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = _copy(value)
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[_flatten(k, tensors), _flatten(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_flatten(v, tensors) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise RunError(
        f"a checkpoint cannot hold a {type(value).__name__}; expected tensors and plain values"
    )


def _unflatten(plan: Any, tensors: dict[str, Tensor], unused: set[str]) -> Any:
    if not isinstance(plan, dict):
        return plan
    ((kind, content),) = plan.items()
    if kind == "tensor":
        unused.discard(content)
        # A copy in torch's own memory: the alignment of a tensor decides how a kernel rounds, and
        # a resumed run must round as before.
        return tensors[content].clone()
    if kind == "dict":
        return {_unflatten(k, tensors, unused): _unflatten(v, tensors, unused) for k, v in content}
    items = [_unflatten(v, tensors, unused) for v in content]
    return tuple(items) if kind == "tuple" else items
