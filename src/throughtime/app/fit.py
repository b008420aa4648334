"""Training in one call: updates, validation, the best weights, a log, and resuming to the bit.

The loop of `tt.updates` with what a long training needs around it. All ranks of a process group do
the same; only the first writes.

Shapes: `B` lanes, `C` outputs, `N` valid steps.
"""

import math
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from throughtime._device import generators, set_generators
from throughtime._files import write_atomically
from throughtime.app.distributed import Team
from throughtime.app.policy import updates_per_epoch
from throughtime.app.run_folder import RunFolder, check_layout, to_cpu
from throughtime.carry.carried import Carried
from throughtime.distributed import RankError, ranks_of
from throughtime.errors import (
    ConfigError,
    DataError,
    ModelError,
    RunError,
    ThroughtimeError,
    check_whole,
    counted,
    one_line,
)
from throughtime.evaluation import Evaluation, evaluate
from throughtime.gradient import LossFn, Policy, Update, UpdatePolicy
from throughtime.metrics import Metric, as_metric
from throughtime.state import leaves
from throughtime.stream import Stream
from throughtime.stream.sources import Recordings
from throughtime.updates import Updates, updates

Row: TypeAlias = Mapping[str, Any]
"""A line of the log: `kind` ("data", "train" or "valid"), `update`, and numbers by name."""
Validation: TypeAlias = Stream | Recordings | Callable[[], Evaluation]
_LOG_LINES = 200  # of a run
_FIRST_SAVE = 1.0  # seconds of a run until its first checkpoint
_ONE_PRESS = 1.0  # seconds: launchers pass on a signal that the terminal has sent already


@dataclass
class Fit:
    """What `tt.fit` returns, and how far a training has come.

    Attributes:
        count: updates so far.
        best: the update of the best validation; 0 without one.
        score: of that validation, higher is better.
        last: the update of the last validation; 0 before the first.
        stale: validations since the best.
        finished: whether the training has reached its end, or its patience has ended.
        rows: lines of the log.
        frames: valid steps of all updates.
        training: seconds of the updates.
        aside: seconds of validation, the log and checkpoints.
        waited: of them all, seconds in which data were waited for.
        pending: valid steps since the last line of the log.
        end: updates and epochs that were asked for.
    """

    count: int = 0
    best: int = 0
    score: float = -math.inf
    last: int = 0
    stale: int = 0
    finished: bool = False
    rows: int = 0
    frames: int = 0
    training: float = 0.0
    aside: float = 0.0
    waited: float = 0.0
    pending: int = 0
    end: tuple[int | None, int | None] = (None, None)

    @property
    def seconds(self) -> float:
        """Of the training so far."""
        return self.training + self.aside

    @classmethod
    def of_checkpoint(
        cls, saved: Mapping[str, Any], updates: int | None, epochs: int | None, *, again: bool
    ) -> "Fit":
        """That of a training which goes on to this end; `again`, though its patience has ended."""
        done = cls(**saved["done"])
        if (updates, epochs) != tuple(done.end) or again:
            done.end, done.stale = (updates, epochs), 0
            done.finished = done.is_over(saved["ranks"][0]["stream"]["epoch"])
        return done

    def is_over(self, epoch: int) -> bool:
        """Whether the training is at its end in this epoch of its stream."""
        updates, epochs = self.end
        return epoch >= (epochs or 1) if updates is None else self.count >= updates


def fit(
    net: Carried,
    stream: Stream,
    loss_fn: LossFn,
    *,
    gradient: Policy | UpdatePolicy,
    optimizer: Optimizer,
    schedule: LRScheduler | None = None,
    valid: Validation | None = None,
    metrics: Metric | torch.nn.Module | None = None,
    updates: int | None = None,
    epochs: int | None = None,
    valid_every: int | None = None,
    patience: int | None = None,
    keep: Literal["best", "last"] = "best",
    logger: Callable[[Row], object] | None = None,
    out: str | Path | RunFolder | None = None,
) -> Fit:
    r"""Train to an end, validate on the way, and leave the best weights in the net.

    `throughtime train` calls it. With `out` the same call goes on where it was killed or stopped,
    to the bit. Take `tt.updates` for a loop of your own: several losses or optimizers, gradient
    scaling, accumulation.

    Args:
        net: made by `tt.carry`.
        stream: of the recordings to train on.
        loss_fn: as for `tt.updates`.
        gradient: how credit flows back, such as `tt.Truncated(stride=100)`.
        optimizer: of the net's weights. `tt.optim.AdamW(..., max_norm=1.0)` clips the gradient.
        schedule: of `torch.optim.lr_scheduler`; stepped after each update, `ReduceLROnPlateau`
            after each validation with its score, where lower is better.
        valid: recordings or a stream to validate on; or a function that returns an `Evaluation`.
        metrics: as for `tt.evaluate`.
        updates: stop after so many.
        epochs: stop after so many; default: 1, without `updates`.
        valid_every: updates between two validations, 0: only at the end; default: a fifth of all.
        patience: stop after so many validations without a better one; default: never.
        keep: whether the net gets the weights of the best validation at the end: highest
            "macro_f1" of the metrics, or lowest loss without it.
        logger: called with each line of the log, such as `print`: a dict with `kind`, `update`,
            `loss`, the metrics, and times in seconds. An error in it ends the training.
        out: a folder for `checkpoint.safetensors`, `model.safetensors` (the weights that are kept)
            and `metrics.jsonl`. A training that it holds goes on; on other recordings in `valid`
            the best begins anew.

    Returns:
        How far the training came: `count` updates, the `best` one and its `score`.

    Raises:
        ConfigError: arguments that exclude each other.
        DataError: no step of an epoch counts, or the folder belongs to other recordings.
        RunError: the training diverges, the folder belongs to another net or optimizer, is in use,
            or cannot be written; the last checkpoint is untouched.
        KeyboardInterrupt: Ctrl-C, or SIGTERM, with `out`: after the update, and a checkpoint. A
            second one ends at once.

    Cost: that of `tt.updates` and `tt.evaluate`; with `keep="best"` a copy of the weights, and
    two in a checkpoint. A checkpoint is written after a second, then ever more rarely, at last
    every 30 seconds.

    Example:
        >>> import torch, throughtime as tt
        >>> recordings = [{"inputs": torch.randn(50, 3), "targets": torch.randn(50)}] * 3
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> result = tt.fit(
        ...     net,
        ...     tt.Stream(recordings[:2], lanes=2, chunk=10, seed=0),
        ...     torch.nn.MSELoss(),
        ...     gradient=tt.Truncated(stride=10),
        ...     optimizer=tt.optim.AdamW(net.parameters(), lr=0.01, max_norm=1.0),
        ...     valid=recordings[2:],
        ...     epochs=4,
        ... )
        >>> result.count, result.finished
        (20, True)
    """
    if valid is None and (patience is not None or isinstance(schedule, ReduceLROnPlateau)):
        raise ConfigError(
            "patience= and ReduceLROnPlateau count validations; give recordings as valid="
        )
    if updates is not None and epochs is not None:
        raise ConfigError(f"updates={updates} and epochs={epochs}: give one of them")
    if keep not in ("best", "last"):
        raise ConfigError(f"keep={keep!r}: expected 'best' or 'last'")
    for name, value, least in (
        ("updates", updates, 1),
        ("epochs", epochs, 1),
        ("valid_every", valid_every, 0),
        ("patience", patience, 1),
    ):
        if value is not None:
            check_whole(name, value, least)
    _check_parts(net, stream, optimizer, schedule)
    ranks = ranks_of(net, stream)
    if ranks.shards:
        raise ModelError("tt.fit saves no net that fully_shard has spread; write the loop yourself")
    # by epochs an estimate: the order moves their end
    total = updates or (epochs or 1) * updates_per_epoch(gradient, stream, ranks.count)
    training = _Training(
        net,
        stream,
        loss_fn,
        gradient,
        optimizer,
        schedule,
        valid,
        None if metrics is None else as_metric(metrics),
        (updates, epochs),
        max(1, total // 5) if valid_every is None else valid_every,
        patience,
        keep == "best",
        logger,
        out if isinstance(out, RunFolder | None) else RunFolder(Path(out)),
        total,
        Team(ranks.rank, ranks.count, ranks.device),
    )
    return training.run()


def _check_parts(
    net: Carried, stream: Stream, optimizer: Optimizer, schedule: LRScheduler | None
) -> None:
    """Refuse objects of another kind, and an optimizer of other weights."""
    for name, value, kind in (
        ("stream", stream, Stream),
        ("optimizer", optimizer, Optimizer),
        ("schedule", schedule, LRScheduler | None),
    ):
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", "LRScheduler of torch.optim.lr_scheduler")
            raise ConfigError(f"{name} is a {type(value).__name__}, expected a {expected}")
    weights = {weight for group in optimizer.param_groups for weight in group["params"]}
    if weights.isdisjoint(net.parameters()):
        raise ConfigError(
            "the optimizer has none of the net's weights, so nothing would be trained: make it of"
            " net.parameters()"
        )


@dataclass
class _Training:
    """A training in progress."""

    net: Carried
    stream: Stream
    loss_fn: LossFn
    gradient: Policy | UpdatePolicy
    optimizer: Optimizer
    schedule: LRScheduler | None
    valid: Validation | None
    metrics: Metric | None
    end: tuple[int | None, int | None]
    valid_every: int
    patience: int | None
    keep_best: bool
    logger: Callable[[Row], object] | None
    folder: RunFolder | None
    total: int
    team: Team
    done: Fit = field(default_factory=Fit)
    best: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    position: Updates | None = None
    epoch_ended: bool = False
    waited: float = 0.0  # before this process
    stopping: bool = False

    def run(self) -> Fit:
        """Go on from the folder to the end."""
        self.rules = [_rule(group) for group in self.optimizer.param_groups]
        self.loss = torch.zeros((), device=self.team.device)
        self.done.end = self.end
        try:
            if self.folder is not None:
                self._open(self.folder)
            if not self.done.finished:
                with self._stopped_by_signals():
                    self._train()
        finally:
            if self.folder is not None:
                self.folder.unlock()
        if self.best:
            self.net.module.load_state_dict(self.best)
        return self.done

    # --- the loop ---

    def _train(self) -> None:
        done = self.done
        self.mark = saved = time.monotonic()
        if not done.rows:
            self._write("data", {} if self.folder is None else self.folder.facts)
        while not self._is_over():
            if (update := self._next()) is None:
                continue
            self._apply(update)
            done.training += self._passed()
            if done.count % max(1, self.total // _LOG_LINES) == 0:
                self._log(update)
            scored = self.valid_every and done.count % self.valid_every == 0
            if scored and not done.is_over(self.stream.epoch):  # by epochs `total` is an estimate
                self._validate()
            due = self.mark - saved >= self._save_interval()
            stop, save = self.team.any_of(self.stopping, self.team.is_first and due)
            if stop or save:
                self._save()
                saved = time.monotonic()
            if stop:
                raise KeyboardInterrupt(f"stopped at update {done.count}")
            done.aside += self._passed()
        self._save()
        if done.last < done.count:
            self._validate()
        done.finished = True
        done.aside += self._passed()
        self._save()

    def _passed(self) -> float:
        """Seconds since the last call."""
        before, self.mark = self.mark, time.monotonic()
        return self.mark - before

    def _is_over(self) -> bool:
        impatient = self.patience is not None and self.done.stale >= self.patience
        return impatient or self.done.is_over(self.stream.epoch)

    def _next(self) -> Update | None:
        """The next update, `None` at the end of an epoch; each starts from the initial state.

        An error on one rank ends all of them here.
        """
        if self.position is None or self.epoch_ended:
            self.position, self.epoch_ended = self._new_updates(self.position), False
        try:
            update = next(self.position, None)
        except Exception as error:
            shown = error
            if isinstance(error, RunError):  # such as a gradient that is not finite
                shown = self._diverged(self.done.count + 1, str(error))
                shown.__cause__ = error
            self.team.raise_together(None if isinstance(error, RankError) else shown)
            self.team.raise_together(error)  # every rank has a RankError: they differ
            raise
        self.epoch_ended = update is None
        if self.epoch_ended and self.done.count == 0:
            self.team.raise_together(
                DataError(
                    "an epoch passed without a single step that counts: the warm_up of the stream,"
                    " or missing targets, mask all of them"
                )
            )
        return update

    def _new_updates(self, previous: Updates | None = None) -> Updates:
        """The updates of the next epoch; the policy may learn from epoch to epoch."""
        memory = None if previous is None else previous.policy_state
        return updates(
            self.net, self.stream, self.loss_fn, gradient=self.gradient, policy_state=memory
        )

    def _apply(self, update: Update) -> None:
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None and not isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step()
        self.done.count += 1
        self.done.frames += update.steps
        self.done.pending += update.steps
        self.loss = self.loss + update.loss * update.steps

    # --- what it writes ---

    def _log(self, update: Update) -> None:
        """Write a line; its metrics are those of the last update's steps, on all ranks."""
        loss, self.done.pending = (self.loss / self.done.pending).item(), 0
        self.loss.zero_()
        if not math.isfinite(loss):
            self.team.raise_together(self._diverged(self.done.count, f"the loss is {loss}"))
        row: dict[str, Any] = {"updates": self.total, "epoch": self.stream.epoch, "loss": loss}
        row["lr"] = self.rate
        if self.metrics is not None:
            metric, pairs = self.metrics.new(), update.chunk.valid_pairs(update.outputs)
            for outputs, targets in self.team.gather(pairs):
                metric.update(outputs.cpu(), targets.cpu())
            row |= metric.compute()
        self._write("train", row)

    def _validate(self) -> None:
        """Write the scores; keep the weights if they are the best."""
        if self.valid is None:
            return
        result = self.team.on_all(self._evaluate)
        done, row = self.done, {"loss": result.loss, **result.metrics}
        score = row["macro_f1"] if "macro_f1" in row else -row["loss"]
        score = self.team.gather(score)[0]  # other processors may round otherwise
        self._write("valid", {**row, "recordings": result.recordings})
        done.last, done.stale = done.count, done.stale + 1
        if score > done.score:  # NaN is never better
            done.best, done.score, done.stale = done.count, score, 0
            if self.keep_best:
                self.best = to_cpu(dict(self.net.module.state_dict()))
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(-score)

    def _evaluate(self) -> Evaluation:
        if callable(self.valid):
            return cast("Evaluation", self.valid())
        return evaluate(self.net, self.valid, self.loss_fn, metrics=self.metrics)

    def _write(self, kind: str, values: Row) -> None:
        done = self.done
        done.waited = self.waited + self.stream.wait_seconds
        row = {
            "kind": kind,
            "update": done.count,
            **values,
            "seconds": round(done.seconds, 3),
            "training_seconds": round(done.training, 3),
            # a clock that was set back must not show -0 %
            "waiting": round(max(0.0, done.waited) / max(done.seconds, 1e-9), 4),
            "peak_memory": peak_memory(),
            "frames": done.frames,
        }
        done.rows += 1

        def write() -> None:
            if self.folder is not None:
                self.folder.add_metrics(row)
            if self.logger is not None:
                self.logger(row)

        self.team.on_first(write)

    def _diverged(self, update: int, what: str) -> RunError:
        saved = self.folder is not None and self.folder.checkpoint.is_file()
        last = "The last checkpoint is untouched" if saved else "There is no checkpoint yet"
        return RunError(
            f"training diverged at update {update}: {what.rstrip('.')}. {last}; take a lower"
            f" learning rate (now {self.optimizer.param_groups[0]['lr']}), or clip the gradient to"
            " a smaller norm"
        )

    # --- checkpoints ---

    def _save_interval(self) -> float:
        """Seconds between two checkpoints: half as long as the run so far, up to the setting.

        So a kill soon after the start loses a second, or a third of the run.
        """
        most = math.inf if self.folder is None else self.folder.checkpoint_every
        return min(most, max(_FIRST_SAVE, self.done.seconds / 2))

    def _save(self) -> None:
        """Write model and checkpoint with the positions of all ranks."""
        if (folder := self.folder) is None:
            return
        position = {
            "updates": None if self.position is None else self.position.state_dict(),
            "stream": self.stream.state_dict(),
            "random": generators(self.team.device),
        }
        positions = self.team.gather(position)
        self.team.on_first(lambda: self._save_first(folder, positions))

    def _save_first(self, folder: RunFolder, positions: list[dict[str, Any]]) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self.net.parameters()):
            raise self._diverged(self.done.count, "the weights are not finite")
        content = {
            "net": dict(self.net.module.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "rules": self.rules,
            "parts": self._parts(),
            "valid": self.validation,
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "best": dict(self.best),
            "loss": self.loss,
            "done": asdict(self.done),
            "ranks": positions,
        }
        folder.save(content, self._model(folder), self.done.count)

    def _model(self, folder: RunFolder) -> bytearray:
        """The content of the model file: the weights that are kept, and of which update."""
        weights, update = self.net.module.state_dict(), self.done.count
        if self.best:
            weights, update = self.best, self.done.best
        return folder.model_bytes(weights, update, 0 if self.done.finished else self.total)

    def _open(self, folder: RunFolder) -> None:
        """Lock the folder, and go on from its checkpoint if it has one."""

        def tidy() -> int:
            rows = folder.truncate_metrics(self.done.rows)
            if saved is not None:  # a kill or damage may have left another model, or none
                write_atomically(folder.model, self._model(folder))
            return rows

        self.team.on_first(folder.lock)
        saved = self.team.on_all(lambda: self._restored(folder))
        self.done.rows = self.team.on_first(tidy)

    def _restored(self, folder: RunFolder) -> Mapping[str, Any] | None:
        """Take over the checkpoint of the folder."""
        saved = folder.read_checkpoint()
        try:
            if saved is not None:
                self._restore(folder, saved)
        except ThroughtimeError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise RunError(
                f"{folder.checkpoint}: not a checkpoint of this run ({type(error).__name__}:"
                f" {one_line(error)}); put back a copy, or begin the run again in another folder"
            ) from error
        return saved

    def _restore(self, folder: RunFolder, saved: Mapping[str, Any]) -> None:
        count, ranks = self.team.count, len(saved["ranks"])
        if ranks != count:
            raise RunError(
                f"{folder.checkpoint}: holds the positions of {counted(ranks, 'rank')}, each in its"
                f" own share of the recordings, and there {'is' if count == 1 else 'are'} {count}"
                " now: start as many as before by torchrun"
            )
        for name, kind in self._parts().items():
            if (before := saved["parts"][name]) != kind:
                raise RunError(
                    f"the folder holds a training whose {name} is {before}, and it is {kind} now:"
                    " give the same one, or another out="
                )
        position = saved["ranks"][self.team.rank]
        expected = self.net.module.state_dict()
        check_layout(saved["net"], expected)
        self.net.module.load_state_dict(saved["net"])
        if saved["best"]:
            check_layout(saved["best"], expected)
        self.best = saved["best"] if self.keep_best else {}
        self._restore_optimizer(saved)
        self.done = Fit.of_checkpoint(saved, *self.end, again=folder.patient)
        if saved["valid"] != self.validation and self.valid is not None and not self.done.finished:
            self.best, self.done.best, self.done.score, self.done.stale = {}, 0, -math.inf, 0
        self.loss, self.waited = saved["loss"].to(self.team.device), self.done.waited
        self.stream.load_state_dict(position["stream"])
        if position["updates"] is not None:
            self.position = self._new_updates()
            self.position.load_state_dict(position["updates"])
            if self.position.state is not None:
                initial = self.net.initial_state(self.stream.lanes)
                check_layout(dict(leaves(self.position.state)), dict(leaves(initial)))
        set_generators(position["random"], self.team.device)

    def _restore_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Its state, and its rules, such as the rate that a schedule has set.

        A rule that the user has changed since the training began stays as the user has it.
        """
        parameters = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for i, values in saved["optimizer"]["state"].items():
            for name in (name for name, value in values.items() if value.ndim):
                check_layout({name: values[name]}, {name: parameters[i]})
        groups = saved["optimizer"]["param_groups"]
        for rules, before, group in zip(self.rules, saved["rules"], groups, strict=True):
            group |= {name: rule for name, rule in rules.items() if before.get(name) != rule}
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.schedule is not None:
            own = {k: v for k, v in saved["schedule"].items() if k != "base_lrs"}
            self.schedule.load_state_dict(self.schedule.state_dict() | own)

    def _parts(self) -> dict[str, str]:
        """The kinds of the objects that a training must go on with."""
        parts = {"optimizer": self.optimizer, "schedule": self.schedule, "loss": self.loss_fn}
        return {k: getattr(v, "__qualname__", type(v).__name__) for k, v in parts.items()}

    @cached_property
    def validation(self) -> str:
        """What the scores are of: a checksum of the recordings to validate on."""
        if self.valid is None or callable(self.valid):
            return ""
        valid = self.valid
        stream = valid if isinstance(valid, Stream) else Stream(valid, 1, 1, rank=0, ranks=1)
        state = stream.state_dict() | {"rank": 0, "epoch": 0, "position": 0}
        return f"{zlib.crc32(repr(state).encode()):08x}"

    @contextmanager
    def _stopped_by_signals(self) -> Generator[None]:
        """Save and stop at the first signal, stop at once at a second one.

        Several signals of one press of a key count as one.
        """
        times: list[float] = []

        def stop(*_: object) -> None:
            times.append(time.monotonic())
            if times[-1] - times[0] > _ONE_PRESS:
                raise KeyboardInterrupt
            self.stopping = True

        main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if main and self.folder is not None else ()
        before = {number: signal.signal(number, stop) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _rule(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group of weights."""
    return {name: value for name, value in group.items() if name != "params"}


def peak_memory() -> int | None:
    """Bytes of resident memory at its highest; `None` on Windows, which does not say."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
