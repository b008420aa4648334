"""Training on a stream under Lightning: the plain loop's weights to the bit, whatever a training step spans.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

import throughtime as tt
from strategies import recordings
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Policy

pl = pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from throughtime.integrations.lightning import Loader, StreamModule  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval.*"),  # few batches an epoch, on purpose
    pytest.mark.filterwarnings("ignore:.*no .val_dataloader.*"),  # trained without validation, on purpose
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),  # resumed without the callback that saved
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),  # several trainings in one folder
]
LENGTHS = (150, 90, 205, 33)
LR = 1e-2


def net_of(dropout: float = 0.0) -> tt.Carried:
    torch.manual_seed(1)
    return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))).double()


def stream_of(lanes: int = 2, seed: int = 0, **options: Any) -> tt.Stream:
    return tt.Stream(recordings(LENGTHS, seed=seed, outputs=1), lanes, 10, **options)


class Module(StreamModule):
    """The net with Adam, and a scheduler if asked for."""

    def __init__(self, net: tt.Carried | None = None, *, scheduler: Callable[[Any], dict[str, Any]] | None = None, **options: Any) -> None:
        options = {"gradient": tt.Truncated(10, 25)} | options
        super().__init__(net_of() if net is None else net, nn.MSELoss(), **options)
        self.scheduler = scheduler
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), LR)
        return optimizer if self.scheduler is None else {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}

    def on_update(self, update: tt.Update) -> None:
        assert update.steps > 0
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def trainer_of(folder: Path, **options: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given: dict[str, Any] = {**quiet, "max_epochs": 2, **options}
    return Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **given)


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def plain(
    policy: Policy | None = None,
    *,
    epochs: int = 2,
    clip: float | None = None,
    accumulate: int = 1,
    stop: float = math.inf,
    dropout: float = 0.0,
) -> Tensor:
    """The loop by hand."""
    net, stream, count = net_of(dropout), stream_of(), 0
    optimizer = torch.optim.Adam(net.parameters(), LR)
    torch.manual_seed(5)
    for _ in range(epochs):
        for _ in tt.updates(net, stream, nn.MSELoss(), gradient=policy or tt.Truncated(10, 25), accumulate=accumulate):
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if count >= stop:
                return weights(net)
    return weights(net)


def fitted(folder: Path, module: Module, *, chunks: int = 4, **options: Any) -> Tensor:
    torch.manual_seed(5)
    trainer_of(folder, **options).fit(module, Loader(stream_of(), chunks))
    return weights(module.net)


POLICIES: dict[str, Callable[[], Policy]] = {
    "stride": lambda: tt.Truncated(10),
    "horizon": lambda: tt.Truncated(7, 25),
    "exact": tt.Exact,
    "segment": lambda: tt.Exact(segment=20),
    "randomized": lambda: tt.Randomized(20),
    "adaptive": lambda: tt.Adaptive(0.2, 10, 40, every=4),
}


@pytest.mark.parametrize(
    ("policy", "chunks"),
    [
        pytest.param(make, chunks, id=f"{name}-{chunks}")
        for name, make in POLICIES.items()
        for chunks in (1, 4, 1000)
        if name == "horizon" or chunks == 4
    ],
)
def test_weights_are_those_of_the_plain_loop_to_the_bit(policy: Callable[[], Policy], chunks: int, tmp_path: Path) -> None:
    mine = fitted(tmp_path, Module(gradient=policy()), chunks=chunks)
    assert torch.equal(mine, plain(policy()))
    assert not torch.equal(mine, weights(net_of()))


@pytest.mark.parametrize("options", [{"clip": 0.05}, {"accumulate": 3}, {"clip": 0.05, "accumulate": 2}], ids=str)
def test_clipping_and_accumulation_are_those_of_the_plain_loop(options: dict[str, Any], tmp_path: Path) -> None:
    mine = fitted(tmp_path, Module(**options))
    assert torch.equal(mine, plain(**options))
    assert not torch.equal(mine, plain())


def test_global_step_counts_updates_and_a_training_step_spans_many(tmp_path: Path) -> None:
    updates = sum(1 for _ in tt.updates(net_of(), stream_of(), nn.MSELoss(), gradient=tt.Truncated(10, 25)))
    module, trainer = Module(), trainer_of(tmp_path, max_epochs=1)
    trainer.fit(module, Loader(stream_of(), chunks=4))
    assert trainer.global_step == updates == len(module.rates)
    assert trainer.num_training_batches == math.ceil(updates / 4)


@pytest.mark.parametrize("stop", [1, 6, 31])
def test_max_steps_stops_after_that_many_updates(stop: int, tmp_path: Path) -> None:
    mine = fitted(tmp_path, Module(), max_steps=stop, max_epochs=-1)
    assert torch.equal(mine, plain(stop=stop))


def resumed(
    folder: Path,
    at: int,
    forget: Callable[[dict[str, Any]], None] = lambda _: None,
    *,
    kind: type[Module] = Module,
    max_epochs: int = 2,
    **settings: Any,
) -> Tensor:
    """Trained to update `at`, saved, and gone on with in another module and trainer."""
    options = {"max_epochs": max_epochs}
    saver = ModelCheckpoint(folder, every_n_train_steps=at, save_top_k=-1, filename="{step}")
    module = kind(net_of(0.3), **settings)
    torch.manual_seed(5)
    trainer_of(folder, enable_checkpointing=True, callbacks=[saver], **options).fit(module, Loader(stream_of(), 2), loader_of_validation())
    path = folder / f"step={at}.ckpt"
    saved = torch.load(path, weights_only=False)
    forget(saved)
    torch.save(saved, path)
    module = kind(net_of(0.3), **settings)
    torch.manual_seed(99)
    trainer_of(folder, **options).fit(module, Loader(stream_of(), 2), loader_of_validation(), ckpt_path=path)
    return weights(module.net)


def loader_of_validation() -> Loader:
    return Loader(stream_of(1, seed=3), 6)


@pytest.mark.parametrize("at", [3, 8, 24, 27, 48], ids=lambda at: f"update-{at}")
def test_resume_in_the_middle_of_an_epoch_gives_the_same_bits(at: int, tmp_path: Path) -> None:
    """An epoch has 24 updates, in 12 training steps."""
    assert torch.equal(resumed(tmp_path, at, max_epochs=3), plain(epochs=3, dropout=0.3))


def test_resume_at_the_end_of_an_epoch_gives_the_same_bits(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}", every_n_epochs=1)
    module = Module(net_of(0.3))
    torch.manual_seed(5)
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver], max_epochs=1).fit(module, Loader(stream_of(), 2))
    module = Module(net_of(0.3))
    trainer_of(tmp_path, max_epochs=3).fit(module, Loader(stream_of(), 2), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert torch.equal(weights(module.net), plain(epochs=3, dropout=0.3))


def test_a_stretch_ends_where_a_checkpoint_is_due(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1, filename="{step}")
    module = Module()
    torch.manual_seed(5)
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver]).fit(module, Loader(stream_of(), 4))
    assert torch.equal(weights(module.net), plain())
    assert {int(path.stem.split("=")[1]) for path in tmp_path.glob("*.ckpt")} == {10, 20, 30, 40}


def of(saved: dict[str, Any]) -> dict[str, Any]:
    return saved["throughtime"][0]


@pytest.mark.parametrize(
    "forget",
    [
        lambda saved: of(saved).update(random={"cpu": torch.get_rng_state()}),
        lambda saved: of(saved)["updates"].update(edge=tt.state.map_leaves(torch.zeros_like, of(saved)["updates"]["edge"])),
    ],
    ids=["random", "state"],
)
def test_resume_that_forgets_anything_gives_other_weights(forget: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    assert not torch.equal(resumed(tmp_path, 8, forget), plain(dropout=0.3))


def test_a_checkpoint_read_for_its_weights_begins_anew(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver], max_epochs=1).fit(Module(), Loader(stream_of(), 2))
    module = Module.load_from_checkpoint(tmp_path / "step=8.ckpt", net=net_of())
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(module, Loader(stream_of(), 2))
    assert trainer.global_step == 24


def test_validation_is_that_of_evaluate_and_changes_no_weight(tmp_path: Path) -> None:
    module, trainer = Module(score=tt.score.Regression()), trainer_of(tmp_path)
    torch.manual_seed(5)
    trainer.fit(module, Loader(stream_of(), 4), [loader_of_validation(), Loader(stream_of(3, seed=4), 1)])
    assert torch.equal(weights(module.net), plain())
    told = trainer.callback_metrics
    for index, (lanes, seed) in enumerate(((1, 3), (3, 4))):
        expected = tt.evaluate(module.net, stream_of(lanes, seed=seed), nn.MSELoss(), score=tt.score.Regression())
        assert told[f"val_loss/dataloader_idx_{index}"].item() == pytest.approx(expected.loss, rel=1e-6)
        assert told[f"val_rmse/dataloader_idx_{index}"].item() == pytest.approx(expected.figures["rmse"], rel=1e-6)


def test_validation_that_stops_early_starts_cold_again(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, limit_val_batches=2, val_check_interval=3)
    module = Module()
    trainer.fit(module, Loader(stream_of(), 4), loader_of_validation())
    first = list(tt.Stream(recordings(LENGTHS, seed=3, outputs=1), 1, 10))[:12]
    evaluator = tt.Evaluator(module.net, nn.MSELoss())
    for chunk in first:
        evaluator.add(chunk)
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(evaluator.found(stream_of(1)).loss, rel=1e-6)


def test_test_and_prediction_are_those_of_evaluate_and_predict(tmp_path: Path) -> None:
    module, trainer = Module(), trainer_of(tmp_path)
    (told,) = trainer.test(module, loader_of_validation(), verbose=False)
    assert told["test_loss"] == pytest.approx(tt.evaluate(module.net, stream_of(1, seed=3), nn.MSELoss()).loss, rel=1e-6)
    one = recordings([60])[0]
    parts = trainer.predict(module, Loader(tt.Stream({"inputs": one["inputs"]}, 1, 10), 2))
    outputs, _ = tt.predict(module.net, {"inputs": one["inputs"]})
    assert parts is not None
    assert torch.allclose(torch.cat(parts).squeeze(1), outputs, atol=1e-12)  # pyright: ignore[reportArgumentType]  # one loader


def test_schedulers_step_after_updates_or_batches_or_epochs(tmp_path: Path) -> None:
    def rates(interval: str, frequency: int = 1, **options: Any) -> list[float]:
        def made(optimizer: Any) -> dict[str, Any]:
            return {"scheduler": ExponentialLR(optimizer, 0.5), "interval": interval, "frequency": frequency}

        module = Module(scheduler=made, **options)
        fitted(tmp_path, module, max_epochs=2)
        return [math.log2(LR / rate) for rate in module.rates]

    assert rates("step") == pytest.approx(range(48))
    assert rates("step", frequency=5) == pytest.approx([i // 5 for i in range(48)])
    assert rates("step", schedule="batch") == pytest.approx([i // 4 for i in range(48)])
    assert rates("step", frequency=2, schedule="batch") == pytest.approx([i // 8 for i in range(48)])
    assert rates("epoch") == pytest.approx([i // 24 for i in range(48)])


def test_plateau_is_told_what_was_logged(tmp_path: Path) -> None:
    def made(optimizer: Any) -> dict[str, Any]:
        return {"scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9), "interval": "epoch"}

    module = Module(scheduler=made, monitor="train_loss_epoch")
    fitted(tmp_path, module, max_epochs=3)
    assert module.rates[::24] == [LR, LR / 2, LR / 4]
    with pytest.raises(ConfigError, match=r"monitor='val_loss' is not logged; logged are train_loss"):
        fitted(tmp_path, Module(scheduler=made))


def test_callbacks_and_loggers_work(tmp_path: Path) -> None:
    stopper = EarlyStopping("val_loss", min_delta=1e9, patience=1)
    best = ModelCheckpoint(tmp_path, monitor="val_loss", filename="best")
    rates = LearningRateMonitor("step")
    logger = CSVLogger(tmp_path, name="log", flush_logs_every_n_steps=1)
    trainer = trainer_of(
        tmp_path, max_epochs=9, callbacks=[stopper, best, rates], enable_checkpointing=True, logger=logger, log_every_n_steps=1
    )
    module = Module(scheduler=lambda optimizer: {"scheduler": StepLR(optimizer, 10), "interval": "step"})
    trainer.fit(module, Loader(stream_of(), 4), loader_of_validation())
    assert trainer.current_epoch == 2
    assert (tmp_path / "best.ckpt").is_file()
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert {"train_loss_step", "train_loss_epoch", "val_loss", "lr-Adam", "step"} <= set(lines[0].split(","))


def test_logged_loss_of_an_epoch_is_the_mean_over_its_valid_steps(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_epochs=1)
    trainer.fit(Module(), Loader(stream_of(), 5))
    net, total, steps = net_of(), 0.0, 0
    optimizer = torch.optim.Adam(net.parameters(), LR)
    for update in tt.updates(net, stream_of(), nn.MSELoss(), gradient=tt.Truncated(10, 25)):
        total, steps = total + update.loss.item() * update.steps, steps + update.steps
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.callback_metrics["train_loss_epoch"].item() == pytest.approx(total / steps, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*Precision .* is not supported by the model summary")
def test_mixed_precision_is_that_of_autocast(tmp_path: Path) -> None:
    def stream() -> tt.Stream:
        return stream_of(dtype=torch.float32)

    module = Module(net_of().float())
    trainer_of(tmp_path, precision="bf16-mixed").fit(module, Loader(stream(), 4))
    net, mine = net_of().float(), stream()
    optimizer = torch.optim.Adam(net.parameters(), LR)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            for _ in tt.updates(net, mine, nn.MSELoss(), gradient=tt.Truncated(10, 25)):
                optimizer.step()
                optimizer.zero_grad()
    assert torch.equal(weights(module.net), weights(net))
    assert (weights(net).double() - plain()).abs().max() > 1e-5


def test_true_double_precision_wants_a_stream_of_doubles(tmp_path: Path) -> None:
    module = Module(net_of().float())
    trainer_of(tmp_path, precision="64-true").fit(module, Loader(stream_of(dtype=torch.float64), 4))
    assert weights(module.net).dtype == torch.float64


def test_progress_bar_shows_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_of(tmp_path, max_epochs=1, enable_progress_bar=True).fit(Module(), Loader(stream_of(), 4))
    told = capsys.readouterr()
    assert "6/6" in told.out + told.err
    assert "train_loss" in told.out + told.err


def test_stream_without_a_loader_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"hands out a Chunk, expected a stretch.*Loader\(tt\.Stream\(recordings, lanes, chunk\), chunks=20\)"
    ):
        trainer_of(tmp_path).fit(Module(), stream_of())
    with pytest.raises(DataError, match=r"given a list, expected a tt\.Stream"):
        Loader([1, 2])  # pyright: ignore[reportArgumentType]
    for wrong in (0, 1.5):
        with pytest.raises(DataError, match=r"chunks=.*at least 1"):
            Loader(stream_of(), wrong)  # pyright: ignore[reportArgumentType]


def test_settings_that_make_no_sense_are_refused() -> None:
    wrongs: list[dict[str, Any]] = [{"schedule": "step"}, {"clip": 0.0}, {"clip": -1.0}]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match="expected schedule 'update' or 'batch', and a clip above 0"):
            Module(**wrong)


class Overriding(Module):
    """Has hooks of its own, as any module, and calls no super."""

    def on_fit_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...


def test_hooks_are_the_users_to_override(tmp_path: Path) -> None:
    def made(optimizer: Any) -> dict[str, Any]:
        return {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "epoch"}

    found = [resumed(tmp_path / kind.__name__, 8, kind=kind, clip=0.05, scheduler=made, max_epochs=3) for kind in (Module, Overriding)]
    assert torch.equal(*found)
    trainer = trainer_of(tmp_path)
    trainer.fit(Overriding(), Loader(stream_of(), 4), loader_of_validation())
    assert "val_loss" in trainer.callback_metrics


def test_an_epoch_cut_short_is_followed_by_another_order_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    orders: list[tuple[int, ...]] = []

    class Noting(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            orders.append((batch.stream.epoch, batch_idx))

    saver = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}", every_n_epochs=1)
    module, options = Noting(), {"limit_train_batches": 0.5, "max_epochs": 3}
    trainer = trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver], **options)
    trainer.fit(module, Loader(stream_of(), 4))
    assert [epoch for epoch, _ in orders] == [0, 0, 0, 0, 1, 1, 1, 2, 2]  # the first batch of an epoch leaves the old one
    again = Module()
    trainer_of(tmp_path, **options).fit(again, Loader(stream_of(), 4), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert torch.equal(weights(again.net), weights(module.net))


@pytest.mark.parametrize(("stop", "chunks"), [(8, 4), (24, 1), (6, 4)])
def test_a_checkpoint_saved_after_max_steps_goes_on_to_the_same_bits(stop: int, chunks: int, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=stop, max_epochs=-1)
    module = Module()
    torch.manual_seed(5)
    trainer.fit(module, Loader(stream_of(), chunks))
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    again = Module()
    trainer_of(tmp_path, max_steps=40, max_epochs=-1).fit(again, Loader(stream_of(), chunks), ckpt_path=tmp_path / "after.ckpt")
    assert torch.equal(weights(again.net), plain(stop=40))


class Failing(Module):
    """Fails once, between an update and its step."""

    def on_update(self, update: tt.Update) -> None:
        super().on_update(update)
        if len(self.rates) == 11:
            raise RuntimeError("enough")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available.*")
@pytest.mark.filterwarnings("ignore:.*was called without a model.*")  # Lightning, of any fit with OnExceptionCheckpoint
def test_a_checkpoint_of_an_exception_makes_the_lost_update_again(tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises(RuntimeError, match="enough"):
        trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver]).fit(Failing(), Loader(stream_of(), 4))
    module = Module()
    trainer_of(tmp_path).fit(module, Loader(stream_of(), 4), ckpt_path=tmp_path / "failed.ckpt")
    assert torch.equal(weights(module.net), plain())


def test_a_gradient_scaler_scales_and_the_clip_sees_the_true_gradient(tmp_path: Path) -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=3.0e38)  # the first steps overflow, and are left out

    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = scaler()  # as for float16, which few operations of a CPU know
    module = Module(net_of().float(), clip=0.05)
    trainer_of(tmp_path, max_epochs=1, plugins=[plugin]).fit(module, Loader(stream_of(dtype=torch.float32), 4))
    net, mine = net_of().float(), scaler()
    optimizer = torch.optim.Adam(net.parameters(), LR)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for _ in tt.updates(net, stream_of(dtype=torch.float32), nn.MSELoss(), gradient=tt.Truncated(10, 25), scaler=mine):
            mine.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            mine.step(optimizer)
            mine.update()
            optimizer.zero_grad()
    assert mine.get_scale() < 3.0e38
    assert torch.equal(weights(module.net), weights(net))


class Two(Module):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), LR) for _ in range(2)]


class Lines(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_what_manual_optimization_cannot_do_is_refused_at_the_start(tmp_path: Path) -> None:
    for kind, told in ((Two, "SGD, SGD"), (Lines, "LBFGS")):
        with pytest.raises(ConfigError, match=rf"configure_optimizers gave {told}, expected one that steps"):
            fitted(tmp_path, kind())
    averaged = StochasticWeightAveraging(1e-2)
    net = tt.carry(nn.Sequential(nn.GRU(3, 4), Normed(), nn.Linear(4, 1))).double()
    with pytest.raises(ConfigError, match="an epoch more for BatchNorm"):
        trainer_of(tmp_path, callbacks=[averaged]).fit(Module(net), Loader(stream_of(), 4))
    saver = ModelCheckpoint(tmp_path, train_time_interval=timedelta(minutes=1))
    with pytest.raises(ConfigError, match="train_time_interval"):
        trainer_of(tmp_path, callbacks=[saver], enable_checkpointing=True).fit(Module(), Loader(stream_of(), 4))


class Normed(nn.Module):
    """BatchNorm over the features of `(T, B, H)`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


def test_one_stream_for_training_and_validation_is_refused(tmp_path: Path) -> None:
    stream, module = stream_of(), Module()
    with pytest.raises(DataError, match="is the one that is trained on"):
        trainer_of(tmp_path, num_sanity_val_steps=0).fit(module, Loader(stream, 4), Loader(stream, 4))
    (told,) = trainer_of(tmp_path).validate(module, Loader(stream, 4), verbose=False)  # after the fit it may be played
    assert told["val_loss"] > 0


def test_a_checkpoint_without_a_place_is_refused(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver], max_epochs=1).fit(Module(), Loader(stream_of(), 2))
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=False)
    del saved["throughtime"]
    torch.save(saved, tmp_path / "none.ckpt")
    with pytest.raises(RunError, match="the checkpoint of step 8 holds no place in a stream"):
        trainer_of(tmp_path).fit(Module(), Loader(stream_of(), 2), ckpt_path=tmp_path / "none.ckpt")


def test_checkpoint_of_two_ranks_is_refused_on_one(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    trainer_of(tmp_path, enable_checkpointing=True, callbacks=[saver], max_epochs=1).fit(Module(), Loader(stream_of(), 2))
    saved = torch.load(tmp_path / "step=8.ckpt", weights_only=False)
    saved["throughtime"] *= 2
    torch.save(saved, tmp_path / "two.ckpt")
    with pytest.raises(RunError, match="written by 2 ranks and 1 go on from it"):
        trainer_of(tmp_path).fit(Module(), Loader(stream_of(), 2), ckpt_path=tmp_path / "two.ckpt")


def test_lightnings_own_clipping_is_refused_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not supported for manual optimization"):
        trainer_of(tmp_path, gradient_clip_val=1.0).fit(Module(), Loader(stream_of(), 2))
