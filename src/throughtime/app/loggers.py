"""Loggers of a run beside its own metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each gets the numbers of every log line, as `train/loss` or `valid/f1/beat`, at its update. It is a
context that opens with a function of the update and the numbers. TensorBoard writes files into the
run folder; the other two are configured by their own environment variables, and a resumed run is
a new run there, of the same name.
"""

import importlib
import os
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from throughtime.errors import MissingExtraError, RunError, one_line

Log: TypeAlias = Callable[[int, dict[str, float]], object]
_PROJECT = "throughtime"


@contextmanager
def _tensorboard(folder: Path, settings: Mapping[str, Any], step: int) -> Generator[Log]:
    """Event files in the folder `tensorboard` of the run."""
    from torch.utils.tensorboard.writer import SummaryWriter

    # readers drop what an interrupted process wrote from this step on
    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
    rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", step)

    def log(update: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, update)
        writer.flush()

    with writer:
        yield log


@contextmanager
def _wandb(folder: Path, settings: Mapping[str, Any], step: int) -> Generator[Log]:
    """A run of the project `throughtime`, or of `WANDB_PROJECT`."""
    del step
    wandb: Any = importlib.import_module("wandb")
    with wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=folder.name,
        dir=str(folder),
        config=dict(settings),
        settings=wandb.Settings(silent=True, console="off"),
    ) as run:
        yield lambda update, values: run.log(values, step=update)


@contextmanager
def _mlflow(folder: Path, settings: Mapping[str, Any], step: int) -> Generator[Log]:
    """A run of the experiment `throughtime`, or of `MLFLOW_EXPERIMENT_NAME`."""
    del step
    mlflow: Any = importlib.import_module("mlflow")
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT))
    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params(settings)
        yield lambda update, values: mlflow.log_metrics(values, step=update)


_LOGGERS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def check_installed(names: Sequence[str]) -> None:
    """Refuse a logger whose package is missing.

    Raises:
        MissingExtraError: the package, and the line that installs it.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"--logger {name} needs {name}; pip install 'throughtime[{name}]'"
            ) from error


@contextmanager
def loggers(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any], step: int
) -> Generator[Callable[[Mapping[str, Any]], None]]:
    """Open the loggers of a run, which get its log line by line.

    One that fails during the run is left out from then on, with a warning.

    Args:
        names: of the loggers.
        folder: of the run.
        settings: plain values by name.
        step: update of the first line; lines of it and later ones are replaced.

    Raises:
        RunError: a logger cannot begin.
    """
    with ExitStack() as stack:
        active = dict[str, Log]()
        for name in dict.fromkeys(names):
            context = _LOGGERS[name](folder, settings, step)
            try:
                active[name] = context.__enter__()
            except Exception as error:
                raise RunError(
                    f"--logger {name} cannot start ({type(error).__name__}: {one_line(error)});"
                    " mend it, or leave the logger out"
                ) from error
            stack.push(partial(_close, name, context))

        def log(row: Mapping[str, Any]) -> None:
            numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
            values = {_tag(row["kind"], name): float(value) for name, value in numbers.items()}
            for name in [*active]:
                write = active.pop(name)
                with _failure_as_warning(name):
                    write(row["update"], values)
                    active[name] = write

        yield log


def _close(name: str, context: AbstractContextManager[Log], *failure: Any) -> None:
    with _failure_as_warning(name):
        context.__exit__(*failure)


@contextmanager
def _failure_as_warning(name: str) -> Generator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 (a server that is gone, a full disk, ...)
        warnings.warn(
            f"--logger {name} failed ({type(error).__name__}: {error}); the run goes on without"
            " it, and metrics.jsonl has all lines",
            stacklevel=3,
        )


def _tag(kind: str, name: str) -> str:
    """The name of a number in characters that all loggers accept.

    Example:
        >>> _tag("valid", "f1[beat]"), _tag("train", "lr")
        ('valid/f1/beat', 'train/lr')
    """
    return f"{kind}/" + re.sub(r"[^\w./ -]", "_", name.replace("[", "/").removesuffix("]"))
