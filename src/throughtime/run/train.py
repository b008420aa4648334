"""Training a run: from a configuration to a model, resumable to the bit at any moment.

Shapes: `T` steps, `B` lanes.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Never

import torch

from throughtime import files
from throughtime.carry import Carried
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Update
from throughtime.gradient.objective import valid_rows
from throughtime.predict import Evaluation, evaluate
from throughtime.run import data as datasets
from throughtime.run.checkpoint import load_checkpoint, save_checkpoint
from throughtime.run.config import Config
from throughtime.run.folder import Folder
from throughtime.run.memory import peak_memory
from throughtime.run.model import Spec, build, fit_statistics, loss_of, save_model
from throughtime.run.policy import policy_of, settled, updates_per_epoch
from throughtime.run.survey import SURVEY_BLOCK, Survey, sorted_classes, survey
from throughtime.score import Figures
from throughtime.stream import Recording, Stream, windows
from throughtime.updates import Updates, updates

EVALUATION_LANES = 64  # recordings evaluated side by side; more of them wait their turn
EVALUATION_CHUNK = 512


@dataclass(frozen=True)
class Prepared:
    """The data of a run, opened, surveyed and split."""

    train: list[Recording]
    valid: list[Recording]
    found: Survey
    spec: Spec
    remarks: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """What was found, as plain values."""
        return {"train": len(self.train), "valid": len(self.valid), "steps": sum(map(len, self.train)), "remarks": list(self.remarks)}


def prepare(config: Config) -> Prepared:
    """Opens the recordings, looks at all that training will see, and settles the model's shape.

    Raises:
        DataError: whatever is wrong with the data: all faults of the survey at once.
    """
    check_device(config.device)
    listed = datasets.find(Path(config.data))
    opened = datasets.open_recordings(datasets.of_splits(listed, ("train", "valid")), config.inputs, config.targets, need_targets=True)
    first = opened[0][1]
    checked = [(name, datasets.Numeric(recording, config.task == "regress")) for name, recording in opened]
    splits, whence = datasets.split(checked, config.holdout)
    train, valid = datasets.choose(splits, "train"), splits.get("valid", [])
    classify = config.task == "classify"
    found, later = survey(train, classify=classify), survey(valid, classify=classify)
    faults = found.faults + later.faults if config.missing == "error" else []
    faults += [f"{fault}; targets must be finite, or NaN where there are none" for fault in found.bad_targets + later.bad_targets]
    if faults:
        raise DataError("; ".join(faults) + (". Clean the files, or mask steps without inputs: --missing mask"))
    if classify:
        train, valid = _labelled(train, valid, found)
        _refuse_unknown(valid, later, found)
    elif not len(found.targets.mean) or not found.targets.count.all():
        raise DataError("a target column of the training split has no value at all; regression needs some")
    spec = Spec.of(config, found, first.input_columns, first.target_columns)
    return Prepared(train, valid, found, spec, _remarks(config, listed, len(train), found, spec, whence))


def _refuse_unknown(valid: list[Recording], later: Survey, found: Survey) -> None:
    """Reads the held-out recordings again to name the place, if there is a class that training never sees."""
    if set(later.classes) - set(found.classes):
        for recording in valid:
            for start in range(0, len(recording), SURVEY_BLOCK):
                recording.read(start, min(start + SURVEY_BLOCK, len(recording)))


def check_device(device: str) -> None:
    """Refuses a device on which nothing can be computed here."""
    if device == "meta":
        raise ConfigError("device=meta: holds no numbers; take --device cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # what torch raises for a device that is not there
        raise ConfigError(f"device={device}: cannot be used here ({str(error).splitlines()[0]}); take --device cpu") from error


def _labelled(train: list[Recording], valid: list[Recording], found: Survey) -> tuple[list[Recording], list[Recording]]:
    classes = sorted_classes(found.classes)
    if len(classes) < 2:
        raise DataError(
            f"the training split has {len(classes)} class ({', '.join(classes)}); classification needs two or more. Is it --task regress?"
        )
    if len(classes) > 1000:
        raise DataError(f"the training split has {len(classes)} classes, such as {', '.join(classes[:3])}; is it --task regress?")
    named = [[datasets.Labelled(r, classes) for r in part] for part in (train, valid)]
    return list(named[0]), list(named[1])


def _remarks(config: Config, listed: list[datasets.Files], trained: int, found: Survey, spec: Spec, whence: str) -> tuple[str, ...]:
    """What a user should know of the data before training."""
    named = Counter(one.split for one in listed)
    remarks = [whence + (f" ({', '.join(f'{name} {count}' for name, count in named.items())})" if len(named) > 1 else "")]
    if config.train_on == "stream" and trained < config.lanes:
        remarks.append(
            f"cut into {config.lanes} parts, one for each lane, each from a zero state (--lanes {trained} keeps recordings whole)"
        )
    clocks = [name for name, rises in zip(spec.inputs, found.rising, strict=False) if rises]
    if clocks:
        remarks.append(f"input {', '.join(clocks)} only ever rises: a clock? name the inputs with --inputs to leave it out")
    if found.missing:
        remarks.append(f"{found.missing} steps masked: their inputs are NaN or infinite")
    if found.without_target:
        remarks.append(f"{found.without_target} steps masked: they have no target")
    return tuple(remarks)


def scored(net: Carried, spec: Spec, recordings: list[Recording], config: Config) -> Evaluation:
    """Scores on unbroken recordings, as the model is deployed."""
    stream = Stream(
        recordings, min(len(recordings), EVALUATION_LANES), EVALUATION_CHUNK, seed=None, warm_up=config.warm_up, dtype=spec.torch_dtype,
        missing=config.missing,
    )  # fmt: skip
    return evaluate(net, stream, score=spec.score())


@dataclass(frozen=True)
class Moment:
    """How a run stands: what the progress line shows."""

    update: int
    updates: int
    loss: float
    figures: Figures
    frames_per_second: float
    remaining_seconds: float
    peak_memory: int | None


class Training:
    """A run in progress. Iterate `go()`; every `Moment` is a chance to print, or to stop and save."""

    def __init__(self, config: Config, prepared: Prepared, folder: Folder) -> None:
        self.config, self.prepared, self.folder = config, prepared, folder
        torch.manual_seed(config.seed)
        self.net = build(prepared.spec)
        fit_statistics(self.net, prepared.found)
        self.net.to(config.device)
        self.loss_fn = loss_of(config, prepared.spec, self.net, prepared.found.classes)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.lr)
        self.stream = self._stream()
        self.policy = settled(policy_of(config), self.net, self.stream, self.loss_fn)
        self.count = self.rows = self.frames = 0
        self.seconds = 0.0
        self.total = self._total()
        self.finished = False
        self.stopping = False
        self._updates: Updates | None = None
        self._sum, self._sum_steps = torch.zeros((), dtype=prepared.spec.torch_dtype, device=config.device), 0

    @classmethod
    def resume(cls, path: Path, *, updates: int | None = None, epochs: int | None = None) -> "Training":
        """The run in a folder, at its last checkpoint; at its start if it was ended before the first one.

        Args:
            path: the folder.
            updates: another end of the run than the one it was started with; so a finished run trains on.
            epochs: the same, in epochs.

        Raises:
            RunError: the folder holds no run.
            DataError: the data are not those that the run was started with.
        """
        folder = Folder(path)
        config = folder.read_config()
        further = updates is not None or epochs is not None
        if further:
            config = replace(config, updates=updates, epochs=epochs)
        saved = load_checkpoint(folder.checkpoint) if folder.checkpoint.is_file() else None
        training = cls(config, prepare(config), folder)
        folder.sweep()
        if saved is not None:
            training._load(saved)
        folder.keep_metrics(training.rows)
        if further:
            training.finished = training._over()
            files.write_atomically(folder.config, config.to_toml().encode())
        return training

    def _stream(self) -> Stream:
        config, recordings = self.config, self.prepared.train
        played: list[Recording] = list(windows(recordings, config.stride)) if config.train_on == "windows" else recordings
        return Stream(
            played,
            config.lanes,
            config.stride,
            seed=config.seed,
            warm_up=config.warm_up,
            dtype=self.prepared.spec.torch_dtype,
            missing=config.missing,
        )

    def _total(self) -> int:
        """Updates in the whole run; by epochs it is an estimate, since the order of recordings moves an epoch's end."""
        return self.config.updates or (self.config.epochs or 1) * self.epoch_updates

    @property
    def epoch_updates(self) -> int:
        """About how many updates an epoch makes."""
        return updates_per_epoch(self.policy, self.stream)

    def stop(self) -> None:
        """Asks `go` to save and return after the update in hand; safe to call from a signal handler."""
        self.stopping = True

    def go(self) -> Iterator[Moment]:
        """Trains to the end, or until `stop`: logs, evaluates and saves on the way, and yields a moment with every log line."""
        if self.finished:
            return
        self.folder.drop_scores()
        if not self.rows:
            self._write({"kind": "data", "update": 0, **self.prepared.facts()})
        clock = _Clock(self.seconds)
        every = max(1, self.total // 200)
        valid_every = max(1, self.total // 5) if self.config.valid_every is None else self.config.valid_every
        for update in self._all_updates():
            self._apply(update)
            self.seconds = clock.seconds()
            if self.count % every == 0:
                yield self._log(update)
            if self.prepared.valid and valid_every and self.count % valid_every == 0 and self.count < self.total:
                self._log_valid()
            if self.stopping or clock.due(self.config.checkpoint_every):
                self.save()
            if self.stopping:
                return
        self.save()
        self._log_valid()
        self.finished = True
        self.save()

    def _all_updates(self) -> Iterator[Update]:
        """Epoch after epoch until the run is over; each starts from the initial state."""
        while not self._over():
            if self._updates is None:
                self._updates = updates(self.net, self.stream, self.loss_fn, gradient=self.policy)
            while (update := self._next(self._updates)) is not None:
                yield update
                if self._over():
                    return
            self._updates = None
            if self.count == 0:
                raise DataError(
                    f"an epoch passed without a single step that counts: warm_up={self.config.warm_up} or missing targets mask all of them"
                )

    def _next(self, from_here: Updates) -> Update | None:
        """The next update of the epoch; a gradient that is not finite is told as what it is in a run."""
        try:
            return next(from_here, None)
        except RunError as error:
            raise RunError(f"training diverged at update {self.count + 1}: {error} {self._advice()}") from error

    def _over(self) -> bool:
        if self.config.updates is not None:
            return self.count >= self.config.updates
        return self.stream.epoch >= (self.config.epochs or 1)

    def _apply(self, update: Update) -> None:
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        self.frames += update.steps
        self._sum += update.loss * update.steps
        self._sum_steps += update.steps

    def _log(self, update: Update) -> Moment:
        """One line of metrics; the figures are those of the last update's steps."""
        loss = (self._sum / self._sum_steps).item()
        if not math.isfinite(loss):
            self._diverged(f"the loss is {loss}")
        self._sum.zero_()
        self._sum_steps = 0
        score = self.prepared.spec.score()
        score.add(*valid_rows(update.outputs, update.chunk))
        rate = self.frames / self.seconds
        left = (self.total - self.count) * self.seconds / self.count
        moment = Moment(self.count, self.total, loss, score.figures(), rate, left, peak_memory())
        self._write({"kind": "train", "update": self.count, "epoch": self.stream.epoch, "loss": loss, **moment.figures})
        return moment

    def _log_valid(self) -> None:
        if not self.prepared.valid:
            return
        found = scored(self.net, self.prepared.spec, self.prepared.valid, self.config)
        self._write({"kind": "valid", "update": self.count, **found.figures, "recordings": found.recordings})

    def _write(self, row: dict[str, Any]) -> None:
        self.folder.add_metrics({**row, "seconds": round(self.seconds, 3), "peak_memory": peak_memory(), "frames": self.frames})
        self.rows += 1

    def _diverged(self, what: str) -> Never:
        raise RunError(f"{what} at update {self.count}: training diverged. {self._advice()}")

    def _advice(self) -> str:
        return f"The last checkpoint is untouched; try a lower --lr (now {self.config.lr}) or --clip (now {self.config.clip})"

    def save(self) -> None:
        """Writes the model, then the checkpoint that says it was reached.

        Raises:
            RunError: the weights are not finite, or the disk is full or not writable; the previous checkpoint is untouched.
        """
        if not all(bool(weight.isfinite().all()) for weight in self.net.parameters()):
            self._diverged("the weights are not finite")
        place = None if self._updates is None else self._updates.state_dict()
        content = {
            "net": dict(self.net.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "updates": place,
            "stream": self.stream.state_dict(),
            "random": torch.get_rng_state(),
            "counts": [self.count, self.rows, self.frames, self.seconds, self._sum_steps],
            "sum": self._sum,
            "finished": self.finished,
            "spec": asdict(self.prepared.spec),
        }
        try:
            save_model(self.folder.model, self.net, self.prepared.spec)
            save_checkpoint(self.folder.checkpoint, content)
        except OSError as error:
            kept = (
                f"the previous checkpoint in {self.folder.path} is untouched"
                if self.folder.checkpoint.is_file()
                else "there is no earlier one"
            )
            raise RunError(f"the checkpoint of update {self.count} could not be written ({error}); {kept}") from error

    def _load(self, saved: dict[str, Any]) -> None:
        self._check_same_data(saved)
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.count, self.rows, self.frames, self.seconds, self._sum_steps = saved["counts"]
        self._sum.copy_(saved["sum"])
        self.finished = saved["finished"]
        self.stream.load_state_dict(saved["stream"])
        if saved["updates"] is not None:
            self._updates = updates(self.net, self.stream, self.loss_fn, gradient=self.policy)
            self._updates.load_state_dict(saved["updates"])
        torch.set_rng_state(saved["random"])

    def _check_same_data(self, saved: dict[str, Any]) -> None:
        """The model's shape, classes and statistics, which the data decide, are those of the checkpoint."""
        mine = asdict(self.prepared.spec)
        faults = [
            f"{key} were {saved['spec'].get(key)!r} and are now {value!r}" for key, value in mine.items() if saved["spec"].get(key) != value
        ]
        if not faults:
            faults = [
                f"'{name}', a statistic of the training split, was {saved['net'][name].tolist()} and is now {value.tolist()}"
                for name, value in self.net.named_buffers()
                if not torch.equal(saved["net"][name], value.cpu())
            ]
        if faults:
            raise DataError(f"the data of {self.folder.path} have changed since the run was started: " + "; ".join(faults))


class _Clock:
    """Seconds of training over all parts of a run, and when a checkpoint is due."""

    def __init__(self, before: float) -> None:
        self._start = time.monotonic() - before
        self._saved = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def due(self, interval: float) -> bool:
        if time.monotonic() - self._saved < interval:
            return False
        self._saved = time.monotonic()
        return True


def begin(config: Config) -> Training:
    """A new run in a new folder.

    Raises:
        RunError: the folder holds a run already.
        DataError, ConfigError: what is wrong with data or settings.
    """
    resolved = replace(config, data=str(Path(config.data).resolve()))
    policy_of(config)
    Folder.check_free(resolved)
    training = Training(resolved, prepare(resolved), Folder(Path(resolved.out)))
    Folder.create(resolved)
    return training
