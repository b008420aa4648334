"""Training a run: from settings to a model, resumable to the bit at any moment.

Shapes: `T` steps, `B` lanes.
"""

import math
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from throughtime._device import seed_generators
from throughtime._files import write_atomically, write_together
from throughtime.app import training_state
from throughtime.app.config import Config
from throughtime.app.dataset import Dataset, idle_remarks, open_dataset, training_stream
from throughtime.app.distributed import Team
from throughtime.app.evaluate import evaluate_recordings
from throughtime.app.load import resolve_task, task_remark
from throughtime.app.loggers import Loggers, Status, check_installed
from throughtime.app.model import (
    MODEL_ARGUMENTS,
    build_model,
    check_device,
    check_memory,
    make_loss,
    model_bytes,
    own_class,
    prepare_own,
    set_statistics,
)
from throughtime.app.optimizer import make_optimizer, make_schedule
from throughtime.app.policy import make_policy, resolve_gradient, updates_per_epoch
from throughtime.app.recordings import OnPhase
from throughtime.app.run_folder import RunFolder, checkpoint_bytes
from throughtime.app.selection import NOT_VALIDATED, ModelSelection, selection_score
from throughtime.app.user_class import remember
from throughtime.carry.carried import device_of
from throughtime.distributed import RankError
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.evaluation import Evaluator
from throughtime.gradient import Update
from throughtime.metrics import Metrics
from throughtime.updates import Updates, updates

_LOG_LINES = 200  # of a run
_FIRST_SAVE = 1.0  # seconds of a run until its first checkpoint


@dataclass(frozen=True)
class TrainProgress:
    """A line of the log: what the progress display shows.

    `metrics` are those of the last update; `waiting` is the share of the time spent waiting for
    data. Speed and remaining time leave out validation and checkpoints.
    """

    update: int
    updates: int
    loss: float
    metrics: Metrics
    frames_per_second: float
    remaining_seconds: float
    peak_memory: int | None
    waiting: float = 0.0


class Training:
    """A run in progress. Iterate `run()`; at every `TrainProgress` a caller may print or stop.

    Each rank has its own, and all of them do the same; only the first writes the folder.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        folder: RunFolder,
        team: Team,
        on_phase: OnPhase | None = None,
    ) -> None:
        self.config, self.folder, self.team, self._on_phase = config, folder, team, on_phase
        seed_generators(config.seed, torch.device(config.device))
        self.code = {own.setting: own.sha256() for own in config.code()}
        own = own_class(config)
        check_memory(dataset.spec, config.device)
        self.net = build_model(dataset.spec, own)
        set_statistics(self.net, dataset.statistics)
        self.net.to(config.device)
        if own is not None:
            prepare_own(self.net, dataset.spec)
        self.device = device_of(self.net)
        self.optimizer, self.lr = make_optimizer(self.net, config), config.lr
        self.loss_fn = make_loss(dataset.spec, self.net, config.loss)
        self.stream = training_stream(dataset, config, team.count)
        idle = sum(team.gather(self.stream.idle_steps)) / (self.stream.steps * config.lanes)
        self.policy = make_policy(config)
        self.count = self.rows = self.frames = 0
        self.seconds = self._overhead = self._waited = 0.0
        self.epoch_updates = updates_per_epoch(self.policy, self.stream, team.count)
        # By epochs an estimate, since the order of recordings moves an epoch's end.
        self.total = config.updates or (config.epochs or 1) * self.epoch_updates
        self.schedule = make_schedule(self.optimizer, config, self.total)
        self._valid_every = config.valid_every
        if self._valid_every is None:
            self._valid_every = max(1, self.total // 5)
        validates = bool(dataset.valid) and self._valid_every > 0
        self.selection = ModelSelection.from_config(config, validates=validates)
        remarks = [*dataset.remarks, *idle_remarks(idle)]
        if config.keep == "best" and not validates:
            remarks.append(NOT_VALIDATED)
        self.dataset = replace(dataset, remarks=tuple(remarks))
        self.finished = self.stopping = self.resumed = False
        self._updates: Updates | None = None
        self._loss_sum = torch.zeros((), dtype=dataset.spec.torch_dtype, device=config.device)
        self._loss_steps = 0
        self._loggers = Loggers(config.logger if team.is_first else ())

    @classmethod
    def begin(
        cls, config: Config, team: Team | None = None, on_phase: OnPhase | None = None
    ) -> "Training":
        """A new run in a new folder.

        Args:
            config: its settings.
            team: the ranks that train it; default: this process.
            on_phase: called as data are read and evaluated.

        Raises:
            RunError: the folder holds a run already.
            DataError, ConfigError: what is wrong with data or settings.
        """
        team = team or Team()
        data = str(Path(config.data).resolve())
        own = replace(config, data=data)
        resolved = team.on_all(lambda: resolve_task(resolve_gradient(_trusted(own)), on_phase))
        team.check_equal(_shared_settings(resolved))
        folder = RunFolder(Path(resolved.out))
        team.on_first(lambda: check_installed(resolved.logger))
        team.on_first(folder.check_free)
        reason = (task_remark(resolved),) if config.task is None else ()

        def start() -> "Training":
            dataset = _open(resolved, on_phase)
            dataset = replace(dataset, remarks=(*reason, *dataset.remarks))
            return cls(resolved, dataset, folder, team, on_phase)

        training = team.on_all(start)
        team.check_equal(training.dataset.checksums())
        team.on_first(lambda: folder.create(resolved))
        team.on_first(lambda: remember(resolved.code()))
        return training

    @classmethod
    def resume(
        cls,
        path: Path,
        *,
        updates: int | None = None,
        epochs: int | None = None,
        trust_code: bool = False,
        team: Team | None = None,
        on_phase: OnPhase | None = None,
    ) -> "Training":
        """The run in a folder, at its last checkpoint; at its start if it has none.

        Args:
            path: the folder.
            updates: another end of the run; a finished run trains on. A run that has as many
                already stays as it is, its settings too.
            epochs: the same, in epochs.
            trust_code: execute the user's files that the run keeps, though this user has not
                trained with them.
            team: as many ranks as wrote the checkpoint; default: this process.
            on_phase: called as data are read and evaluated.

        Raises:
            RunError: the folder holds no run, one of another number of ranks, or code that is not
                trusted.
            DataError: the data have changed since the run was started.
        """
        team, folder = team or Team(), RunFolder(path)
        further = updates is not None or epochs is not None

        def load() -> "Training":
            started_with, saved = folder.read_config(), folder.read_checkpoint()
            config = folder.with_own_code(started_with, saved, trust_code=trust_code)
            if further:
                config = replace(config, updates=updates, epochs=epochs)
            at = "the start" if saved is None else f"update {saved['counts'][0]}"
            team.check_equal({**_shared_settings(config), "the checkpoint of the run": at})
            dataset = _open(config, on_phase)
            remarks = (*dataset.remarks, *folder.changes(started_with, saved))
            training = cls(config, replace(dataset, remarks=remarks), folder, team, on_phase)
            training.resumed = True
            team.check_equal(training.dataset.checksums())
            if saved is not None:
                training_state.restore(training, saved)
            if further:
                training.selection.stale = 0
                training.finished = training._is_over()
            return training

        def tidy() -> int:
            folder.remove_temporary_files()
            rows = folder.truncate_metrics(training.rows)
            if folder.checkpoint.exists():
                folder.restore_model(training._model())
            if further and not training.finished:
                longer = replace(folder.read_config(), updates=updates, epochs=epochs)
                write_atomically(folder.config, longer.to_toml().encode())
            return rows

        def lock() -> None:
            check_installed(folder.read_config().logger)
            folder.lock()

        try:
            team.on_first(lock)
            training = team.on_all(load)
            training.rows = team.on_first(tidy)
        except BaseException:
            folder.unlock()
            raise
        return training

    @property
    def waiting(self) -> float:
        """The share of the time so far that was spent waiting for data."""
        return (self._waited + self.stream.wait_seconds) / self.seconds if self.seconds else 0.0

    @property
    def training_seconds(self) -> float:
        """The time so far without validation and checkpoints."""
        return self.seconds - self._overhead

    def stop(self) -> None:
        """Make `run` save and return after the current update; safe in a signal handler."""
        self.stopping = True

    def run(self) -> Iterator[TrainProgress]:
        """Train to the end, or until `stop`: log, validate, save; yield each line of the log."""
        status: Status = "stopped"
        try:
            if not self.finished:
                yield from self._run()
            status = "finished" if self.finished else "stopped"
        except Exception:
            status = "failed"
            raise
        finally:
            self._loggers.finish(status)
            self.folder.unlock()

    def _run(self) -> Iterator[TrainProgress]:
        self._begin_log()
        started, saved = time.monotonic() - self.seconds, time.monotonic()
        log_every = max(1, self.total // _LOG_LINES)
        for update in self._all_updates():
            self._apply(update)
            self.seconds = time.monotonic() - started
            if self.count % log_every == 0:
                yield self._log(update)
            due = self._valid_every and self.count % self._valid_every == 0
            if due and self.count < self.total:
                self._log_validation()
            due = time.monotonic() - saved >= self._save_interval()
            stop, save = self.team.any_of(self.stopping, self.team.is_first and due)
            if stop or save:
                self.save()
                saved = time.monotonic()
            if stop:
                return
        self.save()
        if self.selection.last < self.count:
            self._log_validation()
        self.finished = True
        self.save()

    def _save_interval(self) -> float:
        """Seconds between two checkpoints: half as long as the run so far, up to the setting.

        So a kill soon after the start loses a second, or a third of the run.
        """
        return min(self.config.checkpoint_every, max(_FIRST_SAVE, self.seconds / 2))

    def _begin_log(self) -> None:
        self.team.on_first(self.folder.remove_scores)
        self.team.on_first(
            lambda: self._loggers.start(self.folder.loggers, self.config.settings(), self.count)
        )
        if not self.rows:
            self.team.on_first(lambda: self._write("data", **self.dataset.facts()))
            self.rows += 1

    def _all_updates(self) -> Iterator[Update]:
        """Epoch after epoch until the run is over; each starts from the initial state."""
        epoch = self._updates
        while not self._is_over():
            epoch = self._updates = epoch or self._new_updates(self._updates)
            while (update := self._next(epoch)) is not None:
                yield update
                if self._is_over():
                    return
            if self.count == 0:
                cause = f"--warm-up {self.config.warm_up} or missing targets mask all of them"
                self.team.raise_together(
                    DataError(f"an epoch passed without a single step that counts: {cause}")
                )
            epoch = None

    def _new_updates(self, previous: Updates | None = None) -> Updates:
        """The updates of the next epoch; the policy may learn from epoch to epoch."""
        state = None if previous is None else previous.policy_state
        return updates(
            self.net, self.stream, self.loss_fn, gradient=self.policy, policy_state=state
        )

    def _next(self, epoch: Updates) -> Update | None:
        """The next update of the epoch; an error on one rank ends all of them here."""
        try:
            return next(epoch, None)
        except Exception as error:
            shown = error
            if isinstance(error, RunError):  # such as a gradient that is not finite
                shown = self._diverged(self.count + 1, str(error))
                shown.__cause__ = error
            self.team.raise_together(None if isinstance(error, RankError) else shown)
            self.team.raise_together(error)  # every rank has a RankError: they differ
            raise

    @property
    def stopped_early(self) -> bool:
        """Whether the patience has ended before the run."""
        return self.finished and self.selection.exhausted

    def _is_over(self) -> bool:
        if self.selection.exhausted:
            return True
        if self.config.updates is not None:
            return self.count >= self.config.updates
        return self.stream.epoch >= (self.config.epochs or 1)

    def _apply(self, update: Update) -> None:
        self.count += 1
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step()
        self.frames += update.steps
        self._loss_sum += update.loss * update.steps
        self._loss_steps += update.steps

    def _log(self, update: Update) -> TrainProgress:
        """Write a line; its metrics are those of the last update's steps, on all ranks."""
        loss = (self._loss_sum / self._loss_steps).item()
        self._loss_sum.zero_()
        self._loss_steps = 0
        pairs = self.team.gather(list(update.chunk.valid_pairs(update.outputs)))
        progress = self.team.on_first(lambda: self._write_progress(loss, pairs))
        self.rows += 1
        return progress

    def _write_progress(self, loss: float, pairs: list[list[Tensor]]) -> TrainProgress:
        if not math.isfinite(loss):
            raise self._diverged(self.count, f"the loss is {loss}")
        metrics = self.dataset.spec.metrics()
        for outputs, targets in pairs:
            metrics.update(outputs.cpu(), targets.cpu())
        training = self.training_seconds
        progress = TrainProgress(
            self.count,
            self.total,
            loss,
            metrics.compute(),
            self.frames / training,
            (self.total - self.count) * training / self.count,
            peak_memory(),
            self.waiting,
        )
        self._write("train", epoch=self.stream.epoch, loss=loss, lr=self.lr, **progress.metrics)
        return progress

    def _log_validation(self) -> None:
        if self.dataset.valid:
            score = self.team.on_first(self._validate)
            self.selection.add(self.count, score, self.net.module)
            if isinstance(self.schedule, ReduceLROnPlateau):
                self.schedule.step(-score)
            self.rows += 1

    def _validate(self) -> float:
        """Write the scores of the recordings held out; return the one that selects the model."""
        spec, valid = self.dataset.spec, self.dataset.valid
        with self._outside_training():
            evaluator = Evaluator(self.net, self.loss_fn, metrics=spec.metrics())
            scores = evaluate_recordings(evaluator, spec, valid, self.config, self._on_phase)
        row = {"loss": scores.loss, **scores.metrics}
        self._write("valid", **row, recordings=scores.recordings)
        return selection_score(row)

    def _write(self, kind: str, **values: Any) -> None:
        numbers = {
            **values,
            "seconds": round(self.seconds, 3),
            "training_seconds": round(self.training_seconds, 3),
            "waiting": round(self.waiting, 4),
            "peak_memory": peak_memory(),
            "frames": self.frames,
        }
        self.folder.add_metrics({"kind": kind, "update": self.count, **numbers})
        if kind != "data":
            with self._outside_training():
                self._loggers.log(kind, numbers, self.count)

    @contextmanager
    def _outside_training(self) -> Generator[None]:
        """Time that does not count for the speed."""
        started = time.monotonic()
        try:
            yield
        finally:
            passed = time.monotonic() - started
            self.seconds, self._overhead = self.seconds + passed, self._overhead + passed

    def _diverged(self, update: int, what: str) -> RunError:
        exists = self.folder.checkpoint.is_file()
        last = "The last checkpoint is untouched" if exists else "There is no checkpoint yet"
        return RunError(
            f"training diverged at update {update}: {what.rstrip('.')}. {last}; try a lower --lr"
            f" (now {self.config.lr}) or --max-norm (now {self.config.max_norm})"
        )

    def save(self) -> None:
        """Write the model, then the checkpoint with the positions of all ranks.

        Raises:
            RunError: the weights are not finite, or the disk is full or not writable; the previous
                checkpoint is untouched.
        """
        with self._outside_training():
            positions = self.team.gather(training_state.rank_position(self))
            self.team.on_first(lambda: self._save(positions))

    def _model(self) -> bytes | bytearray:
        """The content of the model file: the weights that are kept, and of which update."""
        update, weights = self.selection.kept(self.count, self.net.module)
        planned = 0 if self.finished else self.total
        return model_bytes(weights, replace(self.dataset.spec, update=update, planned=planned))

    def _save(self, positions: list[dict[str, Any]]) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self.net.parameters()):
            raise self._diverged(self.count, "the weights are not finite")
        try:
            self.folder.sync_metrics()
            write_together(
                {
                    self.folder.checkpoint: checkpoint_bytes(
                        training_state.content(self, positions)
                    ),
                    self.folder.model: self._model(),
                }
            )
        except OSError as error:
            exists = self.folder.checkpoint.is_file()
            previous = "the previous one is untouched" if exists else "there is no earlier one"
            raise RunError(
                f"{self.folder.checkpoint}: the checkpoint of update {self.count} could not be"
                f" written ({error}); {previous}"
            ) from error


def _trusted(config: Config) -> Config:
    """The settings of a new run, whose files of code this process may execute, by full paths.

    Raises:
        ConfigError: no such file or class, a model that cannot be made, or two files of the same
            name, of which a run folder keeps only one.
    """
    paths = dict[str, Path]()
    for own in config.code():
        own.trust()
        if own.setting == "model":
            own.accepted(nn.Module, dict.fromkeys(MODEL_ARGUMENTS))
        path = own.path.resolve()
        config = replace(config, **{own.setting: f"{path}:{own.name}"})
        if paths.setdefault(path.name, path) != path:
            raise ConfigError(
                f"{path} and {paths[path.name]} are two files {path.name}, and the run folder keeps"
                " both; rename one"
            )
    return config


def _shared_settings(config: Config) -> dict[str, object]:
    """The settings that all ranks must have; the path of the data may differ by machine."""
    return {key: value for key, value in asdict(config).items() if key != "data"}


def _open(config: Config, on_phase: OnPhase | None) -> Dataset:
    check_device(config.device)
    return open_dataset(config, on_phase)


def peak_memory() -> int | None:
    """Bytes of resident memory at its highest; `None` on Windows, which does not say."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
