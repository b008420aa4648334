"""Training a run: from settings to a model, by `tt.fit`, resumable to the bit at any moment."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch

from throughtime.app.config import Config
from throughtime.app.dataset import open_dataset, training_stream
from throughtime.app.distributed import ALONE, from_first
from throughtime.app.evaluate import evaluate_recordings
from throughtime.app.fit import Fit, Row, fit
from throughtime.app.load import resolve_task, task_remark
from throughtime.app.loggers import summary_writer, tensorboard
from throughtime.app.model import (
    build_model,
    check_device,
    make_loss,
    own_class,
    prepare_own,
    set_statistics,
)
from throughtime.app.optimizer import make_optimizer, make_policy, make_schedule, updates_per_epoch
from throughtime.app.run_folder import RunFolder, plain_settings
from throughtime.app.user_class import remember
from throughtime.distributed import Ranks, differing_keys
from throughtime.errors import ConfigError, DataError
from throughtime.evaluation import Evaluation, Evaluator
from throughtime.files import write_atomically
from throughtime.gradient import seed_generators
from throughtime.stream.manifest import join_faults

_SIZES = ("hidden", "layers", "dropout")  # an own module must take those that are set
NOT_VALIDATED = (
    "no validation during training, so the last weights are kept, not the best (--valid-every and"
    " recordings held out choose the best)"
)


class Training:
    """A run that is ready to train: its data are read and checked, its net is made.

    Each rank has its own, and all of them do the same; only the first writes the folder.

    Args:
        config: the settings of the run, all resolved.
        folder: of the run.
        ranks: those that train it.
        remarks: to print before those on the data.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        ranks: Ranks,
        remarks: Sequence[str] = (),
    ) -> None:
        check_device(config.device)
        dataset, own = open_dataset(config), own_class(config)
        self.config, self.folder, self.ranks = config, folder, ranks
        seed_generators(config.seed, torch.device(config.device))
        changed = [
            name for name in _SIZES if getattr(config, name) != Config.model_fields[name].default
        ]
        self.net = build_model(dataset.spec, own, changed)
        set_statistics(self.net, dataset.statistics)
        self.net.to(config.device)
        if own is not None:
            prepare_own(self.net, dataset.spec)
        self.stream = training_stream(dataset, config, ranks.count)
        self.policy = make_policy(config)
        self.epoch_updates = updates_per_epoch(self.policy, self.stream, ranks.count)
        total = config.updates or (config.epochs or 1) * self.epoch_updates
        self.optimizer = make_optimizer(self.net, config)
        self.loss_fn = make_loss(dataset.spec, self.net, config.loss)
        self.schedule = make_schedule(self.optimizer, config, self.stream, total)
        self.validates = bool(dataset.valid) and config.valid_every != 0
        if not self.validates and (config.patience or config.schedule == "plateau"):
            raise ConfigError(
                "--patience and --schedule plateau count validations during training, and there"
                " are none: hold recordings out (--holdout, or a split valid), with --valid-every"
                " above 0"
            )
        last = [NOT_VALIDATED] if config.keep == "best" and not self.validates else []
        self.dataset = replace(dataset, remarks=(*remarks, *dataset.remarks, *last))
        self.resumed, self.done = False, Fit()
        folder.facts, folder.description = self.dataset.facts(), asdict(dataset.spec)
        folder.checkpoint_every = config.checkpoint_every
        folder.kept = {
            "spec": folder.description,
            "settings": plain_settings(config),
            "code": {named.setting: named.sha256() for named in config.code()},
        }

    @classmethod
    def begin(cls, config: Config, ranks: Ranks = ALONE) -> "Training":
        """A new run in a new folder.

        Args:
            config: its settings.
            ranks: those that train it; default: this process.

        Raises:
            RunError: the folder holds a run already.
            DataError, ConfigError: what is wrong with data or settings.
        """
        folder = RunFolder(Path(config.out))
        if config.logger:
            summary_writer()
        from_first(ranks, folder.check_free)
        own = _trusted(config.changed(data=str(Path(config.data).resolve())))
        config = resolve_task(own)
        training = cls(config, folder, ranks, () if own.task else [task_remark(config)])
        if ranks.rank == 0:
            folder.create(config)
            remember(config.code())
        return training

    @classmethod
    def resume(
        cls,
        path: Path,
        *,
        updates: int | None = None,
        epochs: int | None = None,
        trust_code: bool = False,
        ranks: Ranks = ALONE,
    ) -> "Training":
        """The run in a folder, to go on at its last checkpoint; at its start if it has none.

        Args:
            path: the folder.
            updates: another end of the run; a finished run trains on. A run that has as many
                already stays as it is, its settings too.
            epochs: the same, in epochs.
            trust_code: execute the user's files that the run keeps, though this user has not
                trained with them.
            ranks: as many as wrote the checkpoint; default: this process.

        Raises:
            RunError: the folder holds no run, or one of other settings, or code that is not
                trusted.
            DataError: the columns have changed; `run` refuses other recordings.
        """
        folder = RunFolder(path)
        config, saved = folder.read_config(), folder.read_checkpoint()
        if saved is not None:
            folder.check_settings(config, saved)
        own = folder.with_own_code(config, trust_code=trust_code)
        longer = {} if updates is epochs is None else {"updates": updates, "epochs": epochs}
        training = cls(own.changed(**longer), folder, ranks)
        training.resumed, folder.patient = True, bool(longer)
        if saved is not None:
            now, before = folder.description["layout"], saved["spec"]["layout"]
            if changed := differing_keys(before, now):
                faults = [f"{k} were {before.get(k)!r} and are now {now[k]!r}" for k in changed]
                raise DataError(
                    f"the data of {path} have changed since the run was started:"
                    f" {join_faults(faults)}"
                )
            training.done = Fit(**saved["done"])
        return training

    def run(self, on_line: Callable[[Row], object] = lambda _: None) -> None:
        """Train to the end: log, validate, save.

        Args:
            on_line: called with each line of training in the log, on the first rank.

        Raises:
            KeyboardInterrupt: it was stopped by a signal, and saved.
        """
        config, folder = self.config, self.folder
        write: list[Callable[[Row], object]] = []  # on the first rank

        def log(row: Row) -> None:
            if not write:  # a finished run has no line
                for path in folder.path.glob("scores-*.json"):  # of weights that are replaced
                    path.unlink()
                write_atomically(folder.config, config.kept().to_toml().encode())
                write.append(on_line)
                if config.logger:
                    to = tensorboard(folder.path, config.settings(), row["update"])
                    write.append(stack.enter_context(to))
            for to_logger in write if row["kind"] != "data" else ():
                to_logger(row)

        with ExitStack() as stack:
            self.done = fit(
                self.net,
                self.stream,
                self.loss_fn,
                gradient=self.policy,
                optimizer=self.optimizer,
                schedule=self.schedule,
                valid=self._evaluate if self.dataset.valid else None,
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
        spec, valid = self.dataset.spec, self.dataset.valid
        evaluator = Evaluator(self.net, self.loss_fn, metrics=spec.metrics())
        return from_first(
            self.ranks, lambda: evaluate_recordings(evaluator, spec, valid, self.config)
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
        config = config.changed(**{own.setting: f"{path}:{own.name}"})
        if paths.setdefault(path.name, path) != path:
            raise ConfigError(
                f"{path} and {paths[path.name]} are two files {path.name}, and the run folder keeps"
                " both; rename one"
            )
    return config
