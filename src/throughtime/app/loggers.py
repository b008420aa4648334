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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlparse

from pydantic import TypeAdapter

from throughtime._files import write_atomically
from throughtime.errors import MissingExtraError, RunError, one_line

Settings: TypeAlias = Mapping[str, Any]
Status: TypeAlias = Literal["finished", "stopped", "failed"]
_PROJECT = "throughtime"


class TensorBoard:
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, settings: Settings, step: int, name: str | None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.id = "tensorboard"
        # readers drop what an interrupted process wrote from this step on
        purge: Any = None if name is None else step + 1
        self._writer: Any = SummaryWriter(str(folder / self.id), purge_step=purge)
        if name is None:
            rows = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, _: Status) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, with its files in the folder `wandb` of the run."""

    def __init__(self, folder: Path, settings: Settings, step: int, name: str | None) -> None:
        del step
        wandb = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.name,
            id=name,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.id = str(self._run.id)

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

    def __init__(self, folder: Path, settings: Settings, step: int, name: str | None) -> None:
        del step
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = client = importlib.import_module("mlflow").MlflowClient()
        if name is not None:
            client.update_run(name, status="RUNNING")
            self.id = name
            return
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = client.get_experiment_by_name(title)
        number = client.create_experiment(title) if experiment is None else experiment.experiment_id
        self.id = client.create_run(number, run_name=folder.name).info.run_id
        params = [self._entities.Param(key, str(value)) for key, value in settings.items()]
        client.log_batch(self.id, params=params)

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def finish(self, status: Status) -> None:
        names = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self.id, names[status])


_LOGGERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


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
        path: the file of the ids by which they continue, in the folder of the run.
        settings: plain values by name.
        step: updates so far; lines of later ones are replaced.

    Raises:
        RunError: a logger cannot begin.
    """

    def __init__(self, names: Sequence[str], path: Path, settings: Settings, step: int) -> None:
        ids = _read_ids(path) if names else {}
        self._active: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            try:
                logger = _LOGGERS[name](path.parent, settings, step, ids.get(name))
            except Exception as error:
                raise RunError(
                    f"--logger {name} cannot start ({type(error).__name__}: {one_line(error)}); the"
                    f" ids of a run that continues are in {path}. Mend it, or leave the logger out"
                ) from error
            self._active[name], ids[name] = logger, logger.id
        if names:
            write_atomically(path, json.dumps(ids, indent=1).encode())

    def log(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a log line."""
        numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
        values = {_tag(row["kind"], name): float(value) for name, value in numbers.items()}
        self._call("log", values, row["update"])

    def finish(self, status: Status) -> None:
        """End all."""
        self._call("finish", status)
        self._active.clear()

    def _call(self, method: str, *arguments: Any) -> None:
        """Call the loggers, none of which must end a run."""
        for name, logger in list(self._active.items()):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:  # noqa: BLE001 (a server that is gone, a full disk, ...)
                del self._active[name]
                warnings.warn(
                    f"--logger {name} failed ({type(error).__name__}: {error}); the run goes on"
                    " without it, and metrics.jsonl has all lines",
                    stacklevel=3,
                )


def _tag(kind: str, name: str) -> str:
    """The name of a number in characters that all loggers accept.

    Example:
        >>> _tag("valid", "f1[beat]"), _tag("train", "lr")
        ('valid/f1/beat', 'train/lr')
    """
    return f"{kind}/" + re.sub(r"[^\w./ -]", "_", name.replace("[", "/").removesuffix("]"))


def _read_ids(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        return TypeAdapter(dict[str, str]).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}: is not what train wrote ({one_line(error)}); remove it to begin new logs"
        ) from error
