"""Training a run: from settings to a model, by `tt.fit`, resumable to the bit at any moment."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch

from throughtime._device import seed_generators
from throughtime._files import write_atomically
from throughtime.app.config import Config
from throughtime.app.dataset import (
    Dataset,
    changed_data,
    idle_remarks,
    open_dataset,
    training_stream,
)
from throughtime.app.distributed import Team
from throughtime.app.evaluate import evaluate_recordings
from throughtime.app.fit import Fit, Row, fit
from throughtime.app.load import resolve_task, task_remark
from throughtime.app.loggers import check_installed, loggers
from throughtime.app.model import (
    build_model,
    check_device,
    make_loss,
    own_class,
    prepare_own,
    set_statistics,
    statistics_of,
)
from throughtime.app.optimizer import make_optimizer, make_schedule
from throughtime.app.policy import make_policy, updates_per_epoch
from throughtime.app.recordings import OnPhase
from throughtime.app.run_folder import RunFolder, plain_settings
from throughtime.app.user_class import failures_named, remember
from throughtime.errors import ConfigError, DataError
from throughtime.evaluation import Evaluation, Evaluator
from throughtime.stream.manifest import join_faults

_SIZES = ("hidden", "layers", "dropout")  # an own module must take those that are set
NOT_VALIDATED = (
    "no validation during training, so the last weights are kept, not the best (--valid-every and"
    " recordings held out choose the best)"
)


class Training:
    """A run that is ready to train: its data are read and checked, its net is made.

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
        own = own_class(config)
        changed = [name for name in _SIZES if getattr(config, name) != getattr(Config, name)]
        self.net = build_model(dataset.spec, own, changed)
        set_statistics(self.net, dataset.statistics)
        self.net.to(config.device)
        if own is not None:
            prepare_own(self.net, dataset.spec)
        self.stream = training_stream(dataset, config, team.count)
        idle = sum(team.gather(self.stream.idle_steps)) / (self.stream.steps * config.lanes)
        self.policy = make_policy(config)
        self.epoch_updates = updates_per_epoch(self.policy, self.stream, team.count)
        total = config.updates or (config.epochs or 1) * self.epoch_updates
        self.optimizer = make_optimizer(self.net, config)
        self.loss_fn = make_loss(dataset.spec, self.net, config.loss)
        self.schedule = make_schedule(self.optimizer, config, self.stream, total)
        self.validates = bool(dataset.valid) and config.valid_every != 0
        if config.patience is not None and not self.validates:
            raise ConfigError(
                f"--patience {config.patience} counts validations during training, and there are"
                " none: hold recordings out (--holdout, or a split valid), with --valid-every"
                " above 0"
            )
        remarks = [*dataset.remarks, *idle_remarks(idle)]
        if config.keep == "best" and not self.validates:
            remarks.append(NOT_VALIDATED)
        self.dataset = replace(dataset, remarks=tuple(remarks))
        self.resumed, self.done = False, Fit()
        folder.facts, folder.description = self.dataset.facts(), asdict(dataset.spec)
        folder.checkpoint_every = config.checkpoint_every
        folder.kept = {
            "spec": folder.description,
            "settings": plain_settings(config),
            "code": {named.setting: named.sha256() for named in config.code()},
        }

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
        own = replace(config, data=str(Path(config.data).resolve()))
        config = team.on_all(lambda: resolve_task(_trusted(own), on_phase))
        folder = RunFolder(Path(config.out))

        def check() -> None:
            check_installed(config.logger)
            folder.check_free()

        def create() -> None:
            folder.create(config)
            remember(config.code())

        team.on_first(check)
        reasons = [] if own.task is not None else [task_remark(config)]
        training = cls._opened(config, folder, team, on_phase, reasons)
        team.on_first(create)
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
        """The run in a folder, to go on at its last checkpoint; at its start if it has none.

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
        longer = {} if updates is epochs is None else {"updates": updates, "epochs": epochs}

        def lock() -> None:
            check_installed(folder.read_config().logger)  # no folder is made where no run is
            folder.lock()

        def load() -> "Training":
            started_with, saved = folder.read_config(), folder.read_checkpoint()
            own = folder.with_own_code(started_with, saved, trust_code=trust_code)
            at = "the start" if saved is None else f"update {saved['done']['count']}"
            team.check_equal({"the checkpoint of the run": at})
            changes, config = folder.changes(started_with, saved), replace(own, **longer)
            training = cls._opened(config, folder, team, on_phase, changes)
            training.resumed, folder.patient = True, bool(longer)
            if saved is None:
                return training
            spec, now = training.dataset.spec, statistics_of(training.net)
            if faults := changed_data(spec, now, saved["spec"], saved["net"]):
                raise DataError(
                    f"the data of {path} have changed since the run was started: "
                    + join_faults(faults)
                )
            end = config.updates, config.epochs
            training.done = Fit.of_checkpoint(saved, *end, again=bool(longer))
            return training

        def lengthen() -> None:
            if longer and not training.done.finished:
                config = replace(folder.read_config(), **longer)
                write_atomically(folder.config, config.to_toml().encode())

        try:
            team.on_first(lock)
            training = team.on_all(load)
            team.on_first(lengthen)
        except BaseException:
            folder.unlock()
            raise
        return training

    @classmethod
    def _opened(
        cls,
        config: Config,
        folder: RunFolder,
        team: Team,
        on_phase: OnPhase | None,
        remarks: Sequence[str],
    ) -> "Training":
        """A run whose settings and data are the same on all ranks."""

        def start() -> "Training":
            check_device(config.device)
            dataset = open_dataset(config, on_phase)
            dataset = replace(dataset, remarks=(*remarks, *dataset.remarks))
            return cls(config, dataset, folder, team, on_phase)

        # the path of the data may differ by machine
        team.check_equal({key: value for key, value in asdict(config).items() if key != "data"})
        training = team.on_all(start)
        team.check_equal(training.dataset.checksums())
        return training

    @property
    def stopped_early(self) -> bool:
        """Whether the patience has ended before the run."""
        patience = self.config.patience
        return self.done.finished and patience is not None and self.done.stale >= patience

    def run(self, on_line: Callable[[Row], object] = lambda _: None) -> None:
        """Train to the end: log, validate, save.

        Args:
            on_line: called with each line of training in the log, on the first rank.

        Raises:
            KeyboardInterrupt: it was stopped by a signal, and saved.
        """
        config, folder = self.config, self.folder
        write: list[Callable[[Row], None]] = []  # on the first rank

        def log(row: Row) -> None:
            if row["kind"] != "data":
                write[0](row)
            if row["kind"] == "train":
                on_line(row)

        def start() -> None:
            folder.remove_scores()
            to = loggers(config.logger, folder.path, config.settings(), self.done.count)
            write.append(stack.enter_context(to))

        with ExitStack() as stack:
            stack.callback(folder.unlock)
            stack.enter_context(failures_named(config.code()))
            if not self.done.finished:
                self.team.on_first(start)
            self.done = fit(
                self.net,
                self.stream,
                self.loss_fn,
                gradient=self.policy,
                optimizer=self.optimizer,
                schedule=self.schedule,
                valid=self._evaluate if self.dataset.valid else None,
                metrics=self.dataset.spec.metrics(),
                updates=config.updates,
                epochs=config.epochs,
                valid_every=config.valid_every,
                patience=config.patience,
                keep="best" if self.validates and config.keep == "best" else "last",
                logger=log,
                out=folder,
            )

    def _evaluate(self) -> Evaluation:
        """The scores of the recordings held out, which the first rank plays for all."""
        spec, valid, config = self.dataset.spec, self.dataset.valid, self.config
        evaluator = Evaluator(self.net, self.loss_fn, metrics=spec.metrics())
        return self.team.on_first(
            lambda: evaluate_recordings(evaluator, spec, valid, config, self._on_phase)
        )


def _trusted(config: Config) -> Config:
    """The settings of a new run, whose files of code this process may execute, by full paths.

    Raises:
        ConfigError: no such file, or two of the same name, of which a run folder keeps only one.
    """
    paths = dict[str, Path]()
    for own in config.code():
        own.trust()
        path = own.path.resolve()
        config = replace(config, **{own.setting: f"{path}:{own.name}"})
        if paths.setdefault(path.name, path) != path:
            raise ConfigError(
                f"{path} and {paths[path.name]} are two files {path.name}, and the run folder keeps"
                " both; rename one"
            )
    return config
