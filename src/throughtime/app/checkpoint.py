"""A checkpoint is one file: any nesting of plain values and tensors, as safetensors and JSON, no pickle."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from throughtime.app import tensors as files
from throughtime.errors import RunError

_KIND = "throughtime.checkpoint/1"


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Writes the content: to a temporary file, synced, then renamed over the previous checkpoint."""
    tensors: dict[str, Tensor] = {}
    plan = _packed(content, tensors)
    files.write(path, _KIND, plan, tensors)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content as it was saved, tensors on the CPU.

    Raises:
        RunError: no such file, or one that is no checkpoint.
    """
    return _unpacked(
        *files.read(
            path, _KIND, "no checkpoint to go on from; begin the run again with another --out"
        )
    )


def copied(content: Any) -> Any:
    """The content with its tensors copied to the CPU, each into memory of its own, to be sent to another process."""
    if isinstance(content, Tensor):
        return content.detach().cpu().clone(memory_format=torch.contiguous_format)
    if isinstance(content, dict):
        return {key: copied(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(copied(value) for value in content)
    return content


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON, each tensor replaced by its number.

    JSON has no tuples and no keys but text.
    """
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy of its own: safetensors refuses tensors that share memory, as the two states of a
        # policy may.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_packed(k, tensors), _packed(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(v, tensors) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise RunError(
        f"a checkpoint cannot hold a {type(value).__name__}; expected tensors and plain values"
    )


def _unpacked(plan: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(plan, dict):
        return plan
    ((kind, content),) = plan.items()
    if kind == "tensor":
        # A copy in torch's own memory: where a tensor lies decides how a kernel rounds, and a
        # resumed run must round alike.
        return tensors[content].clone()
    if kind == "dict":
        return {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in content}
    items = [_unpacked(v, tensors) for v in content]
    return tuple(items) if kind == "tuple" else items
