"""Training in one call: updates, validation, the best weights, a log, and resuming to the bit.

The loop of `tt.updates` with what a long training needs around it. All ranks of a process group do
the same; only the first writes.

Shapes: `B` lanes, `C` outputs, `N` valid steps.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from throughtime.app.run_folder import RunFolder, check_layout, to_cpu
from throughtime.carry.carried import Carried
from throughtime.distributed import RankError, Ranks, ranks_of
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
from throughtime.files import write_atomically
from throughtime.gradient import (
    Exact,
    LossFn,
    Policy,
    Update,
    UpdatePolicy,
    generators,
    set_generators,
)
from throughtime.metrics import Metric, as_metric
from throughtime.state import leaves
from throughtime.stream import Recording, Stream
from throughtime.stream.sources import Recordings, as_recordings
from throughtime.updates import Updates, updates

T = TypeVar("T")
Row: TypeAlias = Mapping[str, Any]
"""A line of the log: `kind` ("data", "train" or "valid"), `update`, and numbers by name."""
Validation: TypeAlias = Stream | Recordings | Callable[[], Evaluation]
_STEPS = 100  # of an update, where neither data nor policy say
_LOG_LINES = 200  # of a run
_ONE_PRESS = 1.0  # seconds: launchers pass on a signal that the terminal has sent already


def gathered(ranks: Ranks, value: T) -> list[T]:
    """The value of each rank, on all ranks; tensors come on the CPU from other ranks.

    Raises:
        RankError: a rank does not answer.
    """
    return [value] if ranks.count == 1 else ranks.gather(to_cpu(value))


def from_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on the first rank alone; all ranks return its result, when it has ended.

    Raises:
        RankError: a rank does not answer.
    """
    result: Any = work() if ranks.rank == 0 else None
    return gathered(ranks, result)[0]


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
        pending: those since the last line of the log.
        seconds: of the training so far, with validation, the log and checkpoints.
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
    pending: int = 0
    seconds: float = 0.0
    end: tuple[int | None, int | None] = (None, None)

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
        metrics: of validations, as for `tt.evaluate`.
        updates: stop after so many.
        epochs: stop after so many; default: 1, without `updates`.
        valid_every: updates between two validations, 0: only at the end; default: a fifth of all.
        patience: stop after so many validations without a better one; default: never.
        keep: whether the net gets the weights of the best validation at the end: highest
            "macro_f1" of the metrics, or lowest loss without it.
        logger: called with each line of the log, such as `print`: a dict with `kind`, `update`,
            `loss`, the metrics, and times in seconds. An error in it ends the training.
        out: a folder for `checkpoint.safetensors`, `model.safetensors` (the weights that are kept)
            and `metrics.jsonl`. A training that it holds goes on.

    Returns:
        How far the training came: `count` updates, the `best` one and its `score`.

    Raises:
        ConfigError: arguments that exclude each other.
        DataError: no step of an epoch counts, or the values of the recordings are others.
        RunError: the training diverges, the folder belongs to another net, optimizer, rate,
            recordings or `valid`, is in use, or cannot be written; the last checkpoint is
            untouched.
        KeyboardInterrupt: Ctrl-C, or SIGTERM, with `out`: after the update, and a checkpoint. A
            second one ends at once.

    Cost: that of `tt.updates` and `tt.evaluate`; with `keep="best"` a copy of the weights, and
    two in a checkpoint, which is written every 30 seconds.

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
    for name, value, least in (
        ("updates", updates, 1),
        ("epochs", epochs, 1),
        ("valid_every", valid_every, 0),
        ("patience", patience, 1),
    ):
        if value is not None:
            check_whole(name, value, least)
    for part, kind in ((stream, Stream), (optimizer, Optimizer), (schedule, LRScheduler | None)):
        if not isinstance(part, kind):
            raise ConfigError(f"tt.fit: got a {type(part).__name__}, expected {kind}")
    weights = {weight for group in optimizer.param_groups for weight in group["params"]}
    ranks = ranks_of(net, stream)
    faults = {
        f"updates={updates} and epochs={epochs}: give one of them": updates and epochs,
        f"keep={keep!r}: expected 'best' or 'last'": keep not in ("best", "last"),
        "patience= and ReduceLROnPlateau count validations; give recordings as valid=": (
            valid is None and (patience or isinstance(schedule, ReduceLROnPlateau))
        ),
        "schedule= changes the rate of another optimizer: make it of the one that is passed": (
            schedule is not None and schedule.optimizer is not optimizer
        ),
        "the optimizer has none of the net's weights, so nothing would be trained: make it of"
        " net.parameters()": weights.isdisjoint(net.parameters()),
    }
    if present := [fault for fault, wrong in faults.items() if wrong]:
        raise ConfigError("; ".join(present))
    if ranks.shards:
        raise ModelError("tt.fit saves no net that fully_shard has spread; write the loop yourself")
    # by epochs an estimate: the order moves their end
    total = updates or (epochs or 1) * updates_per_epoch(gradient, stream, ranks.count)
    folder = out if isinstance(out, RunFolder | None) else RunFolder(Path(out))
    parts = dict(folder.parts if folder else {}) or _parts_of(optimizer, schedule, loss_fn)
    parts["recordings"] = _named(stream.recordings)
    if valid is None or callable(valid):
        validate = cast("Callable[[], Evaluation] | None", valid)
    else:
        played = valid.recordings if isinstance(valid, Stream) else as_recordings(valid)
        parts["valid"] = _named(played)
        metric = None if metrics is None else as_metric(metrics)
        validate = partial(evaluate, net, valid, loss_fn, metrics=metric)
    training = _Training(
        net,
        stream,
        loss_fn,
        gradient,
        optimizer,
        schedule,
        validate,
        max(1, total // 5) if valid_every is None else valid_every,
        patience,
        keep == "best",
        logger,
        folder,
        total,
        ranks,
        parts,
        Fit(end=(updates, epochs)),
    )
    return training.run()


def updates_per_epoch(policy: Policy | UpdatePolicy, stream: Stream, ranks: int) -> int:
    """The number of updates in an epoch; an estimate if the data or the policy decide."""
    if isinstance(policy, Exact) and policy.cut_every is None:
        if stream.lanes * ranks == 1:
            return len(stream.recordings)
        return max(1, round(stream.steps / stream.steps_to_common_reset()))
    names = ("cut_every", "stride", "mean_horizon", "min")
    steps = (getattr(policy, name, None) for name in names)
    stride = next((n for n in steps if isinstance(n, int) and n > 0), _STEPS)
    return math.ceil(stream.steps / stride)


def _named(recordings: Iterable[Recording]) -> str:
    return ", ".join(f"{one.name} ({len(one)} steps)" for one in recordings)


def _parts_of(optimizer: Optimizer, schedule: LRScheduler | None, loss: object) -> dict[str, str]:
    """What a training must go on with, by name."""
    objects = {"optimizer": optimizer, "schedule": schedule, "loss": loss}
    parts = {k: getattr(v, "__qualname__", type(v).__name__) for k, v in objects.items()}
    for i, group in enumerate(optimizer.param_groups):
        parts |= {f"{k} of group {i}": repr(v) for k, v in group.items() if k != "params"}
    return parts


@dataclass
class _Training:
    """A training in progress."""

    net: Carried
    stream: Stream
    loss_fn: LossFn
    gradient: Policy | UpdatePolicy
    optimizer: Optimizer
    schedule: LRScheduler | None
    evaluate: Callable[[], Evaluation] | None
    valid_every: int
    patience: int | None
    keep_best: bool
    logger: Callable[[Row], object] | None
    folder: RunFolder | None
    total: int
    ranks: Ranks
    parts: dict[str, str]
    done: Fit
    best: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    position: Updates | None = None
    epoch_ended: bool = False
    stopped: float = math.inf  # when the first signal came

    def run(self) -> Fit:
        """Go on from the folder to the end."""
        self.loss, folder = torch.zeros((), device=self.ranks.device), self.folder
        with folder.locked() if folder is not None and self.ranks.rank == 0 else nullcontext():
            if folder is not None:
                self._open(folder)
            self.started = time.monotonic() - self.done.seconds
            if not self.done.finished:
                with self._stopped_by_signals():
                    self._train()
        if self.best:
            self.net.module.load_state_dict(self.best)
        return self.done

    # --- the loop ---

    def _train(self) -> None:
        done, saved = self.done, time.monotonic()
        if not done.rows:
            self._write("data", {} if self.folder is None else self.folder.facts)
        while not self._is_over():
            if (update := self._next()) is None:
                continue
            self._apply(update)
            if done.count % max(1, self.total // _LOG_LINES) == 0:
                self._log()
            scored = self.valid_every and done.count % self.valid_every == 0
            if scored and not done.is_over(self.stream.epoch):  # by epochs `total` is an estimate
                self._validate()
            stop, save = self._wishes(time.monotonic() - saved)
            if stop or save:
                self._save()
                saved = time.monotonic()
            if stop:
                raise KeyboardInterrupt(f"stopped at update {done.count}")
        self._save()
        if done.last < done.count:
            self._validate()
        done.finished = True
        self._save()

    def _is_over(self) -> bool:
        impatient = self.patience is not None and self.done.stale >= self.patience
        return impatient or self.done.is_over(self.stream.epoch)

    def _wishes(self, since: float) -> list[bool]:
        """Whether to stop, and whether to save, as any rank was told to or finds it due."""
        due = self.folder is not None and since >= self.folder.checkpoint_every
        wishes = [math.isfinite(self.stopped), due]
        return wishes if self.ranks.count == 1 else [*map(bool, self.ranks.total(wishes))]

    def _next(self) -> Update | None:
        """The next update, `None` at the end of an epoch; each starts from the initial state."""
        if self.position is None or self.epoch_ended:
            memory = None if self.position is None else self.position.policy_state
            self.position = self._new_updates(memory)
        try:
            update = next(self.position, None)
        except RankError:
            raise
        except RunError as error:  # such as a gradient that is not finite
            raise self._diverged(self.done.count + 1, str(error)) from error
        self.epoch_ended = update is None
        if self.epoch_ended and self.done.count == 0:
            raise DataError(
                "an epoch passed without a single step that counts: the warm_up of the stream, or"
                " missing targets, mask all of them"
            )
        return update

    def _new_updates(self, memory: Any = None) -> Updates:
        """The updates of an epoch; the policy may learn from epoch to epoch."""
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

    def _log(self) -> None:
        """Write a line."""
        loss, self.done.pending = (self.loss / self.done.pending).item(), 0
        self.loss.zero_()
        if not math.isfinite(loss):
            raise self._diverged(self.done.count, f"the loss is {loss}")
        row = {"updates": self.total, "epoch": self.stream.epoch, "loss": loss, "lr": self.rate}
        self._write("train", row)

    def _validate(self) -> None:
        """Write the scores; keep the weights if they are the best."""
        if self.evaluate is None:
            return
        result, done = self.evaluate(), self.done
        row = {"loss": result.loss, "steps": result.steps, **result.metrics}
        score = row["macro_f1"] if "macro_f1" in row else -row["loss"]
        score = gathered(self.ranks, score)[0]  # other processors may round otherwise
        self._write("valid", {**row, "recordings": result.recordings})
        done.last, done.stale = done.count, done.stale + 1
        if score > done.score:  # NaN is never better
            done.best, done.score, done.stale = done.count, score, 0
            if self.keep_best:
                self.best = to_cpu(dict(self.net.module.state_dict()))
        if isinstance(self.schedule, ReduceLROnPlateau):
            self.schedule.step(-score)

    def _write(self, kind: str, values: Row) -> None:
        done = self.done
        done.seconds, done.rows = time.monotonic() - self.started, done.rows + 1
        times = {"seconds": round(done.seconds, 3), "frames": done.frames}
        row = {"kind": kind, "update": done.count, **values, **times}
        if self.ranks.rank:
            return
        if self.folder is not None:
            self.folder.add_metrics(row)
        if self.logger is not None:
            self.logger(row)

    def _diverged(self, update: int, what: str) -> RunError:
        return RunError(
            f"training diverged at update {update}: {what.rstrip('.')}. A checkpoint is untouched;"
            f" take a lower learning rate (now {self.optimizer.param_groups[0]['lr']}), or clip the"
            " gradient to a smaller norm"
        )

    # --- checkpoints ---

    def _save(self) -> None:
        """Write model and checkpoint with the positions of all ranks."""
        if (folder := self.folder) is None:
            return
        position = {
            "updates": None if self.position is None else self.position.state_dict(),
            "stream": self.stream.state_dict(),
            "random": generators(self.ranks.device),
        }
        self.done.seconds = time.monotonic() - self.started
        content = {
            "net": dict(self.net.module.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "parts": self.parts,
            "best": dict(self.best),
            "loss": self.loss,
            "done": asdict(self.done),
            "ranks": gathered(self.ranks, position),
        }
        if not all(bool(weight.isfinite().all()) for weight in self.net.parameters()):
            raise self._diverged(self.done.count, "the weights are not finite")
        from_first(self.ranks, lambda: folder.save(content, self._model(folder)))

    def _model(self, folder: RunFolder) -> bytearray:
        """The content of the model file: the weights that are kept, and of which update."""
        if self.best:
            return folder.model_bytes(self.best, self.done.best)
        return folder.model_bytes(self.net.module.state_dict(), self.done.count)

    def _open(self, folder: RunFolder) -> None:
        """Go on from the checkpoint of the folder if it has one."""

        def tidy() -> int:
            rows = folder.truncate_metrics(self.done.rows)
            if saved:  # a kill or damage may have left another model, or none
                write_atomically(folder.model, self._model(folder))
            return rows

        saved = folder.read_checkpoint()
        try:
            if saved:
                self._restore(folder, saved)
        except ThroughtimeError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise RunError(
                f"{folder.checkpoint}: not a checkpoint of this run ({type(error).__name__}:"
                f" {one_line(error)}); put back a copy, or begin the run again in another folder"
            ) from error
        self.done.rows = from_first(self.ranks, tidy)

    def _restore(self, folder: RunFolder, saved: Mapping[str, Any]) -> None:
        """Take over a checkpoint."""
        count, ranks, before = self.ranks.count, len(saved["ranks"]), saved["parts"]
        if ranks != count:
            raise RunError(
                f"{folder.checkpoint}: holds the positions of {counted(ranks, 'rank')}, each in its"
                f" own share of the recordings, not of {count}: start as many by torchrun"
            )
        # another torch may have other settings
        if changed := sorted(k for k, v in before.items() if self.parts.get(k, v) != v):
            values = (f"{name} was {before[name]} and is {self.parts[name]}" for name in changed)
            raise RunError(
                f"{folder.path}: has changed since the checkpoint: {'; '.join(values)}; put it back"
                " as it was, or begin another run in another folder"
            )
        position, module = saved["ranks"][self.ranks.rank], self.net.module
        self.stream.load_state_dict(position["stream"])  # before all that other data change
        check_layout(saved["net"], module.state_dict())
        module.load_state_dict(saved["net"])
        self.best = saved["best"] if self.keep_best else {}
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(saved["schedule"])
        end, self.done = self.done.end, Fit(**saved["done"])
        if end != self.done.end:
            self.done.end, self.done.stale = end, 0
            self.done.finished = self.done.is_over(position["stream"]["epoch"])
        self.loss = saved["loss"].to(self.ranks.device)
        if position["updates"] is not None:
            self.position = self._new_updates()
            self.position.load_state_dict(position["updates"])
            if self.position.state is not None:  # without this call the next sums round otherwise
                initial = self.net.initial_state(self.stream.lanes)
                check_layout(dict(leaves(self.position.state)), dict(leaves(initial)))
        set_generators(position["random"], self.ranks.device)

    @contextmanager
    def _stopped_by_signals(self) -> Generator[None]:
        """Save and stop at the first signal, stop at once at a second one.

        Several signals of one press of a key count as one.
        """

        def stop(*_: object) -> None:
            now = time.monotonic()
            if now - self.stopped > _ONE_PRESS:
                raise KeyboardInterrupt
            self.stopped = min(now, self.stopped)

        main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if main and self.folder is not None else ()
        before = {number: signal.signal(number, stop) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
