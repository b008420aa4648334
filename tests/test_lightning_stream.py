"""Training on a stream under Lightning gives the plain loop's weights to the bit, resumed anywhere.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import throughtime as tt
from plain_loop import Course, adam, by_hand, check, every_course, flat, plain_loop
from strategies import recordings
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Update

pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from throughtime.integrations.lightning import Loader, StreamModule

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*smaller than the logging interval.*",  # few batches an epoch, on purpose
    "ignore:.*no .val_dataloader.*",  # trained without validation, on purpose
    "ignore:Be aware that when using .ckpt_path.",  # resumed without the callback that saved
    "ignore:Checkpoint directory .* exists and is not empty",  # several trainings in one folder
)
PLAIN, UPDATES, LR = Course(), 12, 0.01  # updates of an epoch; the rate of Adam


class Module(StreamModule):
    """The net of a course with Adam, and a scheduler if asked for."""

    def __init__(
        self,
        course: Course = PLAIN,
        scheduler: Callable[[Any], dict[str, Any]] | None = None,
        **more: Any,
    ) -> None:
        options: dict[str, Any] = {"accumulate": course.accumulate, "clip": course.clip}
        options |= {"gradient": course.gradient}
        super().__init__(course.net(), nn.MSELoss(), **options, **more)
        self.course, self.scheduler = course, scheduler
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = adam(self)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def on_update(self, update: Update) -> None:
        assert update.steps > 0
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary"), False
    )
    settings |= {"callbacks": [*callbacks], "enable_checkpointing": bool(callbacks)}
    settings |= {"max_epochs": 2, "devices": 1, **options}
    return Trainer(accelerator="cpu", default_root_dir=folder, **settings)


def fitted(
    trainer: Trainer, module: Module, *validation: Loader, path: Path | None = None
) -> Tensor:
    """The weights after a training, or after one that goes on from a checkpoint."""
    torch.manual_seed(99 if path else 5)
    loader = Loader(module.course.stream(), 3)
    trainer.fit(module, loader, [*validation] or None, ckpt_path=path)
    return flat(module.net)


def train(course: Course, folder: Path) -> Tensor:
    """With a validation in between; a checkpoint is due within a batch."""
    options: dict[str, Any] = {"precision": "bf16-mixed"} if course.bfloat16 else {}
    path, validation = None, Loader(course.stream(), 6)
    if course.resume:
        saver = ModelCheckpoint(
            folder, every_n_train_steps=course.resume, save_top_k=-1, filename="{step}"
        )
        fitted(trainer_of(folder, saver), Module(course), validation)
        path = folder / f"step={course.resume}.ckpt"
    return fitted(trainer_of(folder, **options), Module(course), validation, path=path)


@every_course
def test_weights_are_those_of_the_plain_loop_to_the_bit(course: Course, tmp_path: Path) -> None:
    check(train, replace(course, cached=False), tmp_path)


@pytest.mark.parametrize("steps", [6, 10])  # of 12 in an epoch, the last 4 in one batch
def test_max_steps_stops_after_that_many_updates_and_a_checkpoint_goes_on(
    steps: int, tmp_path: Path
) -> None:
    trainer, path = trainer_of(tmp_path, max_steps=steps, max_epochs=-1), tmp_path / "after.ckpt"
    assert torch.equal(fitted(trainer, Module()), by_hand(PLAIN, steps))
    trainer.save_checkpoint(path)
    assert torch.equal(fitted(trainer_of(tmp_path), Module(), path=path), by_hand(PLAIN))


def test_validation_is_that_of_evaluate_and_changes_no_weight(tmp_path: Path) -> None:
    module, trainer = Module(metrics=tt.metrics.Regression()), trainer_of(tmp_path)
    lanes = 1, 3
    loaders = [Loader(PLAIN.stream(count), 6) for count in lanes]
    assert torch.equal(fitted(trainer, module, *loaders), by_hand(PLAIN))
    for index, count in enumerate(lanes):
        expected = tt.evaluate(
            module.net, PLAIN.stream(count), nn.MSELoss(), metrics=tt.metrics.Regression()
        )
        for name, value in (("loss", expected.loss), ("rmse", expected.metrics["rmse"])):
            logged = trainer.callback_metrics[f"val_{name}/dataloader_idx_{index}"].item()
            assert logged == pytest.approx(value, rel=1e-6)


def test_test_and_prediction_are_those_of_evaluate_and_predict(tmp_path: Path) -> None:
    module, trainer = Module(), trainer_of(tmp_path)
    (values,) = trainer.test(module, Loader(PLAIN.stream(), 6), verbose=False)
    loss = tt.evaluate(module.net, PLAIN.stream(), nn.MSELoss()).loss
    assert values["test_loss"] == pytest.approx(loss, rel=1e-6)
    one = {"inputs": recordings([60])[0]["inputs"]}
    parts: Any = trainer.predict(module, Loader(tt.Stream(one, 1, 10), 2))
    outputs, _ = tt.predict(module.net, one)
    assert torch.allclose(torch.cat(parts).squeeze(1), outputs, atol=1e-12)


def test_schedulers_step_after_updates_or_batches_or_epochs(tmp_path: Path) -> None:
    def rates(interval: str, frequency: int = 1, **options: Any) -> list[float]:
        def scheduler_of(optimizer: Any) -> dict[str, Any]:
            schedule = ExponentialLR(optimizer, 0.5)
            return {"scheduler": schedule, "interval": interval, "frequency": frequency}

        module = Module(Course(tt.Truncated(10)), scheduler_of, **options)
        fitted(trainer_of(tmp_path), module)
        return [math.log2(LR / rate) for rate in module.rates]

    assert rates("step", frequency=5) == pytest.approx([i // 5 for i in range(18)])
    assert rates("step", schedule="batch") == pytest.approx([i // 3 for i in range(18)])
    assert rates("epoch") == pytest.approx([i // 9 for i in range(18)])


def test_plateau_follows_the_logged_value(tmp_path: Path) -> None:
    def scheduler_of(optimizer: Any) -> dict[str, Any]:
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)
        return {"scheduler": schedule, "interval": "epoch"}

    module = Module(PLAIN, scheduler_of, monitor="train_loss_epoch")
    fitted(trainer_of(tmp_path, max_epochs=3), module)
    assert module.rates[::UPDATES] == [LR, LR / 2, LR / 4]
    with pytest.raises(ConfigError, match="monitor='val_loss' is not logged; logged are train_los"):
        fitted(trainer_of(tmp_path), Module(PLAIN, scheduler_of))


def test_logged_loss_of_an_epoch_is_the_mean_over_its_valid_steps(tmp_path: Path) -> None:
    trainer, course = trainer_of(tmp_path, max_epochs=1), Course(dropout=0)
    fitted(trainer, Module(course))
    net = course.net()
    records = plain_loop(net, course.stream(), adam(net), course.gradient, epochs=1)
    total, steps = sum(loss * steps for loss, steps in records), sum(n for _, n in records)
    logged = trainer.callback_metrics["train_loss_epoch"].item()
    assert logged == pytest.approx(total / steps, rel=1e-6)


def test_stream_without_a_loader_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a batch of a stream.*Loader\(tt\.Stream\("):
        trainer_of(tmp_path).fit(Module(), PLAIN.stream())
    with pytest.raises(DataError, match=r"got a list, expected a tt\.Stream"):
        Loader([1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"chunks=.*at least 1"):
        Loader(PLAIN.stream(), 0)


class Two(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), LR) for _ in range(2)]


class Lines(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_what_manual_optimization_cannot_do_is_refused_at_the_start(tmp_path: Path) -> None:
    for kind, names in ((Two, "SGD, SGD"), (Lines, "LBFGS")):
        with pytest.raises(
            ConfigError, match=rf"configure_optimizers gave {names}, expected one that steps"
        ):
            fitted(trainer_of(tmp_path), kind())
    saver = ModelCheckpoint(tmp_path, train_time_interval=timedelta(minutes=1))
    with pytest.raises(ConfigError, match="train_time_interval"):
        fitted(trainer_of(tmp_path, saver), Module())
    loader = Loader(PLAIN.stream(), 4)
    with pytest.raises(DataError, match="is the one that is trained on"):
        trainer_of(tmp_path, num_sanity_val_steps=0).fit(Module(), loader, loader)


class Failing(Module):
    """Fails once, between an update and its step."""

    def on_update(self, update: Update) -> None:
        super().on_update(update)
        if len(self.rates) == 5:
            raise RuntimeError("enough")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available.*")
@pytest.mark.filterwarnings(
    "ignore:.*was called without a model.*"
)  # Lightning, of any fit with OnExceptionCheckpoint
def test_a_checkpoint_of_an_exception_makes_the_lost_update_again(tmp_path: Path) -> None:
    course, saver = Course(dropout=0), OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(RuntimeError, match="enough"):
        fitted(trainer_of(tmp_path, saver), Failing(course))
    again = fitted(trainer_of(tmp_path), Module(course), path=tmp_path / "failed.ckpt")
    assert torch.equal(again, by_hand(course))


def test_a_checkpoint_without_a_position_or_of_two_ranks_is_refused(tmp_path: Path) -> None:
    trainer, path = trainer_of(tmp_path, max_steps=8), tmp_path / "saved.ckpt"
    fitted(trainer, Module())
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    for positions, message in (
        (saved["throughtime"] * 2, "written by 2 ranks, and 1 continue from it"),
        ([], "the checkpoint of step 8 holds no position in a stream"),
    ):
        torch.save(saved | {"throughtime": positions}, path)
        with pytest.raises(RunError, match=message):
            fitted(trainer_of(tmp_path), Module(), path=path)
