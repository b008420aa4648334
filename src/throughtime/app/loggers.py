"""Loggers of a run beside its own metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

Each gets the numbers of every log line, as `train/loss` or `valid/f1/beat`, at its update. A run
that is resumed continues in the same place: `loggers.json` in the run folder has the ids. Nothing
needs a network: TensorBoard writes files, Weights & Biases is offline without a key, and MLflow
uses the store of `MLFLOW_TRACKING_URI`, or a local one.
"""

import importlib
import json
import netrc
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast
from urllib.parse import urlparse

from throughtime._files import write_atomically
from throughtime.errors import MissingExtraError, RunError

Status: TypeAlias = Literal["finished", "stopped", "failed"]
_PROJECT = "throughtime"


@dataclass(frozen=True)
class LoggedRun:
    """What a logger needs to begin, or to continue.

    Attributes:
        folder: of the run.
        settings: plain values by name.
        step: updates so far; lines of later ones are to be replaced.
        id: what `start` returned when the run began; `None` for a new one.
    """

    folder: Path
    settings: Mapping[str, Any]
    step: int
    id: str | None


class Logger(Protocol):
    """Where the numbers of a run go."""

    def start(self, run: LoggedRun) -> str:
        """Begin or continue; return the id by which to continue."""
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values of a log line by name."""
        ...

    def finish(self, status: Status) -> None:
        """End; a stopped run may continue later."""
        ...


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    _writer: Any

    def start(self, run: LoggedRun) -> str:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = run.folder / "tensorboard"
        # readers drop what an interrupted process wrote from this step on
        purge = None if run.id is None else run.step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)
        if run.id is None:
            rows = "\n".join(f"| {key} | {value} |" for key, value in run.settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)
        return folder.name

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: Status) -> None:
        del status
        self._writer.close()


class WandB:
    """A run of Weights & Biases, with its files in the folder `wandb` of the run."""

    _run: Any

    def start(self, run: LoggedRun) -> str:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.folder.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
            mode=os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _has_wandb_key() -> bool:
    """Whether `wandb login` was run, or a variable has the key; asking wandb would prompt."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    with suppress(OSError, netrc.NetrcParseError):
        if host and netrc.netrc().authenticators(host):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


class MLflow:
    """A run of the experiment `throughtime`, or of `MLFLOW_EXPERIMENT_NAME`."""

    _client: Any
    _id: str

    def start(self, run: LoggedRun) -> str:
        entities: Any = importlib.import_module("mlflow.entities")
        self._client = client = importlib.import_module("mlflow").MlflowClient()
        if run.id is not None:
            client.update_run(run.id, status="RUNNING")
            self._id = run.id
            return self._id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = client.create_run(number, run_name=run.folder.name).info.run_id
        settings = [entities.Param(key, str(value)) for key, value in run.settings.items()]
        client.log_batch(self._id, params=settings)
        return self._id

    def log(self, values: Mapping[str, float], step: int) -> None:
        metric: Any = importlib.import_module("mlflow.entities").Metric
        now = int(1000 * time.time())
        metrics = [metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, status: Status) -> None:
        names = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._id, names[status])


_LOGGERS: dict[str, Callable[[], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


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


class Loggers:
    """The loggers of a run. One that fails during the run is left out from then on, with a warning.

    Args:
        names: of the loggers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._active: dict[str, Logger] = {}

    def start(self, path: Path, settings: Mapping[str, Any], step: int) -> None:
        """Begin, or continue.

        Args:
            path: the file of the ids, in the folder of the run.
            settings: plain values by name.
            step: updates so far.

        Raises:
            RunError: a logger cannot begin.
        """
        folder, ids = path.parent, _read_ids(path)
        for name in self._names:
            logger = _LOGGERS[name]()
            try:
                ids[name] = logger.start(LoggedRun(folder, settings, step, ids.get(name)))
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0]
                raise RunError(
                    f"--logger {name} cannot start ({type(error).__name__}: {reason}); the ids of"
                    f" a run that continues are in {path}. Mend it, or leave the logger out"
                ) from error
            self._active[name] = logger
        if ids:
            write_atomically(path, json.dumps(ids, indent=1).encode())

    def log(self, kind: str, row: Mapping[str, Any], step: int) -> None:
        """Add the numbers of a log line of this kind."""
        values = {
            _tag(kind, name): float(value)
            for name, value in row.items()
            if isinstance(value, (int, float))
        }
        for name in tuple(self._active):
            self._attempt(name, lambda logger: logger.log(values, step))

    def finish(self, status: Status) -> None:
        """End all."""
        for name in tuple(self._active):
            self._attempt(name, lambda logger: logger.finish(status))
        self._active.clear()

    def _attempt(self, name: str, work: Callable[[Logger], None]) -> None:
        """Call a logger, which must not end a run."""
        try:
            work(self._active[name])
        except Exception as error:  # noqa: BLE001 (a server that is gone, a full disk, ...)
            del self._active[name]
            warnings.warn(
                f"--logger {name} failed ({type(error).__name__}: {error}); the run goes on without"
                " it, and metrics.jsonl has all lines",
                stacklevel=2,
            )


def _tag(kind: str, name: str) -> str:
    """The name of a number in characters that all loggers accept.

    Example:
        >>> _tag("valid", "f1[beat]"), _tag("train", "lr")
        ('valid/f1/beat', 'train/lr')
    """
    return f"{kind}/" + re.sub(r"[^\w./ -]", "_", name.replace("[", "/").removesuffix("]"))


def _read_ids(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read ({error}); remove it to begin new logs") from error
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise RunError(f"{path}: is not what train wrote; remove it to begin new logs")
    return cast("dict[str, str]", content)
