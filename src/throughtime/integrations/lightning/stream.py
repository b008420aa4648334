"""A Lightning module that trains on a stream: any gradient policy, the state carried, many updates
in a training step.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

import throughtime as tt
from throughtime.errors import ConfigError
from throughtime.gradient import LossFn, Policy
from throughtime.integrations.lightning.evaluating import Evaluating
from throughtime.integrations.lightning.places import Places
from throughtime.integrations.lightning.schedulers import step_schedulers
from throughtime.integrations.lightning.trainers import check, reached_the_end, wants_to_save
from throughtime.integrations.stretches import Stretch, stretch


class StreamModule(Evaluating):
    """A carried net that a Trainer trains on a `tt.Stream`; write `configure_optimizers`, and hooks
    as you like.

    The Trainer gets `Loader(stream, chunks=20)` as its dataloader: a training step makes all
    updates of so many chunks, and each is one of Lightning's global steps. Validation, test and
    prediction play their streams chunk by chunk with a state of their own. Checkpoints hold the
    carried state and the place of every rank: what is resumed goes on to the bit. Under the
    strategy "ddp" each rank plays its lanes, and `tt.updates` adds gradients up, once per update.

    Logged are `train_loss`, `val_loss` and `test_loss`, means over valid steps, with the figures of
    `score`: `val_macro_f1`.

    Args:
        net: made by `tt.carry`; it is `self.net`.
        loss_fn: as for `tt.updates`.
        gradient: `tt.Truncated(...)` or another policy.
        clip: norm to which the gradient is clipped; Lightning's own `gradient_clip_val` wants one
            update per training step.
        accumulate: as for `tt.updates`.
        schedule: whether schedulers of interval "step" step after every "update" or every "batch"
            (training step).
        monitor: what a `ReduceLROnPlateau` looks at, of the logged values.
        score: figures for validation and test, as for `tt.evaluate`.

    Raises:
        ConfigError: a setting out of its range.

    Cost: Lightning's own, once per training step but for the optimizer's step; docs/lightning.md
    has the figures.

    Example:
        >>> import torch, throughtime as tt
        >>> from lightning.pytorch import Trainer
        >>> from throughtime.integrations.lightning import Loader, StreamModule
        >>> class Beats(StreamModule):
        ...     def configure_optimizers(self):
        ...         return torch.optim.Adam(self.parameters())
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> module = Beats(net, torch.nn.MSELoss(), gradient=tt.Truncated(stride=10, horizon=20))
        >>> stream, valid = (tt.Stream({"inputs": torch.zeros(50, 3), "targets": torch.zeros(50)}, 1, 10) for _ in range(2))
        >>> quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        >>> trainer = Trainer(max_epochs=1, accelerator="cpu", **quiet)
        >>> trainer.fit(module, Loader(stream, chunks=5), Loader(valid, chunks=5))
        >>> trainer.global_step
        5
    """

    def __init__(
        self,
        net: tt.Carried,
        loss_fn: LossFn,
        *,
        gradient: Policy,
        clip: float | None = None,
        accumulate: int = 1,
        schedule: Literal["update", "batch"] = "update",
        monitor: str = "val_loss",
        score: Any = None,
    ) -> None:
        super().__init__(net, loss_fn, score)
        if schedule not in ("update", "batch") or (clip is not None and not clip > 0):
            raise ConfigError(
                f"schedule={schedule!r}, clip={clip!r}: expected schedule 'update' or 'batch', and"
                " a clip above 0 or None"
            )
        self.automatic_optimization = False  # a training step makes many updates
        self.gradient, self.clip, self.accumulate, self.schedule, self.monitor = (
            gradient,
            clip,
            accumulate,
            schedule,
            monitor,
        )
        self._updates: tt.Updates | None = None
        self._finished = self._stepped = True
        self._places = Places()

    def on_update(self, update: tt.Update) -> None:
        """Called after every update, before its optimizer step.

        For metrics and logging of your own.
        """

    def training_step(self, batch: Stretch, batch_idx: int) -> dict[str, Tensor] | None:
        """All updates of a stretch of the stream.

        It ends early where a checkpoint is due, and the next one makes up for it.
        """
        self._begin(stretch(batch))
        optimizer, loss, steps = self.optimizers(), torch.zeros((), device=self.device), 0
        while (
            not (batch.over or reached_the_end(self.trainer))
            and (update := self._next()) is not None
        ):
            self.on_update(update)
            optimizer.step()  # pyright: ignore[reportAttributeAccessIssue]  # one: `check`
            self._stepped = True
            optimizer.zero_grad()  # pyright: ignore[reportAttributeAccessIssue]
            self._schedule("update", self.trainer.global_step)
            loss, steps = loss + update.loss * update.steps, steps + update.steps
            if not batch.last and wants_to_save(self.trainer):
                break
        if reached_the_end(self.trainer) and not batch.stream.remaining(1):
            # max_steps fell on the last update of the epoch: it is over, and a checkpoint must say
            # so
            self._next()
        if steps:
            self._schedule("batch", batch_idx + 1)
            self.log(
                "train_loss",
                loss / steps,
                batch_size=steps,
                on_step=True,
                on_epoch=True,
                prog_bar=True,
                sync_dist=True,
            )
        return {"loss": loss / steps} if steps else None

    def _next(self) -> tt.Update | None:
        update = None if self._updates is None else next(self._updates, None)
        self._finished, self._stepped = update is None, update is None
        return update

    def _begin(self, batch: Stretch) -> None:
        """With the first stretch come the updates of an epoch, unless those that a checkpoint held are to be ended first."""
        first, self._trained = batch.index == 0, batch.stream
        if self._updates is None or (first and self._finished):
            fresh, self._updates, self._finished = self._updates is None, self._made(batch), False
            if fresh:
                self._places.take_up(self, self._updates)
        if first and batch.stream.position and self.trainer.num_training_batches < batch.count:
            # limit_train_batches cut the epoch before short: this one has an order of its own
            batch.stream._skip_epoch()
            self._updates = self._made(batch)

    def _made(self, batch: Stretch) -> tt.Updates:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return tt.updates(
            self.net,
            batch.stream,
            self.loss_fn,
            gradient=self.gradient,
            scaler=scaler,
            accumulate=self.accumulate,
        )

    def keep_settings(self) -> None:
        check(self.trainer)
        self._updates = None

    def keep_saved(self, checkpoint: dict[str, Any]) -> None:
        if self._updates is not None:
            self._places.write(checkpoint, self, self._updates.state_dict(after_step=self._stepped))

    def keep_loaded(self, checkpoint: dict[str, Any]) -> None:
        self._places.read(checkpoint)

    def keep_clipped(self, optimizer: Optimizer | LightningOptimizer) -> None:
        if self.clip is not None:
            self.clip_gradients(
                optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm"
            )  # pyright: ignore[reportArgumentType]

    def keep_scheduled(self) -> None:
        step_schedulers(self, "epoch", self.current_epoch + 1, self.monitor)

    def _schedule(self, after: str, count: int) -> None:
        if after == self.schedule:
            step_schedulers(self, "step", count, self.monitor)
