"""Additions to Ignite's trainer against plain loops: state, clipping, AMP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import Tensor, nn

import throughtime as tt
from test_ignite import Leaky, Recurrent, batches, build, same, trainer_of, weights
from throughtime.errors import ConfigError, DataError
from throughtime.integrations.ignite import create_supervised_tbptt_trainer


def trained(
    data: list[Any], model: nn.Module | None = None, epochs: int = 1, **options: Any
) -> list[Tensor]:
    trainer, own = trainer_of(create_supervised_tbptt_trainer, model, **options)
    trainer.run(data, max_epochs=epochs)
    return weights(own)


def gru() -> nn.Module:
    return build(lambda: Recurrent(nn.GRU))


def by_hand(
    data: list[Any],
    clip: float | None = None,
    amp: bool = False,
    scaler: Any = None,
    model: nn.Module | None = None,
) -> list[Tensor]:
    """The loop with every option written out; each batch from the start."""
    model = gru() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        hidden = None
        for part, target in zip(x.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", enabled=amp):
                outputs, hidden = model(part, hidden)
                loss = nn.functional.mse_loss(outputs, target)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            hidden = tt.state.detach(hidden)
    return weights(model)


def test_gradients_are_clipped_to_the_norm() -> None:
    data = batches(3)
    clipped = trained(data, max_norm=0.05)
    assert same(clipped, by_hand(data, clip=0.05))
    assert not same(clipped, by_hand(data))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("scaled", [False, True])
def test_mixed_precision_is_that_of_the_loop_by_hand(clip: float | None, scaled: bool) -> None:
    data = [(x.float(), y.float()) for x, y in batches(3)]

    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scaled else None

    mine = trained(data, gru().float(), amp_mode="amp", scaler=scaler(), max_norm=clip)
    assert same(mine, by_hand(data, clip, True, scaler(), gru().float()))
    assert not same(mine, by_hand(data, clip, model=gru().float()))


def test_batches_may_have_their_lanes_first() -> None:
    data = batches(3)
    turned = [(x.transpose(0, 1), y.transpose(0, 1)) for x, y in data]
    batch_first = build(lambda: Recurrent(nn.GRU, batch_first=True))
    assert batch_first.state_dict().keys() == gru().state_dict().keys()
    a, b = trained(data), trained(turned, batch_first, dim=1)
    assert max((p - q).abs().max().item() for p, q in zip(a, b, strict=True)) < 1e-12


def test_a_carried_net_is_referred_to_the_stream_trainer() -> None:
    with pytest.raises(ConfigError, match=r"StreamTrainer\(net, .*or give net.module"):
        trainer_of(create_supervised_tbptt_trainer, tt.carry(gru()))


@pytest.mark.parametrize("options", [{}, {"dim": -3}], ids=["plain", "negative-dim"])
def test_another_number_of_lanes_is_refused(options: dict[str, Any]) -> None:
    data = [
        *batches(1),
        *batches(1, steps=14),
        *batches(1, lanes=2),
    ]  # another number of steps is nothing to refuse
    with pytest.raises(
        DataError, match=r"the batch has 2 lanes, the carried state 3.*drop_last=True"
    ):
        trained(data, carry=True, **options)
    trained(data, **options)  # nothing is carried
    trainer, _ = trainer_of(create_supervised_tbptt_trainer, carry=True, **options)
    trainer.run(data[:2])
    trainer.run(data[2:])  # a new epoch may be of another size


REFUSED: list[Any] = [
    pytest.param({"step": 0}, "tbtt_step=0", id="no-step"),
    pytest.param({"step": 1e2}, "tbtt_step=100.0", id="float-step"),
    pytest.param({"static": "speaker"}, r"static=\('speaker',\)", id="static-string"),
    pytest.param(
        {"scaler": torch.amp.GradScaler("cpu")}, "amp_mode='amp'", id="scaler-without-amp"
    ),
    pytest.param(
        {"scaler": True, "amp_mode": "amp"}, "expected a torch.amp.GradScaler", id="scaler-true"
    ),
    pytest.param({"amp_mode": "apex"}, "amp_mode='apex'", id="apex"),
    pytest.param({"max_norm": 0.0}, "max_norm=0.0", id="no-norm"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        trainer_of(create_supervised_tbptt_trainer, **options)


@pytest.mark.parametrize("make", [lambda: Recurrent(nn.LSTM), Leaky], ids=["lstm", "dict-state"])
def test_a_checkpoint_resumes_in_the_middle_of_an_epoch_to_the_bit(
    make: Any, tmp_path: Path
) -> None:
    data = batches(5)
    whole = trained(data, build(make), carry=True)

    def begun() -> tuple[Engine, dict[str, Any]]:
        model = build(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_tbptt_trainer(model, optimizer, nn.MSELoss(), 4, carry=True)
        return trainer, {"trainer": trainer, "model": model, "optimizer": optimizer}

    trainer, to_save = begun()
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=2),
        Checkpoint(to_save, DiskSaver(str(tmp_path), require_empty=False)),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    trainer.run(data)
    (saved,) = tmp_path.glob("*.pt")

    def resumed(cold: bool) -> list[Tensor]:
        trainer, to_save = begun()
        Checkpoint.load_objects(to_save, str(saved))
        if cold:
            getattr(trainer, "state").hidden = None  # noqa: B009  # a state takes any attribute
        trainer.run(
            data[2:]
        )  # a loader goes on where it was, which is the user's business in Ignite
        return weights(to_save["model"])

    assert same(resumed(cold=False), whole)
    assert not same(resumed(cold=True), whole)
