"""Modules of Lightning 1.9 train on 2.6 as the loop by hand: same weights, same counts."""

# ruff: noqa: ARG002  # hooks take what Lightning passes

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule as PlainModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional

from lightning_old import (
    SPLITS,
    Batch,
    Batches,
    K,
    Mixed,
    T,
    Tagger,
    Weights,
    batches,
    close,
    fitted,
    same,
    trainer,
    weights,
)
from processes import in_processes
from throughtime.integrations.lightning import LightningModule


class Seen(NamedTuple):
    weights: Weights
    steps: int


def by_hand(
    data: Sequence[Batch],
    epochs: int = 1,
    *,
    fault: str = "",
    clip: float | None = None,
    autocast: torch.dtype | None = None,
) -> Seen:
    """TBPTT as anybody writes it; a fault is what an implementation could do instead."""
    net = seeded().to(data[0][0].dtype)
    optimizer, steps, hiddens = net.configure_optimizers(), 0, None
    scaler = torch.amp.GradScaler("cpu", enabled=autocast == torch.half)
    for _ in range(epochs):
        for x, y in data:
            if fault != "carries across batches":
                hiddens = None
            for t in range(0, T, K):
                with torch.autocast(
                    "cpu", autocast, enabled=autocast is not None, cache_enabled=False
                ):
                    out, hiddens = net.lstm(x[:, t : t + K], hiddens)
                    loss = functional.mse_loss(net.linear(out).squeeze(-1), y[:, t : t + K])
                hiddens = None if fault == "forgets" else tuple(h.detach() for h in hiddens)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if clip is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                steps += 1
    return Seen(weights(net), steps)


def seeded(**kwargs: Any) -> Any:
    torch.manual_seed(1)
    return Tagger(**kwargs)


def test_an_old_module_trains_as_the_loop_by_hand_to_the_bit(tmp_path: Path) -> None:
    expected = by_hand(batches(), epochs=2)
    assert expected.steps == 50
    result = fitted(seeded(), batches(), tmp_path, max_epochs=2)
    assert same(result, expected.weights)
    for fault in ("carries across batches", "forgets"):
        assert not same(result, by_hand(batches(), epochs=2, fault=fault).weights)


class ByProperty(Mixed):
    @property
    def truncated_bptt_steps(self) -> int:
        return K


class ThirdByAnyName(Mixed):
    def training_step(self, xy: Batch, number: int, state: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Tagger.training_step(self, xy, number, state)


class OtherHooks(Mixed):
    """Overrides that the documentation of 1.9 and 2.x shows, none of which calls super."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def setup(self, stage: str) -> None:
        pass

    def on_fit_start(self) -> None:
        pass

    def configure_callbacks(self) -> list[Any]:
        return []


class WithoutMethods(LightningModule):
    pass


class FromAMixin(WithoutMethods, Mixed):
    """Methods that the class of the ready-made module does not define."""


@pytest.mark.parametrize("kind", [Mixed, ByProperty, ThirdByAnyName, OtherHooks, FromAMixin])
def test_every_form_of_such_a_module_trains_the_same(kind: type[Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    assert same(fitted(kind(), batches(), tmp_path), by_hand(batches()).weights)


@pytest.mark.parametrize("fault", [False, True])
def test_clipping_is_per_split(fault: bool, tmp_path: Path) -> None:
    result = fitted(seeded(), batches(), tmp_path, gradient_clip_val=None if fault else 0.1)
    assert same(result, by_hand(batches(), clip=0.1).weights) is not fault


# torch says so whenever oneDNN is switched
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_mixed_precision_is_autocast_and_scaler_per_split(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    data = [(x.float(), y.float()) for x, y in batches()]  # autocast leaves double as it is
    scaler = torch.amp.GradScaler("cpu") if dtype == torch.half else None
    plugin = MixedPrecision("16-mixed" if scaler else "bf16-mixed", "cpu", scaler)
    with torch.backends.mkldnn.flags(enabled=False):  # it has no LSTM in half precision
        result = fitted(seeded().float(), data, tmp_path, plugins=[plugin], gradient_clip_val=0.1)
        assert same(result, by_hand(data, autocast=dtype, clip=0.1).weights)
        assert not same(result, by_hand(data, clip=0.1).weights)


class Counting(Mixed):
    """Notes what is counted in splits and what in batches."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_before: list[bool] = []
        self.rates: list[float] = []
        self.counts: list[tuple[int, int]] = []
        self.outputs: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
        self.hidden_before.append(hiddens is not None and not any(h.requires_grad for h in hiddens))
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx, hiddens)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)
        self.counts.append((batch_idx, self.trainer.global_step))


def test_steps_count_splits_and_everything_else_counts_batches(tmp_path: Path) -> None:
    module = Counting()
    fitted(module, batches(3), tmp_path)
    assert module.counts == [(0, 5), (1, 10), (2, 15)]
    assert module.rates == [1.0] * 5 + [0.5] * 5 + [0.25] * 5
    assert module.hidden_before == [False, True, True, True, True] * 3
    assert [[sorted(output) for output in outputs] for outputs in module.outputs] == [
        [["loss"]] * 5
    ] * 3


def test_a_batch_of_one_split_gives_one_output(tmp_path: Path) -> None:
    module = Counting()
    fitted(module, batches(1, steps=K), tmp_path)
    assert list(module.outputs[0]) == ["loss"]


@pytest.mark.parametrize(("most", "plays"), [(7, 7), (10, 10), (100, 25)])
def test_max_steps_stops_within_a_batch(most: int, plays: int, tmp_path: Path) -> None:
    module = Counting()
    fitted(module, batches(), tmp_path, max_steps=most)
    assert len(module.rates) == plays


def test_no_splitting_is_lightning_as_it_is(tmp_path: Path) -> None:
    class Whole(Mixed):
        truncated_bptt_steps = 0

        def training_step(self, batch: Batch, batch_idx: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().training_step(batch, batch_idx, None)["loss"]

    class Plain(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.linear = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 1)
            self.double()

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            return Tagger.training_step(self, batch, batch_idx, None)["loss"]

        def configure_optimizers(self) -> Any:
            return Tagger.configure_optimizers(self)

    torch.manual_seed(1)
    expected = fitted(Plain(), batches(), tmp_path)
    torch.manual_seed(1)
    assert same(fitted(Whole(), batches(), tmp_path), expected)
    torch.manual_seed(1)
    longest = Mixed()
    longest.truncated_bptt_steps = T
    assert same(fitted(longest, batches(), tmp_path), expected)


class Gradients(Mixed):
    """Records the gradients that reach the optimizer, and leaves the weights as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Weights] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.recorded.append(
            {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class GradientsOtherHooks(OtherHooks, Gradients):
    pass


def accumulated(data: Sequence[Batch], count: int, fault: str) -> Weights:
    """The gradient of the mean over the splits of some batches, from one loss and one backward."""
    net = seeded()
    losses: list[Tensor] = []
    for x, y in data:
        hiddens, start = None, (T - 1) // K * K if fault == "last split only" else 0
        for t in range(0, T, K):
            out, hiddens = net.lstm(x[:, t : t + K], hiddens)
            hiddens = tuple(h.detach() for h in hiddens)
            weight = 1 / SPLITS if fault == "splits count the same" else out.shape[1] / T
            if t >= start:
                losses.append(
                    weight
                    / count
                    * functional.mse_loss(net.linear(out).squeeze(-1), y[:, t : t + K])
                )
    torch.stack(losses).sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [Gradients, GradientsOtherHooks])
def test_accumulation_loses_no_gradient(kind: type[Gradients], tmp_path: Path) -> None:
    """Two full groups of two batches, and a last group of one, which is both first and last."""
    torch.manual_seed(1)
    module, data = kind(), batches()
    running = trainer(tmp_path, accumulate_grad_batches=2)
    running.fit(module, Batches(data))
    assert running.global_step == len(module.recorded) == 3
    for result, group in zip(module.recorded, (data[:2], data[2:4], data[4:]), strict=True):
        assert close(result, accumulated(group, 2, ""))
        for fault in ("last split only", "splits count the same"):
            assert not close(result, accumulated(group, 2, fault))


def test_accumulation_over_another_layout_asks_for_the_steps_of_a_split(tmp_path: Path) -> None:
    class TimeFirst(Gradients):
        def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
            return super().training_step(
                (batch[0].transpose(0, 1), batch[1].transpose(0, 1)), batch_idx, hiddens
            )

        def tbptt_split_batch(self, batch: Batch, split_size: int) -> list[Any]:
            return [
                tuple(item[t : t + split_size] for item in batch) for t in range(0, T, split_size)
            ]

    class WithSteps(TimeFirst):
        def tbptt_split_steps(self, batch: Any, parts: Sequence[Any]) -> list[int]:
            return [len(x) for x, _ in parts]

    data = batches(2)
    turned = [(x.transpose(0, 1), y.transpose(0, 1)) for x, y in data]
    with pytest.raises(MisconfigurationException, match="Override tbptt_split_steps"):
        fitted(TimeFirst(), turned, tmp_path, accumulate_grad_batches=2)
    torch.manual_seed(1)
    module = WithSteps()
    fitted(module, turned, tmp_path, accumulate_grad_batches=2)
    assert close(module.recorded[0], accumulated(data, 2, ""))


def test_manual_optimization_plays_one_split_per_call(tmp_path: Path) -> None:
    class Manual(Mixed):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
            optimizer: Any = self.optimizers()
            out = super().training_step(batch, batch_idx, hiddens)
            optimizer.zero_grad()
            self.manual_backward(out["loss"])
            optimizer.step()
            return out

    torch.manual_seed(1)
    module, running = Manual(), trainer(tmp_path)
    running.fit(module, Batches(batches()))
    assert same(weights(module), by_hand(batches()).weights)
    assert running.global_step == 25


def test_a_closure_that_is_called_again_starts_from_the_same_hiddens(tmp_path: Path) -> None:
    class Twice(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.batches_seen: list[Any] = []

        def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
            self.batches_seen.append(hiddens)
            return super().training_step(batch, batch_idx, hiddens)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(
                self.parameters(),
                lr=0.1,
                max_iter=2,
                max_eval=2,
                tolerance_grad=0,
                tolerance_change=0,
            )

    module = Twice()
    fitted(module, batches(1), tmp_path)
    assert len(module.batches_seen) == 2 * SPLITS
    assert all(module.batches_seen[i] is module.batches_seen[i + 1] for i in range(0, 10, 2))
    assert module.batches_seen[2] is not module.batches_seen[4]


@pytest.mark.parametrize("between", [False, True])
def test_a_logged_mean_is_over_all_splits(between: bool, tmp_path: Path) -> None:
    class Logging(Gradients):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []

        def training_step(self, batch: Batch, batch_idx: int, hiddens: Any) -> Any:
            out = super().training_step(batch, batch_idx, hiddens)
            self.losses.append(out["loss"].item())
            return out

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # a log from another hook: Lightning then takes the first batch for a new epoch at every
            # split
            if between:
                self.log("norm", torch.ones(()), on_epoch=True)

    module, running = Logging(), trainer(tmp_path, max_epochs=2)
    running.fit(module, Batches(batches()))
    losses_after = module.losses[25:]
    result = float(running.callback_metrics["train_loss_epoch"])
    assert result == pytest.approx(sum(losses_after) / 25, rel=1e-6)
    assert result != pytest.approx(
        sum(losses_after[4:]) / 21, rel=1e-3
    )  # the splits before the last of the first batch forgotten
    assert float(running.callback_metrics["train_loss_step"]) == pytest.approx(
        losses_after[-1], rel=1e-6
    )


# the folder of the run that is resumed
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_resumed_training_gives_the_same_weights(tmp_path: Path) -> None:
    """From the middle of an epoch, after three batches."""
    data = batches()
    torch.manual_seed(1)
    each: dict[str, Any] = {
        "every_n_train_steps": 3 * SPLITS,
        "save_top_k": -1,
        "filename": "{step}",
    }
    saving: dict[str, Any] = {
        "callbacks": [ModelCheckpoint(tmp_path, **each)],
        "enable_checkpointing": True,
    }
    fitted(Mixed(), data, tmp_path, **saving)
    torch.manual_seed(2)
    saving["callbacks"] = [ModelCheckpoint(tmp_path, **each)]
    module, running = Mixed(), trainer(tmp_path, max_epochs=2, **saving)
    running.fit(module, Batches(data), ckpt_path=tmp_path / "step=15.ckpt", weights_only=True)
    assert running.global_step == 50
    assert same(weights(module), by_hand(data, epochs=2).weights)


def test_a_trainer_plays_other_modules_as_before_and_the_same_one_again(tmp_path: Path) -> None:
    class Plain(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(2, 1), 0
            self.double()

        def training_step(self, batch: Batch) -> Any:
            self.calls += 1
            return {"loss": self.linear(batch[0]).mean(), "hiddens": 1}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, other, running = Mixed(), Plain(), trainer(tmp_path)
    counts: list[int] = []
    for epochs, trained in enumerate((other, module, module, other), 1):
        running.fit_loop.max_epochs = epochs
        running.fit(trained, Batches(batches(2)))
        counts.append(running.global_step)
    assert (counts, other.calls) == ([2, 12, 22, 24], 4)


def nothing() -> None:
    return None


def ranked(rank: int, _: None) -> Iterator[tuple[str, Any]]:
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    data = [(x[rank::2], y[rank::2]) for x, y in batches(10, lanes=4)]
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    yield "weights", fitted(seeded(), data, Path(), **settings)
    torch.manual_seed(1)
    module = Gradients()
    fitted(module, data[:2], Path(), accumulate_grad_batches=2, **settings)
    yield "gradient", module.recorded[0]


@pytest.mark.slow
def test_two_processes_train_as_one() -> None:
    data = batches(10, lanes=4)
    expected = by_hand(data)
    assert expected.steps == 50
    for rank in in_processes(2, nothing, ranked):
        assert close(rank["weights"], expected.weights)
        assert close(rank["gradient"], accumulated(data[:2], 2, ""))
        assert not close(
            rank["gradient"], accumulated([(x[::2], y[::2]) for x, y in data[:2]], 2, "")
        )  # one rank's own
