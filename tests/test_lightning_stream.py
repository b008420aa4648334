"""Training on a stream under Lightning gives the plain loop's weights to the bit, resumed anywhere.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import math
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import throughtime as tt
from plain_loop import Growing, plain_loop
from strategies import recordings
from throughtime.carry import Carried
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Policy, Update

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
LENGTHS = (150, 90, 205, 33)
LR = 1e-2


def net_of(dropout: float = 0.0) -> Carried:
    torch.manual_seed(1)
    return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))).double()


def stream_of(lanes: int = 2, seed: int = 0, **options: Any) -> tt.Stream:
    return tt.Stream(recordings(LENGTHS, seed=seed, outputs=1), lanes, 10, **options)


class Module(StreamModule):
    """The net with Adam, and a scheduler if asked for."""

    def __init__(
        self,
        net: Carried | None = None,
        *,
        scheduler: Callable[[Any], dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        options = {"gradient": tt.Truncated(10, 25)} | options
        super().__init__(net_of() if net is None else net, nn.MSELoss(), **options)
        self.scheduler = scheduler
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), LR)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def on_update(self, update: Update) -> None:
        assert update.steps > 0
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def trainer_of(folder: Path, **options: Any) -> Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings: dict[str, Any] = {**quiet, "max_epochs": 2, **options}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **settings)


def weights(net: nn.Module) -> Tensor:
    """On the CPU, where Lightning leaves a net that it has fitted."""
    return torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()


@cache
def plain(
    policy: Callable[[], Policy] = lambda: tt.Truncated(10, 25),
    *,
    epochs: int = 2,
    stop: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Tensor:
    """The loop by hand."""
    net, stream = net_of(dropout), stream_of()
    optimizer = torch.optim.Adam(net.parameters(), LR)
    torch.manual_seed(5)
    plain_loop(net, stream, optimizer, policy(), epochs=epochs, stop=stop, **options)
    return weights(net)


def fitted(folder: Path, module: Module, *, chunks: int = 4, **options: Any) -> Tensor:
    torch.manual_seed(5)
    trainer_of(folder, **options).fit(module, Loader(stream_of(), chunks))
    return weights(module.net)


def loader_of_validation() -> Loader:
    return Loader(stream_of(1, seed=3), 6)


@pytest.mark.parametrize(
    ("policy", "chunks"), [(tt.Truncated(7, 25), 1000), (tt.Exact(), 1), (Growing(4), 4)], ids=str
)
def test_weights_are_those_of_the_plain_loop_to_the_bit(
    policy: Policy, chunks: int, tmp_path: Path
) -> None:
    mine = fitted(tmp_path, Module(gradient=policy), chunks=chunks)
    assert torch.equal(mine, plain(lambda: policy))
    assert not torch.equal(mine, weights(net_of()))


def test_clipping_and_accumulation_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clip": 0.05, "accumulate": 3}
    mine = fitted(tmp_path, Module(**options))
    assert torch.equal(mine, plain(**options))
    assert not torch.equal(mine, plain(accumulate=3))


def test_max_steps_stops_after_that_many_updates(tmp_path: Path) -> None:
    mine = fitted(tmp_path, Module(), max_steps=31, max_epochs=-1)
    assert torch.equal(mine, plain(stop=31))


def test_validation_is_that_of_evaluate_and_changes_no_weight(tmp_path: Path) -> None:
    module, trainer = Module(metrics=tt.metrics.Regression()), trainer_of(tmp_path)
    torch.manual_seed(5)
    trainer.fit(
        module, Loader(stream_of(), 4), [loader_of_validation(), Loader(stream_of(3, seed=4), 1)]
    )
    assert torch.equal(weights(module.net), plain())
    logged = trainer.callback_metrics
    for index, (lanes, seed) in enumerate(((1, 3), (3, 4))):
        expected = tt.evaluate(
            module.net, stream_of(lanes, seed=seed), nn.MSELoss(), metrics=tt.metrics.Regression()
        )
        assert logged[f"val_loss/dataloader_idx_{index}"].item() == pytest.approx(
            expected.loss, rel=1e-6
        )
        assert logged[f"val_rmse/dataloader_idx_{index}"].item() == pytest.approx(
            expected.metrics["rmse"], rel=1e-6
        )


def test_test_and_prediction_are_those_of_evaluate_and_predict(tmp_path: Path) -> None:
    module, trainer = Module(), trainer_of(tmp_path)
    (values,) = trainer.test(module, loader_of_validation(), verbose=False)
    assert values["test_loss"] == pytest.approx(
        tt.evaluate(module.net, stream_of(1, seed=3), nn.MSELoss()).loss, rel=1e-6
    )
    one = recordings([60])[0]
    parts = trainer.predict(module, Loader(tt.Stream({"inputs": one["inputs"]}, 1, 10), 2))
    outputs, _ = tt.predict(module.net, {"inputs": one["inputs"]})
    assert parts is not None
    # one loader
    assert torch.allclose(torch.cat(parts).squeeze(1), outputs, atol=1e-12)  # pyright: ignore[reportArgumentType]


def test_schedulers_step_after_updates_or_batches_or_epochs(tmp_path: Path) -> None:
    def rates(interval: str, frequency: int = 1, **options: Any) -> list[float]:
        def scheduler_of(optimizer: Any) -> dict[str, Any]:
            return {
                "scheduler": ExponentialLR(optimizer, 0.5),
                "interval": interval,
                "frequency": frequency,
            }

        module = Module(scheduler=scheduler_of, **options)
        fitted(tmp_path, module, max_epochs=2)
        return [math.log2(LR / rate) for rate in module.rates]

    assert rates("step", frequency=5) == pytest.approx([i // 5 for i in range(48)])
    assert rates("step", schedule="batch") == pytest.approx([i // 4 for i in range(48)])
    assert rates("epoch") == pytest.approx([i // 24 for i in range(48)])


def test_plateau_follows_the_logged_value(tmp_path: Path) -> None:
    def scheduler_of(optimizer: Any) -> dict[str, Any]:
        return {
            "scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9),
            "interval": "epoch",
        }

    module = Module(scheduler=scheduler_of, monitor="train_loss_epoch")
    fitted(tmp_path, module, max_epochs=3)
    assert module.rates[::24] == [LR, LR / 2, LR / 4]
    with pytest.raises(
        ConfigError, match=r"monitor='val_loss' is not logged; logged are train_loss"
    ):
        fitted(tmp_path, Module(scheduler=scheduler_of))


def test_logged_loss_of_an_epoch_is_the_mean_over_its_valid_steps(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(Module(), Loader(stream_of(), 5))
    net = net_of()
    optimizer = torch.optim.Adam(net.parameters(), LR)
    records = plain_loop(net, stream_of(), optimizer, tt.Truncated(10, 25), epochs=1)
    total, steps = sum(loss * steps for loss, steps in records), sum(n for _, n in records)
    assert trainer.callback_metrics["train_loss_epoch"].item() == pytest.approx(
        total / steps, rel=1e-6
    )


@pytest.mark.filterwarnings("ignore:.*Precision .* is not supported by the model summary")
def test_mixed_precision_is_that_of_autocast(tmp_path: Path) -> None:
    def stream() -> tt.Stream:
        return stream_of(dtype=torch.float32)

    module = Module(net_of().float())
    trainer_of(tmp_path, precision="bf16-mixed").fit(module, Loader(stream(), 4))
    net, mine = net_of().float(), stream()
    optimizer = torch.optim.Adam(net.parameters(), LR)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        plain_loop(net, mine, optimizer, tt.Truncated(10, 25), epochs=2)
    assert torch.equal(weights(module.net), weights(net))
    assert (weights(net).double() - plain()).abs().max() > 1e-5


def test_stream_without_a_loader_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a batch of a stream.*Loader\(tt\.Stream\("):
        trainer_of(tmp_path).fit(Module(), stream_of())
    with pytest.raises(DataError, match=r"got a list, expected a tt\.Stream"):
        Loader([1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"chunks=.*at least 1"):
        Loader(stream_of(), 0)


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
            fitted(tmp_path, kind())
    saver = ModelCheckpoint(tmp_path, train_time_interval=timedelta(minutes=1))
    trainer = trainer_of(tmp_path, callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(ConfigError, match="train_time_interval"):
        trainer.fit(Module(), Loader(stream_of(), 4))
    loader = Loader(stream_of(), 4)
    with pytest.raises(DataError, match="is the one that is trained on"):
        trainer_of(tmp_path, num_sanity_val_steps=0).fit(Module(), loader, loader)


UPDATES = 24  # of an epoch, in 12 training steps


def resumed(folder: Path, at: int, *, max_epochs: int, **settings: Any) -> Tensor:
    """Train to the end of the epoch of update `at`, save, continue in a new module and trainer."""
    saver = ModelCheckpoint(folder, every_n_train_steps=at, save_top_k=-1, filename="{step}")
    module, trainer = (
        Module(net_of(0.3), **settings),
        trainer_of(
            folder, enable_checkpointing=True, callbacks=[saver], max_epochs=-(-at // UPDATES)
        ),
    )
    torch.manual_seed(5)
    trainer.fit(module, Loader(stream_of(), 2), loader_of_validation())
    path = folder / f"step={at}.ckpt"
    module = Module(net_of(0.3), **settings)
    torch.manual_seed(99)
    trainer_of(folder, max_epochs=max_epochs).fit(
        module, Loader(stream_of(), 2), loader_of_validation(), ckpt_path=path
    )
    return weights(module.net)


@pytest.mark.parametrize(("at", "policy"), [(3, tt.Truncated(10, 25)), (27, Growing(4))], ids=str)
def test_resume_in_the_middle_of_an_epoch_gives_the_same_bits(
    at: int, policy: Any, tmp_path: Path
) -> None:
    expected = plain(lambda: policy, epochs=3, dropout=0.3)
    assert torch.equal(resumed(tmp_path, at, max_epochs=3, gradient=policy), expected)


def test_a_batch_ends_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1, filename="{step}")
    module = Module()
    torch.manual_seed(5)
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver]).fit(
        module, Loader(stream_of(), 4)
    )
    assert torch.equal(weights(module.net), plain())
    assert {int(path.stem.split("=")[1]) for path in tmp_path.glob("*.ckpt")} == {10, 20, 30, 40}


def test_a_checkpoint_saved_after_max_steps_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    trainer, again = trainer_of(tmp_path, max_steps=6, max_epochs=-1), Module()
    torch.manual_seed(5)
    trainer.fit(Module(), Loader(stream_of(), 4))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    trainer_of(tmp_path, max_steps=40, max_epochs=-1).fit(
        again, Loader(stream_of(), 4), ckpt_path=tmp_path / "after.ckpt"
    )
    assert torch.equal(weights(again.net), plain(stop=40))


class Failing(Module):
    """Fails once, between an update and its step."""

    def on_update(self, update: Update) -> None:
        super().on_update(update)
        if len(self.rates) == 11:
            raise RuntimeError("enough")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available.*")
@pytest.mark.filterwarnings(
    "ignore:.*was called without a model.*"
)  # Lightning, of any fit with OnExceptionCheckpoint
def test_a_checkpoint_of_an_exception_makes_the_lost_update_again(tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(RuntimeError, match="enough"):
        trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver]).fit(
            Failing(), Loader(stream_of(), 4)
        )
    module = Module()
    trainer_of(tmp_path).fit(module, Loader(stream_of(), 4), ckpt_path=tmp_path / "failed.ckpt")
    assert torch.equal(weights(module.net), plain())


def test_a_checkpoint_without_a_position_or_of_two_ranks_is_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver], max_epochs=1).fit(
        Module(), Loader(stream_of(), 2)
    )
    path = tmp_path / "step=8.ckpt"
    saved = torch.load(path, weights_only=False)
    for positions, message in (
        (saved["throughtime"] * 2, "written by 2 ranks, and 1 continue from it"),
        ([], "the checkpoint of step 8 holds no position in a stream"),
    ):
        torch.save(saved | {"throughtime": positions}, path)
        with pytest.raises(RunError, match=message):
            trainer_of(tmp_path).fit(Module(), Loader(stream_of(), 2), ckpt_path=path)
