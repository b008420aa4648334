"""Training a run: from a configuration to a model, resumable to the bit at any moment.

Shapes: `T` steps, `B` lanes.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Never

import torch
from torch import Tensor

from throughtime._files import write_atomically
from throughtime.app.checkpoint import copied, load_checkpoint, save_checkpoint
from throughtime.app.config import Config
from throughtime.app.folder import Folder
from throughtime.app.memory import peak_memory
from throughtime.app.model import Spec, build, fit_statistics, loss_of, save_model
from throughtime.app.policy import policy_of, settled, updates_per_epoch
from throughtime.app.prepared import Prepared, of_idle, prepare
from throughtime.app.team import ALONE, Team
from throughtime.carry.carried import Carried
from throughtime.distributed import RankError
from throughtime.errors import DataError, RunError
from throughtime.gradient import Update
from throughtime.metrics import Metrics
from throughtime.predict import Evaluation, evaluate
from throughtime.stream import Recording, Stream, windows
from throughtime.updates import Updates, updates

EVALUATION_LANES = 64  # recordings evaluated side by side; more of them wait their turn
EVALUATION_CHUNK = 512


def scored(net: Carried, spec: Spec, recordings: list[Recording], config: Config) -> Evaluation:
    """Scores on unbroken recordings, as the model is deployed; all of them on this rank."""
    stream = Stream(
        recordings, min(len(recordings), EVALUATION_LANES), EVALUATION_CHUNK, seed=None, warm_up=config.warm_up, dtype=spec.torch_dtype,
        missing=config.missing, rank=0, ranks=1,
    )  # fmt: skip
    return evaluate(net, stream, metrics=spec.score())


@dataclass(frozen=True)
class Moment:
    """How a run stands: what the progress line shows."""

    update: int
    updates: int
    loss: float
    figures: Metrics
    frames_per_second: float
    remaining_seconds: float
    peak_memory: int | None
    waiting: float = 0.0  # share of the time spent waiting for data


class Training:
    """A run in progress. Iterate `go()`; every `Moment` is a chance to print, or to stop and save.

    On several ranks each has its own, and all of them do the same; the first alone writes the
    folder.
    """

    def __init__(
        self, config: Config, prepared: Prepared, folder: Folder, team: Team = ALONE
    ) -> None:
        self.config, self.prepared, self.folder, self.team = config, prepared, folder, team
        torch.manual_seed(config.seed)
        self.net = build(prepared.spec)
        fit_statistics(self.net, prepared.found)
        self.net.to(config.device)
        self.loss_fn = loss_of(config, prepared.spec, self.net, prepared.found.classes)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.lr)
        self.stream = self._stream()
        idle = sum(team.gathered(self.stream.idle_steps)) / (self.stream.steps * config.lanes)
        self.prepared = replace(prepared, remarks=(*prepared.remarks, *of_idle(idle)))
        self.policy = team.first_does(
            lambda: settled(policy_of(config), self.net, self.stream, self.loss_fn)
        )
        self.count = self.rows = self.frames = 0
        self.seconds = self._waited = 0.0
        self.total = self._total()
        self.finished = False
        self.stopping = False
        self._updates: Updates | None = None
        self._sum, self._sum_steps = (
            torch.zeros((), dtype=prepared.spec.torch_dtype, device=config.device),
            0,
        )

    @classmethod
    def resume(
        cls,
        path: Path,
        *,
        updates: int | None = None,
        epochs: int | None = None,
        team: Team = ALONE,
    ) -> "Training":
        """The run in a folder, at its last checkpoint; at its start if it was ended before the
        first one.

        Args:
            path: the folder.
            updates: another end of the run than the one it was started with; so a finished run
                trains on.
            epochs: the same, in epochs.
            team: as many ranks as the checkpoint was written by.

        Raises:
            RunError: the folder holds no run, or one of another number of ranks.
            DataError: the data are not those that the run was started with.
        """
        further = (
            {} if updates is None and epochs is None else {"updates": updates, "epochs": epochs}
        )
        training = team.all_do(lambda: cls._at_checkpoint(Folder(path), further, team))
        team.first_does(lambda: training.tidy(rewrite=bool(further)))
        return training

    @classmethod
    def _at_checkpoint(
        cls, folder: Folder, further: Mapping[str, int | None], team: Team
    ) -> "Training":
        config = replace(folder.read_config(), **further)
        saved = load_checkpoint(folder.checkpoint) if folder.checkpoint.is_file() else None
        training = cls(config, prepare(config), folder, team)
        if saved is not None:
            training._load(saved)
        if further:
            training.finished = training._over()
        return training

    def tidy(self, *, rewrite: bool) -> None:
        """Takes away what was written after the checkpoint; all ranks have read it."""
        self.folder.sweep()
        self.folder.keep_metrics(self.rows)
        if rewrite:
            write_atomically(self.folder.config, self.config.to_toml().encode())

    def _stream(self) -> Stream:
        config, recordings = self.config, self.prepared.train
        played: list[Recording] = (
            list(windows(recordings, config.stride)) if config.train_on == "windows" else recordings
        )
        return Stream(
            played,
            config.lanes // self.team.count,
            config.stride,
            seed=config.seed,
            warm_up=config.warm_up,
            dtype=self.prepared.spec.torch_dtype,
            missing=config.missing,
            offset=config.offset,
            hand_off=config.hand_off,
            workers=config.workers,
        )

    def _total(self) -> int:
        """Updates in the whole run.

        By epochs it is an estimate, since the order of recordings moves an epoch's end.
        """
        return self.config.updates or (self.config.epochs or 1) * self.epoch_updates

    @property
    def epoch_updates(self) -> int:
        """About how many updates an epoch makes."""
        return updates_per_epoch(self.policy, self.stream)

    @property
    def waiting(self) -> float:
        """The share of the time so far that was spent waiting for data."""
        return (self._waited + self.stream.wait_seconds) / self.seconds if self.seconds else 0.0

    def stop(self) -> None:
        """Asks `go` to save and return after the update in hand.

        Safe to call from a signal handler.
        """
        self.stopping = True

    def go(self) -> Iterator[Moment]:
        """Trains to the end, or until `stop`: logs, evaluates and saves on the way, and yields a moment with every log line."""
        if self.finished:
            return
        self._begin_writing()
        clock = _Clock(self.seconds)
        every = max(1, self.total // 200)
        valid_every = (
            max(1, self.total // 5) if self.config.valid_every is None else self.config.valid_every
        )
        for update in self._all_updates():
            self._apply(update)
            self.seconds = clock.seconds()
            if self.count % every == 0:
                yield self._log(update)
            if (
                self.prepared.valid
                and valid_every
                and self.count % valid_every == 0
                and self.count < self.total
            ):
                self._log_valid()
            stop, due = self.team.agreed(
                self.stopping, self.team.first and clock.due(self.config.checkpoint_every)
            )
            if stop or due:
                self.save()
            if stop:
                return
        self.save()
        self._log_valid()
        self.finished = True
        self.save()

    def _begin_writing(self) -> None:
        self.team.first_does(self.folder.drop_scores)
        if not self.rows:
            self.team.first_does(
                lambda: self._write({"kind": "data", "update": 0, **self.prepared.facts()})
            )
            self.rows += 1

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
                nothing = f"warm_up={self.config.warm_up} or missing targets mask all of them"
                self.team.settle(
                    DataError(f"an epoch passed without a single step that counts: {nothing}")
                )

    def _next(self, from_here: Updates) -> Update | None:
        """The next update of the epoch.

        Where one rank cannot make it, none can, and all of them end here.
        """
        try:
            return next(from_here, None)
        except Exception as error:
            self.team.settle(None if isinstance(error, RankError) else self._in_a_run(error))
            self.team.settle(error)  # they are all there, and differ
            raise

    def _in_a_run(self, error: Exception) -> Exception:
        """A gradient that is not finite, told as what it is in a run."""
        if not isinstance(error, RunError):
            return error
        told = RunError(f"training diverged at update {self.count + 1}: {error} {self._advice()}")
        told.__cause__ = error
        return told

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
        """One line of metrics; the figures are those of the last update's steps, on all ranks."""
        loss = (self._sum / self._sum_steps).item()
        self._sum.zero_()
        self._sum_steps = 0
        rows = self.team.gathered(
            [part.cpu().clone() for part in update.chunk.valid_pairs(update.outputs)]
        )
        moment = self.team.first_does(lambda: self._logged(loss, rows))
        self.rows += 1
        return moment

    def _logged(self, loss: float, rows: list[list[Tensor]]) -> Moment:
        if not math.isfinite(loss):
            self._diverged(f"the loss is {loss}")
        score = self.prepared.spec.score()
        for outputs, targets in rows:
            score.update(outputs, targets)
        rate = self.frames / self.seconds
        left = (self.total - self.count) * self.seconds / self.count
        moment = Moment(
            self.count, self.total, loss, score.compute(), rate, left, peak_memory(), self.waiting
        )
        self._write(
            {
                "kind": "train",
                "update": self.count,
                "epoch": self.stream.epoch,
                "loss": loss,
                **moment.figures,
            }
        )
        return moment

    def _log_valid(self) -> None:
        if self.prepared.valid:
            self.team.first_does(self._validate)
            self.rows += 1

    def _validate(self) -> None:
        found = scored(self.net, self.prepared.spec, self.prepared.valid, self.config)
        self._write(
            {"kind": "valid", "update": self.count, **found.metrics, "recordings": found.recordings}
        )

    def _write(self, row: dict[str, Any]) -> None:
        spent = {
            "seconds": round(self.seconds, 3),
            "waiting": round(self.waiting, 4),
            "peak_memory": peak_memory(),
        }
        self.folder.add_metrics({**row, **spent, "frames": self.frames})

    def _diverged(self, what: str) -> Never:
        raise RunError(f"{what} at update {self.count}: training diverged. {self._advice()}")

    def _advice(self) -> str:
        return (
            f"The last checkpoint is untouched; try a lower --lr (now {self.config.lr}) or --clip"
            f" (now {self.config.clip})"
        )

    def save(self) -> None:
        """Writes the model, then the checkpoint that says it was reached, with the places of all
        ranks.

        Raises:
            RunError: the weights are not finite, or the disk is full or not writable; the previous
                checkpoint is untouched.
        """
        places = self.team.gathered(copied(self._place()))
        self.team.first_does(lambda: self._save(places))

    def _place(self) -> dict[str, Any]:
        """Where this rank stands."""
        place = None if self._updates is None else self._updates.state_dict()
        return {
            "updates": place,
            "stream": self.stream.state_dict(),
            "entering": self.stream._entering_state(self.net) if place is None else None,
            "random": torch.get_rng_state(),
            "waited": self._waited + self.stream.wait_seconds,
        }

    def _save(self, places: list[dict[str, Any]]) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self.net.parameters()):
            self._diverged("the weights are not finite")
        content = {
            "net": dict(self.net.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            **(places[0] if self.team.count == 1 else {"ranks": places}),
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
            raise RunError(
                f"the checkpoint of update {self.count} could not be written ({error}); {kept}"
            ) from error

    def _load(self, saved: dict[str, Any]) -> None:
        place = self._place_in(saved)
        self._check_same_data(saved)
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.count, self.rows, self.frames, self.seconds, self._sum_steps = saved["counts"]
        self._sum.copy_(saved["sum"])
        self.finished = saved["finished"]
        self._waited = place.get("waited", 0.0)  # not in checkpoints of before it was measured
        self.stream.load_state_dict(place["stream"])
        if place["updates"] is None:
            # between two epochs: the next one may go on from the states of the last
            self.stream._start()
            if place.get("entering") is not None:
                self.stream._hand_over(place["entering"], self.net)
        else:
            self._updates = updates(self.net, self.stream, self.loss_fn, gradient=self.policy)
            self._updates.load_state_dict(place["updates"])
        torch.set_rng_state(place["random"])

    def _place_in(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Where this rank stood: a checkpoint of one process is the place itself."""
        places = saved.get("ranks", [saved])
        if len(places) != self.team.count:
            raise RunError(
                f"{self.folder.checkpoint}: holds the places of {len(places)}"
                f" rank{'' if len(places) == 1 else 's'}, each in its own share of the recordings,"
                f" and there {'is' if self.team.count == 1 else 'are'} {self.team.count} now: go on"
                f" with as many as before (strategy, devices and nodes in {self.folder.config})"
            )
        return places[self.team.rank]

    def _check_same_data(self, saved: dict[str, Any]) -> None:
        """The model's shape, classes and statistics, which the data decide, are those of the checkpoint."""
        mine, theirs = asdict(self.prepared.spec), saved["spec"]
        known = mine.keys() & theirs.keys()  # an older checkpoint tells less
        faults = [
            f"{key} were {theirs[key]!r} and are now {mine[key]!r}"
            for key in mine
            if key in known and theirs[key] != mine[key]
        ]
        if not faults:
            faults = [
                f"'{name}', a statistic of the training split, was {saved['net'][name].tolist()}"
                f" and is now {value.tolist()}"
                for name, value in self.net.named_buffers()
                if not torch.equal(saved["net"][name], value.cpu())
            ]
        if faults:
            raise DataError(
                f"the data of {self.folder.path} have changed since the run was started: "
                + "; ".join(faults)
            )


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


def begin(config: Config, team: Team = ALONE) -> Training:
    """A new run in a new folder.

    Args:
        config: its settings.
        team: the ranks that train it.

    Raises:
        RunError: the folder holds a run already.
        DataError, ConfigError: what is wrong with data or settings.
    """
    resolved = replace(config, data=str(Path(config.data).resolve()))
    team.first_does(lambda: _check(resolved))
    training = team.all_do(
        lambda: Training(resolved, prepare(resolved), Folder(Path(resolved.out)), team)
    )
    team.first_does(lambda: _create(resolved))
    return training


def _check(config: Config) -> None:
    policy_of(config)
    Folder.check_free(config)


def _create(config: Config) -> None:
    Folder.create(config)
