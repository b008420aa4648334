"""Training on a stream under Lightning gives the plain loop's weights to the bit.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import throughtime as tt
from plain_loop import Growing, plain_loop
from strategies import recordings
from throughtime.errors import ConfigError, DataError
from throughtime.gradient import Policy
from throughtime.integrations.lightning import Loader

pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)

from lightning_streams import (
    EXPECTED,
    LR,
    Module,
    fitted,
    loader_of_validation,
    net_of,
    plain,
    stream_of,
    trainer_of,
    weights,
)

pytestmark = EXPECTED


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
