"""The log of a run in TensorBoard, beside its own metrics.jsonl."""

import re
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from throughtime.errors import MissingExtraError


@contextmanager
def tensorboard(
    folder: Path, settings: Mapping[str, Any], step: int
) -> Generator[Callable[[Mapping[str, Any]], None]]:
    """Event files in the folder `tensorboard` of a run; what opens gets its log line by line.

    The numbers of a line are `train/loss` or `valid/f1/beat`, at their update. After a failure,
    such as of a full disk, lines are left out, with a warning.

    Args:
        folder: of the run.
        settings: plain values by name.
        step: update of the first line; readers drop lines of it and later ones that are there.
    """
    writer: Any = summary_writer()(str(folder / "tensorboard"), purge_step=step)
    writer.add_text("settings", "\n".join(f"    {k}: {v}" for k, v in settings.items()), step)

    def log(row: Mapping[str, Any]) -> None:
        try:
            for name, value in row.items():
                if isinstance(value, (int, float)):
                    writer.add_scalar(_tag(row["kind"], name), value, row["update"])
            writer.flush()
        except OSError as error:
            warnings.warn(
                f"--logger tensorboard failed ({error}); the run goes on, and metrics.jsonl has"
                " all lines",
                stacklevel=2,
            )

    with writer:
        yield log


def summary_writer() -> Any:
    """The writer of torch.

    Raises:
        MissingExtraError: the package is missing; with the line that installs it.
    """
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "--logger tensorboard needs tensorboard; pip install 'throughtime[tensorboard]'"
        ) from error
    return SummaryWriter


def _tag(kind: str, name: str) -> str:
    """The name of a number in characters that TensorBoard accepts.

    Example:
        >>> _tag("valid", "f1[beat]"), _tag("train", "lr")
        ('valid/f1/beat', 'train/lr')
    """
    return f"{kind}/" + re.sub(r"[^\w./ -]", "_", name.replace("[", "/").removesuffix("]"))
