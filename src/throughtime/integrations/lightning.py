"""Lightning 2.6: a module that trains on a stream, under any gradient policy.

A training step makes many updates, and the state is carried from one to the next. A recipe in
docs/how-to/migrating/lightning-1.9.md replaces `truncated_bptt_steps` of Lightning 1.9.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

# ruff: noqa: ARG002  # Lightning passes every argument of a hook by name

import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import ConfigError, DataError, MissingExtraError, RunError
from throughtime.evaluation import Evaluator
from throughtime.gradient import LossFn, Policy, Update, generators, set_generators
from throughtime.integrations.loader import Loader, StreamBatch, as_stream_batch
from throughtime.updates import Updates

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "throughtime.integrations.lightning needs Lightning: pip install 'throughtime[lightning]'"
    ) from error

__all__ = ["Loader", "StreamModule"]

CHECKPOINT_KEY = "throughtime"


class StreamModule(pl.LightningModule):
    """A carried net that a Trainer trains on a `tt.Stream`.

    Write `configure_optimizers`, and hooks as you like. The Trainer gets `Loader(stream,
    chunks=20)` as its dataloader: a training step makes all updates of so many chunks, and each is
    one of Lightning's global steps. Validation, test and prediction run their streams chunk by
    chunk, each with a state of its own. Checkpoints hold the carried state and the position of
    every rank: a resumed run continues to the bit. Under the strategy "ddp" each rank reads its own
    lanes, and `tt.updates` adds gradients up, once per update.

    Logged are `train_loss`, `val_loss` and `test_loss`, means over valid steps, and the metrics, as
    in `val_macro_f1`.

    Args:
        net: made by `tt.carry`; it is `self.net`.
        loss_fn: as for `tt.updates`.
        gradient: `tt.Truncated(...)` or another policy.
        clip: norm to which the gradient is clipped; Lightning's own `gradient_clip_val` needs one
            update per training step.
        accumulate: as for `tt.updates`.
        schedule: whether schedulers of interval "step" step after every "update" or every "batch"
            (training step).
        monitor: the logged value that a `ReduceLROnPlateau` follows.
        metrics: for validation and test, as for `tt.evaluate`.

    Raises:
        ConfigError: a setting out of its range.

    Cost: Lightning's own, once per training step except for the optimizer's step;
    docs/how-to/lightning.md has measurements.

    Example:
        >>> import torch, throughtime as tt
        >>> from lightning.pytorch import Trainer
        >>> from throughtime.integrations.lightning import Loader, StreamModule
        >>> class Beats(StreamModule):
        ...     def configure_optimizers(self):
        ...         return torch.optim.Adam(self.parameters())
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> module = Beats(net, torch.nn.MSELoss(), gradient=tt.Truncated(stride=10, horizon=20))
        >>> recording = {"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}
        >>> train, valid = (tt.Stream(recording, lanes=1, chunk=10) for _ in range(2))
        >>> off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        >>> trainer = Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(off, False))
        >>> trainer.fit(module, Loader(train, chunks=5), Loader(valid, chunks=5))
        >>> trainer.global_step
        5
    """

    def __init__(
        self,
        net: Carried,
        loss_fn: LossFn,
        *,
        gradient: Policy,
        clip: float | None = None,
        accumulate: int = 1,
        schedule: Literal["update", "batch"] = "update",
        monitor: str = "val_loss",
        metrics: Any = None,
    ) -> None:
        super().__init__()
        if schedule not in ("update", "batch") or (clip is not None and not clip > 0):
            raise ConfigError(
                f"schedule={schedule!r}, clip={clip!r}: expected schedule 'update' or 'batch', and"
                " a clip above 0 or None"
            )
        self.automatic_optimization = False  # a training step makes many updates
        self.net, self.loss_fn, self.gradient = net, loss_fn, gradient
        self.clip, self.accumulate, self.metrics = clip, accumulate, metrics
        self.schedule, self.monitor = schedule, monitor
        self._updates: Updates | None = None
        self._policy_state: Any = None  # of the epoch before
        self._epoch_over = self._optimizer_stepped = True
        self._loaded_positions: list[dict[str, Any]] | None = None
        self._training_stream: tt.Stream | None = None
        self._evaluators: dict[tuple[str, int], tuple[tt.Stream, Evaluator]] = {}
        self._predictors: dict[int, tt.Predictor] = {}

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer; attaching one adds the callback that does the module's own work."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        pl.LightningModule.trainer.__set__(self, trainer)
        if trainer is not None and not any(
            isinstance(c, _StreamHooks) for c in _callbacks(trainer)
        ):
            _callbacks(trainer).insert(0, _StreamHooks())

    def on_update(self, update: Update) -> None:
        """Called after every update, before its optimizer step; for logging of your own."""

    def training_step(self, batch: StreamBatch, batch_idx: int) -> dict[str, Tensor] | None:
        """Make all updates of a batch.

        It ends early when a checkpoint is due; the next step then makes the rest.
        """
        self._begin_batch(as_stream_batch(batch))
        optimizer, trainer = self.optimizers(), self.trainer
        loss, steps = torch.zeros((), device=self.device), 0
        while (self._is_behind or not batch.is_finished) and not _reached_max_steps(trainer):
            update = self._next_update()
            if update is None:
                if not self._is_behind:
                    break
                self._begin_batch(batch)
                continue
            self.on_update(update)
            optimizer.step()  # pyright: ignore[reportAttributeAccessIssue]  # `_check_trainer`: one
            self._optimizer_stepped = True
            optimizer.zero_grad()  # pyright: ignore[reportAttributeAccessIssue]
            self._schedule_after("update", trainer.global_step)
            loss, steps = loss + update.loss * update.steps, steps + update.steps
            if not (batch.is_last or self._is_behind) and _checkpoint_is_due(trainer):
                break
        if _reached_max_steps(trainer) and not batch.stream.remaining(1):
            # max_steps fell on the last update of the epoch: end it, for the checkpoint
            self._next_update()
        if not steps:
            return None
        self._schedule_after("batch", batch_idx + 1)
        mean = loss / steps
        logged: dict[str, Any] = {"on_step": True, "on_epoch": True, "prog_bar": True}
        self.log("train_loss", mean, batch_size=steps, sync_dist=True, **logged)
        return {"loss": mean}

    def validation_step(self, batch: StreamBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Evaluate a batch, with a state of its own."""
        self._evaluate("val", as_stream_batch(batch), dataloader_idx)

    def test_step(self, batch: StreamBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As in validation."""
        self._evaluate("test", as_stream_batch(batch), dataloader_idx)

    def predict_step(self, batch: StreamBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """The outputs `(T, B, C)` of a batch."""
        if as_stream_batch(batch).index == 0:
            self._predictors[dataloader_idx] = tt.Predictor(self.net, batch.stream.lanes)
        predictor = self._predictors[dataloader_idx]
        outputs = [predictor._run_chunk(chunk) for chunk in batch.chunks()]
        empty = torch.empty(0, batch.stream.lanes, device="cpu")
        return torch.cat(outputs).cpu() if outputs else empty

    def _next_update(self) -> Update | None:
        update = None if self._updates is None else next(self._updates, None)
        self._epoch_over = self._optimizer_stepped = update is None
        return update

    def _begin_batch(self, batch: StreamBatch) -> None:
        """Start the updates of an epoch with its first batch, after any that a checkpoint left."""
        first, self._training_stream = batch.index == 0, batch.stream
        if self._updates is None or (first and self._epoch_over):
            may_resume, self._epoch_over = self._updates is None, False
            self._updates = self._new_updates(batch)
            if may_resume:
                self._resume(self._updates)
        if first and batch.stream.position and self.trainer.num_training_batches < batch.count:
            # limit_train_batches cut the epoch before short: this one has an order of its own
            batch.stream._skip_epoch()
            self._updates = self._new_updates(batch)
        # max_steps ended the training before within the last batch of an epoch
        self._is_behind = first and batch.stream.position > 0  # Lightning has ended that epoch

    def _forget_updates(self) -> None:
        """Forget the updates but keep the state of their policy, such as Adaptive's horizon."""
        if self._updates is not None:
            self._policy_state, self._updates = self._updates.policy_state, None

    def _new_updates(self, batch: StreamBatch) -> Updates:
        self._forget_updates()
        return tt.updates(
            self.net,
            batch.stream,
            self.loss_fn,
            gradient=self.gradient,
            policy_state=self._policy_state,
            scaler=getattr(self.trainer.precision_plugin, "scaler", None),
            accumulate=self.accumulate,
        )

    def _evaluate(self, kind: str, batch: StreamBatch, index: int) -> None:
        if batch.stream is self._training_stream and self.trainer.state.fn == TrainerFn.FITTING:
            raise DataError(
                "the stream of the validation is the one that is trained on: running it would move"
                " the training. Make two"
            )
        if batch.index == 0:
            evaluator = Evaluator(self.net, self.loss_fn, metrics=self.metrics)
            evaluator.check(batch.stream)
            self._evaluators[kind, index] = batch.stream, evaluator
        for chunk in batch.chunks():
            self._evaluators[kind, index][1].add(chunk)

    def _log_evaluations(self, kind: str) -> None:
        keys = [key for key in self._evaluators if key[0] == kind]
        for key in keys:
            stream, evaluator = self._evaluators.pop(key)
            result = evaluator.result(stream)
            suffix = f"/dataloader_idx_{key[1]}" if len(keys) > 1 else ""
            values = {"loss": result.loss, **result.metrics}
            named = {f"{kind}_{name}{suffix}": value for name, value in values.items()}
            self.log_dict(named, prog_bar=True, sync_dist=True, add_dataloader_idx=False)

    def _schedule_after(self, event: str, count: int) -> None:
        if event == self.schedule:
            self._step_schedulers("step", count)

    def _step_schedulers(self, interval: str, count: int) -> None:
        """Step those of this interval whose frequency divides the count of updates or epochs.

        Lightning leaves this to the module under manual optimization.
        """
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == interval and count % config.frequency == 0:
                value = None
                if isinstance(config.scheduler, ReduceLROnPlateau):
                    logged = self.trainer.callback_metrics
                    if self.monitor not in logged:
                        raise ConfigError(
                            f"monitor={self.monitor!r} is not logged; logged are"
                            f" {', '.join(logged)}"
                        )
                    value = logged[self.monitor]
                self.lr_scheduler_step(config.scheduler, value)

    def _save_positions(self, checkpoint: dict[str, Any]) -> None:
        """Add the position and the random state of every rank; all ranks call this together."""
        if self._updates is None:
            return
        position = {
            "updates": self._updates.state_dict(after_step=self._optimizer_stepped),
            "random": generators(self.device),
            "step": self.trainer.global_step,
        }
        positions: list[Any] = [position] * self.trainer.world_size
        if len(positions) > 1:
            distributed.all_gather_object(positions, position)
        checkpoint[CHECKPOINT_KEY] = positions

    def _load_positions(self, checkpoint: Mapping[str, Any]) -> None:
        self._loaded_positions = checkpoint.get(CHECKPOINT_KEY, [])

    def _resume(self, updates: Updates) -> None:
        """Continue from the loaded position, unless the checkpoint was read for its weights alone.

        Raises:
            RunError: another number of ranks wrote the checkpoint, or it holds no position.
        """
        positions, self._loaded_positions = self._loaded_positions, None
        trainer = self.trainer
        if positions is None or trainer.global_step == 0:
            return
        if not positions or positions[0]["step"] != trainer.global_step:
            raise RunError(
                f"the checkpoint of step {trainer.global_step} holds no position in a stream: was"
                " it written by another module? Load its weights alone"
            )
        if len(positions) != trainer.world_size:
            raise RunError(
                f"the checkpoint was written by {len(positions)} ranks, and {trainer.world_size}"
                " continue from it: start as many"
            )
        updates.load_state_dict(positions[self.global_rank]["updates"])
        set_generators(positions[self.global_rank]["random"], self.device)


class _StreamHooks(pl.Callback):
    """Does the own work of a `StreamModule` at Lightning's hooks.

    So a user may override any hook of the module without super.
    """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, StreamModule):
            _check_trainer(trainer)
            pl_module._forget_updates()

    def on_before_optimizer_step(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        optimizer: Optimizer | LightningOptimizer,
    ) -> None:
        """Clip, now that the gradient has its true scale."""
        if isinstance(pl_module, StreamModule) and pl_module.clip is not None:
            wrapped: Any = optimizer
            pl_module.clip_gradients(wrapped, pl_module.clip, "norm")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, StreamModule):
            pl_module._step_schedulers("epoch", pl_module.current_epoch + 1)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, StreamModule):
            pl_module._log_evaluations("val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(pl_module, StreamModule):
            pl_module._log_evaluations("test")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if isinstance(pl_module, StreamModule):
            pl_module._save_positions(checkpoint)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if isinstance(pl_module, StreamModule):
            pl_module._load_positions(checkpoint)


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return getattr(trainer, "callbacks")  # noqa: B009  # typed as a property


def _check_trainer(trainer: pl.Trainer) -> None:
    """Refuse what this Trainer cannot do here, before hours have passed.

    Raises:
        RunError: a strategy that shards the weights.
        ConfigError: more optimizers than one, or one that needs a closure; a checkpoint by time,
            which is never written; an average of weights that would train on.
    """
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise RunError(
            f"the strategy is {type(trainer.strategy).__name__}, expected a single device or"
            " 'ddp': others shard the weights"
        )
    kinds = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    if len(kinds) != 1 or kinds == ["LBFGS"]:
        raise ConfigError(
            f"configure_optimizers gave {', '.join(kinds) or 'none'}, expected one that steps on a"
            " gradient: for other rates take groups of parameters, torch.optim.Adam([{'params':"
            " ..., 'lr': ...}, ...])"
        )
    if any(isinstance(c, StochasticWeightAveraging) for c in _callbacks(trainer)):
        raise ConfigError(
            "StochasticWeightAveraging may run an epoch more, which would train on: take"
            " torch.optim.swa_utils in on_update"
        )
    if any(getattr(saver, "_train_time_interval", None) for saver in trainer.checkpoint_callbacks):
        raise ConfigError(
            "ModelCheckpoint(train_time_interval=...) never saves under manual optimization"
            " (Lightning 2.6): take every_n_train_steps"
        )
    # it warns that a checkpoint is written after the update, as it must be
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")


def _checkpoint_is_due(trainer: pl.Trainer) -> bool:
    """Whether to save after this update; the Trainer checks only after training steps."""
    periods = (getattr(saver, "_every_n_train_steps", 0) for saver in trainer.checkpoint_callbacks)
    return any(n > 0 and trainer.global_step % n == 0 for n in periods)


def _reached_max_steps(trainer: pl.Trainer) -> bool:
    return 0 <= trainer.max_steps <= trainer.global_step
