"""A safetensors file with a description in JSON: what models and checkpoints are written as."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from throughtime._files import write_atomically
from throughtime.errors import RunError


def write(path: Path, kind: str, description: Any, tensors: Mapping[str, Tensor]) -> None:
    """Writes the file whole or not at all.

    `kind` is the only key of the metadata, since safetensors writes several in any order.
    """
    write_atomically(
        path, safetensors.torch.save(dict(tensors), metadata={kind: json.dumps(description)})
    )


def read(path: Path, kind: str, missing: str) -> tuple[Any, dict[str, Tensor]]:
    """The description and the tensors of a file of this kind.

    Raises:
        RunError: no such file, one that cannot be read (`missing` says what that may mean), or one
            of another kind.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            # no mapping
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise RunError(f"{path}: cannot be read ({error}); {missing}") from error
    if kind not in metadata:
        raise RunError(
            f"{path}: not a {kind.split('.')[1].split('/', maxsplit=1)[0]} that `throughtime train`"
            " wrote"
        )
    return json.loads(metadata[kind]), tensors
