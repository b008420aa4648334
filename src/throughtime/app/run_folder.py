"""The folder of a run: its files, and how models and checkpoints are stored in them.

Models and checkpoints are safetensors files with a description in JSON, no pickle. A checkpoint
holds any nesting of plain values and tensors.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from throughtime._files import write_atomically
from throughtime.app.config import Config, make_config, read_toml
from throughtime.errors import RunError
from throughtime.state import map_tensors

_CHECKPOINT = "throughtime.checkpoint/1"


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
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.model = path / "model.safetensors"
        self.checkpoint = path / "checkpoint.safetensors"
        self.metrics = path / "metrics.jsonl"
        self.report = path / "report.html"
        self.audit = path / "audit.json"

    @classmethod
    def check_free(cls, config: Config) -> "RunFolder":
        """The folder that a new run will have.

        Raises:
            RunError: it holds a run already, or is a file.
        """
        folder = cls(Path(config.out))
        if folder.path.exists() and not folder.path.is_dir():
            raise RunError(f"{folder.path}: is a file; choose another --out")
        if folder.config.exists():
            raise RunError(
                f"{folder.path}: holds a run already; continue it with --resume {folder.path}, or"
                " choose another --out"
            )
        return folder

    @classmethod
    def create(cls, config: Config) -> "RunFolder":
        """Create the folder and write the resolved settings."""
        folder = cls.check_free(config)
        write_atomically(folder.config, config.to_toml().encode())
        return folder

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
        return make_config(read_toml(self.config), source=str(self.config))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of the log; an incomplete last line is dropped."""
        if not self.metrics.is_file():
            return []
        lines = self.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def remove_temporary_files(self) -> None:
        """Remove files left by an interrupted write."""
        for path in self.path.glob("*.tmp"):
            path.unlink()

    def remove_scores(self) -> None:
        """Remove the scores: they become stale when training continues."""
        for path in self.path.glob("scores-*.json"):
            path.unlink()

    def truncate_metrics(self, count: int) -> None:
        """Drop the lines written after the checkpoint from which the run resumes."""
        if self.metrics.is_file():
            lines = self.metrics.read_bytes().splitlines(keepends=True)
            write_atomically(self.metrics, b"".join(lines[:count]))

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append a line to the log."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def from_plain(kind: Any, value: Any) -> Any:
    """The value of a type of which JSON keeps the plain values, as `dataclasses.asdict` has them.

    Fields that JSON lacks get their defaults; a number that it cannot express is read as infinite.

    Args:
        kind: a dataclass, a named tuple, or a type of their fields.
        value: as `json.loads` returns it.
    """
    origin, options = get_origin(kind), get_args(kind)
    if hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields"):
        types = get_type_hints(kind)
        values = value if isinstance(value, dict) else dict(zip(types, value, strict=True))
        known = types.keys() & values.keys()
        return kind(**{name: from_plain(types[name], values[name]) for name in known})
    if origin is tuple:
        return tuple(from_plain(options[0], item) for item in value)
    if origin is dict:
        return {options[0](key): from_plain(options[1], item) for key, item in value.items()}
    if NoneType in options:
        return None if value is None else from_plain(options[0], value)
    return math.inf if kind is float and value is None else value


def save_tensors(path: Path, kind: str, description: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a description to a file of this kind, whole or not at all.

    `kind` is the only key of the metadata, since safetensors writes several keys in any order.
    """
    metadata = {kind: json.dumps(description)}
    write_atomically(path, safetensors.torch.save(dict(tensors), metadata=metadata))


def load_tensors(path: Path, kind: str, hint: str) -> tuple[Any, dict[str, Tensor]]:
    """The description and the tensors of a file of this kind.

    Raises:
        RunError: no such file, an unreadable one (`hint` says what that may mean), or one of
            another kind.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            names: list[str] = file.keys()
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    except (OSError, safetensors.SafetensorError) as error:
        raise RunError(f"{path}: cannot be read ({error}); {hint}") from error
    if kind not in metadata:
        what = kind.split(".")[1].split("/", maxsplit=1)[0]
        raise RunError(f"{path}: not a {what} that `throughtime train` wrote")
    return json.loads(metadata[kind]), tensors


def save_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    """Write the content to a temporary file, sync it, rename it over the previous checkpoint."""
    tensors: dict[str, Tensor] = {}
    description = _flatten(content, tensors)
    save_tensors(path, _CHECKPOINT, description, tensors)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content that `save_checkpoint` wrote, with tensors on the CPU.

    Raises:
        RunError: no such file, or one that is no checkpoint.
    """
    hint = "no checkpoint to go on from; begin the run again with another --out"
    return _unflatten(*load_tensors(path, _CHECKPOINT, hint))


def to_cpu(content: Any) -> Any:
    """The content with its tensors copied to the CPU, to be sent to another process."""
    return map_tensors(lambda _, tensor: _copy(tensor), content)


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


def _unflatten(plan: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(plan, dict):
        return plan
    ((kind, content),) = plan.items()
    if kind == "tensor":
        # A copy in torch's own memory: the alignment of a tensor decides how a kernel rounds, and
        # a resumed run must round as before.
        return tensors[content].clone()
    if kind == "dict":
        return {_unflatten(k, tensors): _unflatten(v, tensors) for k, v in content}
    items = [_unflatten(v, tensors) for v in content]
    return tuple(items) if kind == "tuple" else items
