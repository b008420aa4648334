"""Training a run: from settings to a model, by `tt.fit`, resumable to the bit at any moment.

The learning rate, along a schedule:

    constant:  lr
    cosine:    lr * (1 + cos(pi * s)) / 2     s: the share of the run that is done, of its updates,
               or, in one by epochs, of its steps
    plateau:   lr / 2^m           m: how often two validations in a row have brought no better score

torchrun starts the ranks of a run. All of them do the same; only the first writes and prints. A
rank that fails prints why and ends, and torchrun ends the others.

References: I. Loshchilov and F. Hutter, SGDR: stochastic gradient descent with warm restarts, ICLR
(2017), for the cosine; no restarts here. Decoupled weight decay regularization, ICLR (2019).
"""

import inspect
import math
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from throughtime.app.data import open_dataset, target_moments
from throughtime.app.evaluate import evaluate_recordings
from throughtime.app.fit import Fit, Row, fit, from_first
from throughtime.app.model import (
    ModelSpec,
    build_model,
    check_device,
    make_loss,
    make_stream,
    own_class,
    prepare_own,
    set_statistics,
)
from throughtime.app.run_folder import RunFolder
from throughtime.app.settings import Config
from throughtime.app.user_class import ClassReference, remember
from throughtime.distributed import Ranks
from throughtime.errors import ConfigError, ThroughtimeError
from throughtime.evaluation import Evaluation, Evaluator
from throughtime.files import write_atomically
from throughtime.gradient import (
    Adaptive,
    Exact,
    Policy,
    Randomized,
    Truncated,
    seed_generators,
)
from throughtime.optim import SGD, Adam, AdamW
from throughtime.stream import Stream

_ALONE = Ranks(0, 1, torch.device("cpu"))
_POLICIES = {
    "truncated": Truncated,
    "exact": Exact,
    "adaptive": Adaptive,
    "randomized": Randomized,
}
_RULES = {"adam": Adam, "adamw": AdamW, "sgd": SGD}
_PATIENCE = 2  # validations without a better one after which the plateau's rate is halved
_FREE = {"data", "out", "updates", "epochs", "device", "checkpoint_every"}  # may change
_SIZES = ("hidden", "layers")  # an own module must take those that are set
NOT_VALIDATED = (
    "no validation during training, so the last weights are kept, not the best (--valid-every and"
    " recordings held out choose the best)"
)


@contextmanager
def started_ranks(config: Config) -> Generator[Ranks]:
    """This process among those that torchrun has started, or alone.

    Raises:
        ConfigError: lanes that they cannot share, or devices that this machine lacks.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or not distributed.is_torchelastic_launched():
        yield _ALONE
        return
    if config.lanes % count:
        raise ConfigError(
            f"--lanes {config.lanes} are those of all ranks together, and each of the {count} that"
            f" torchrun has started plays the same number: take a multiple of {count}, such as"
            f" {-(-config.lanes // count) * count}"
        )
    device = torch.device(config.device)
    if device.type != "cpu":  # each rank of a machine takes a GPU of its own
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if str(device) != device.type or local >= gpus:
            raise ConfigError(
                f"--device {device} for rank {local} of a machine that has {gpus} GPUs: each rank"
                f" takes its own; write --device {device.type}, --nproc-per-node {max(gpus, 1)} to"
                " torchrun"
            )
        torch.accelerator.set_device_index(local)
        device = torch.device(device.type, local)
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    try:
        yield Ranks(distributed.get_rank(), count, device)
    finally:
        distributed.destroy_process_group()  # a rank that waits for this one gets an error


class Training:
    """A run that is ready to train: its data are read and checked, its net is made.

    Each rank has its own, and all of them do the same; only the first writes the folder.

    Args:
        config: the settings of the run, with the files of code by paths that may be executed.
        folder: of the run.
        ranks: those that train it.
    """

    def __init__(self, config: Config, folder: RunFolder, ranks: Ranks) -> None:
        check_device(config.device)
        dataset, own = open_dataset(config), own_class(config)
        config = config.changed(task=dataset.layout.task)
        self.config, self.folder, self.ranks = config, folder, ranks
        self.spec = spec = ModelSpec.from_data(config, dataset, own)
        seed_generators(config.seed, torch.device(config.device))
        defaults = Config.model_fields
        changed = [name for name in _SIZES if getattr(config, name) != defaults[name].default]
        self.net, statistics = build_model(spec, own, changed), dataset.statistics
        if spec.difference or len(spec.layout.ahead) > 1:
            moments = target_moments(dataset.train, spec.difference)
            statistics = replace(statistics, targets=moments)
        set_statistics(self.net, statistics)
        self.net.to(config.device)
        if own is not None:
            prepare_own(self.net, spec)
        lanes, how = config.lanes // ranks.count, {"seed": config.seed, "hand_off": config.hand_off}
        self.stream = make_stream(dataset.train, spec, config, lanes, **how)
        self.policy = make_policy(config)
        self.optimizer = make_optimizer(self.net, config)
        self.loss_fn = make_loss(spec, self.net, config.loss)
        self.schedule = make_schedule(self.optimizer, config, self.stream)
        self.validates = bool(dataset.valid) and config.valid_every != 0
        if not self.validates and (config.patience or config.schedule == "plateau"):
            raise ConfigError(
                "--patience and --schedule plateau count validations during training: hold"
                " recordings out (--holdout, or a split valid), with --valid-every above 0"
            )
        if config.keep == "best" and not self.validates:
            dataset = replace(dataset, remarks=(*dataset.remarks, NOT_VALIDATED))
        self.dataset, self.done = dataset, Fit()
        folder.facts = {
            "train": len(dataset.train),
            "valid": len(dataset.valid),
            "steps": sum(map(len, dataset.train)),
            "remarks": dataset.remarks,
        }
        folder.description = asdict(spec)
        folder.checkpoint_every = config.checkpoint_every
        values = dict(config.kept()) | asdict(spec.layout)  # its columns are those of the data
        values |= {f"code of {named.setting}": named.sha256() for named in config.code()}
        folder.parts = {name: repr(values[name]) for name in values.keys() - _FREE}

    @classmethod
    def begin(cls, config: Config, ranks: Ranks = _ALONE) -> "Training":
        """A new run in a new folder.

        Args:
            config: its settings.
            ranks: those that train it; default: this process.

        Raises:
            RunError: the folder holds a run already, or other files.
            DataError, ConfigError: what is wrong with data or settings.
        """
        folder = RunFolder(Path(config.out))
        from_first(ranks, folder.check_free)
        resolved = config.changed(data=str(Path(config.data).resolve()))
        training = cls(_trusted(resolved), folder, ranks)
        if ranks.rank == 0:
            folder.create(training.config)
            remember(training.config.code())
        return training

    @classmethod
    def resume(
        cls, path: Path, *, trust_code: bool = False, ranks: Ranks = _ALONE, **end: Any
    ) -> "Training":
        """The run in a folder, to go on at its last checkpoint; at its start if it has none.

        Args:
            path: the folder.
            trust_code: execute the user's files that the run keeps, though this user has not
                trained with them.
            ranks: as many as wrote the checkpoint; default: this process.
            end: `updates` or `epochs`, another end of the run; a finished run trains on. A run that
                has as many already stays as it is, its settings too.

        Raises:
            RunError: the folder holds no run, or code that is not trusted.
            DataError: what is wrong with the data; `run` refuses other recordings and settings.
        """
        folder = RunFolder(path)
        own = folder.with_own_code(folder.read_config(), trust_code=trust_code)
        if end:
            own = own.changed(**{"updates": None, "epochs": None, **end})
        training = cls(own, folder, ranks)
        if saved := folder.read_checkpoint():
            training.done = Fit(**saved["done"])
        return training

    def run(self, on_line: Callable[[Row], object] = lambda _: None) -> None:
        """Train to the end: log, validate, save.

        Args:
            on_line: called with each line of the log, on the first rank.

        Raises:
            KeyboardInterrupt: it was stopped by a signal, and saved.
        """
        config, folder, lines = self.config, self.folder, count()

        def log(row: Row) -> None:
            if next(lines) == 0:  # a finished run has no line
                for path in folder.path.glob("scores-*.json"):  # of weights that are replaced
                    path.unlink()
                write_atomically(folder.config, config.kept().to_toml().encode())
            on_line(row)

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
        evaluator = Evaluator(self.net, self.loss_fn, metrics=self.spec.metrics())
        valid = self.dataset.valid
        return from_first(
            self.ranks, lambda: evaluate_recordings(evaluator, self.spec, valid, self.config)
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


def make_policy(config: Config) -> Policy:
    """The policy that the settings describe.

    Raises:
        ConfigError: no such class, or arguments that it does not take; its own are listed.
    """
    name, arguments = config.gradient, config.policy_arguments()
    kind: Any = _POLICIES.get(name) or ClassReference.parse("gradient", name).load()
    if not hasattr(kind, "plan") and not hasattr(kind, "update"):
        raise ConfigError(
            f"--gradient {name}: its class {kind.__name__} has neither a method plan nor"
            " update; docs/how-to/extending.md shows a policy"
        )
    try:
        return kind(**arguments)
    except ThroughtimeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--gradient {name} with {arguments}: {error}. It takes {inspect.signature(kind)};"
            " write --stride 100, or --gradient-arg NAME=VALUE"
        ) from error


def make_optimizer(net: nn.Module, config: Config) -> Optimizer:
    """The optimizer that the settings name, which clips by the global norm.

    Matrices decay. Biases, gains of norms and other vectors do not: zero is no better for them.

    Raises:
        ConfigError: a net without weights, or a class of the user's that is no optimizer.
    """
    every = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in every if group["params"]]
    if not groups:
        raise ConfigError(f"--model {config.model}: has no weights, so there is nothing to train")
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer in _RULES:
        return _RULES[config.optimizer](groups, max_norm=config.max_norm, **options)
    if not config.weight_decay:
        del options["weight_decay"]  # a rule of one's own has its own default
    own = ClassReference.parse("optimizer", config.optimizer)
    optimizer = own.make(Optimizer, {"params": groups, **options}, options)

    def clip(*_: object) -> None:
        clip_grad_norm_(net.parameters(), config.max_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def make_schedule(optimizer: Optimizer, config: Config, stream: Stream) -> LRScheduler:
    """The schedule of torch that the settings describe.

    `step()` belongs after each update; that of a plateau after each validation, with a loss.

    Args:
        optimizer: of the run.
        config: its settings.
        stream: which knows how far a run by epochs has come: its updates are only estimated.
    """
    if config.schedule == "plateau":
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=_PATIENCE - 1, threshold=0, eps=0)

    def factor(done: int) -> float:
        epoch = stream.epoch + stream.position / stream.steps
        share = done / config.updates if config.updates else epoch / (config.epochs or 1)
        cosine = (1 + math.cos(math.pi * min(1.0, share))) / 2
        return cosine if config.schedule == "cosine" else 1.0

    return LambdaLR(optimizer, factor)
