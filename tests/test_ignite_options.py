"""Additions to Ignite's trainer against plain loops: state, resets, horizon, clipping, AMP."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import Tensor, nn

import throughtime as tt
from test_ignite import Leaky, Recurrent, batches, build, same, trainer_of, unbroken, weights
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.integrations.ignite import Tbptt_Events, create_supervised_tbptt_trainer


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


def windows(data: list[Any], model: nn.Module, stride: int, horizon: int) -> list[Tensor]:
    """Each window from its first step under the present weights.

    Its last stride counts. The state before it is a value.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        at, edge = 0, None
        for begin in range(0, len(x), stride):
            end = min(begin + stride, len(x))
            entering, outputs, hidden = {}, {}, edge
            optimizer.zero_grad()
            for step in range(at, end):
                entering[step] = hidden
                outputs[step], hidden = model(x[step : step + 1], hidden)
            nn.functional.mse_loss(
                torch.cat([outputs[step] for step in range(begin, end)]), y[begin:end]
            ).backward()
            optimizer.step()
            entering[end] = hidden
            after = end if horizon == stride else max(0, min(end + stride, len(x)) - horizon)
            if after > at:
                at, edge = after, tt.state.detach(entering[after])
    return weights(model)


@pytest.mark.parametrize("horizon", [4, 8, 12])
def test_credit_flows_back_to_the_horizon(horizon: int) -> None:
    data = batches(3, steps=15)
    mine = trained(data, horizon=horizon)
    assert (
        max(
            (a - b).abs().max().item()
            for a, b in zip(mine, windows(data, gru(), 4, horizon), strict=True)
        )
        < 1e-12
    )
    others = [by_hand(data) if horizon > 4 else windows(data, gru(), 4, 8)]
    assert not any(
        torch.allclose(a, b, atol=1e-7)
        for other in others
        for a, b in zip(mine, other, strict=True)
    )


@pytest.mark.parametrize("horizon", [None, 8])
def test_batches_may_have_their_lanes_first(horizon: int | None) -> None:
    data = batches(3)
    turned = [(x.transpose(0, 1), y.transpose(0, 1)) for x, y in data]
    batch_first = build(lambda: Recurrent(nn.GRU, batch_first=True))
    assert batch_first.state_dict().keys() == gru().state_dict().keys()
    a, b = trained(data, horizon=horizon), trained(turned, batch_first, horizon=horizon, dim=1)
    assert max((p - q).abs().max().item() for p, q in zip(a, b, strict=True)) < 1e-12


def test_a_carried_net_runs_as_with_a_horizon() -> None:
    data = batches(3)
    assert same(
        trained(data, tt.carry(gru()), carry=True), trained(data, gru(), carry=True, horizon=4)
    )
    assert not same(trained(data, tt.carry(gru())), trained(data, gru(), carry=True, horizon=4))


def fresh_rows(count: int, lanes: int = 3) -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.rand(lanes, generator=draw) < 0.5 for _ in range(count)]


def with_resets(data: list[Any], fresh: list[Tensor], model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden: Any = None
    for (x, y), rows in zip(data, fresh, strict=True):
        if hidden is not None:  # (layers, B, H), each leaf of it
            hidden = tuple(torch.where(rows.view(1, -1, 1), 0.0, h) for h in hidden)
        for part, target in zip(x.split(4), y.split(4), strict=True):
            optimizer.zero_grad()
            outputs, hidden = model(part, hidden)
            nn.functional.mse_loss(outputs, target).backward()
            optimizer.step()
            hidden = tt.state.detach(hidden)
    return weights(model)


def lstm() -> nn.Module:
    return build(lambda: Recurrent(nn.LSTM))


@pytest.mark.parametrize("by_key", [True, False])
def test_rows_that_start_anew_forget_and_the_others_go_on(by_key: bool) -> None:
    data, fresh = batches(5), fresh_rows(5)
    assert any(rows.any() and not rows.all() for rows in fresh[1:])
    batch_of = [
        {"inputs": x, "targets": y, "new": rows} for (x, y), rows in zip(data, fresh, strict=True)
    ]
    if by_key:
        mine = trained(batch_of, lstm(), carry=True, resets="new")
    else:
        answers = iter(fresh)
        mine = trained(data, lstm(), carry=True, resets=lambda _: next(answers))

    def far(rows: list[Tensor]) -> float:
        return max(
            (a - b).abs().max().item()
            for a, b in zip(mine, with_resets(data, rows, lstm()), strict=True)
        )

    assert far(fresh) < 1e-12
    assert far([torch.zeros(3, dtype=torch.bool)] * 5) > 1e-6
    assert far([rows.roll(1) for rows in fresh]) > 1e-6


@pytest.mark.parametrize(
    "options", [{}, {"dim": -3}, {"horizon": 8}], ids=["plain", "negative-dim", "windows"]
)
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
    pytest.param({"resets": "new"}, "resets without carry=True", id="resets-without-carry"),
    pytest.param({"horizon": 3}, "horizon", id="horizon-below-stride"),
    pytest.param(
        {"horizon": 8, "dim": 2}, "dim=2 with resets or horizon", id="horizon-with-odd-dim"
    ),
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


def test_a_model_that_cannot_be_carried_is_refused_where_it_must_be() -> None:
    with pytest.raises(ModelError, match="bidirectional"):
        trainer_of(create_supervised_tbptt_trainer, nn.GRU(3, 2, bidirectional=True), horizon=8)


X, Y = torch.zeros(4, 3, 3).double(), torch.zeros(4, 3, 2).double()
ODD: list[Any] = [
    pytest.param(
        (X, Y), "new", "names no entry of the batch, which has a tuple", id="key-of-a-tuple"
    ),
    pytest.param({"inputs": X, "targets": Y}, "new", "the keys", id="no-such-key"),
    pytest.param(
        (X, Y),
        lambda _: torch.ones(2, dtype=torch.bool),
        r"shape \(2,\), expected torch.bool of shape \(3,\)",
        id="rows",
    ),
    pytest.param((X, Y), lambda _: torch.ones(3), "resets gave torch.float32", id="type"),
    pytest.param((X, Y), lambda _: [True] * 3, "resets gave list", id="list"),
    pytest.param(
        (X[:, 0, 0], Y[:, 0, 0]),
        lambda _: None,
        r"prepare_batch gave a \(4,\) tensor",
        id="no-lanes",
    ),
    pytest.param(({"a": X}, Y), lambda _: None, "prepare_batch gave a dict", id="nested-inputs"),
]


@pytest.mark.parametrize(("batch", "resets", "reason"), ODD)
def test_resets_that_fit_no_batch_are_refused(batch: Any, resets: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        trained([batch], carry=True, resets=resets)


@pytest.mark.parametrize("options", [{}, {"horizon": 8}], ids=["plain", "windows"])
@pytest.mark.parametrize("make", [lambda: Recurrent(nn.LSTM), Leaky], ids=["lstm", "dict-state"])
def test_a_checkpoint_resumes_in_the_middle_of_an_epoch_to_the_bit(
    make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    data = batches(5)
    whole = trained(data, build(make), carry=True, **options)

    def begun() -> tuple[Engine, dict[str, Any]]:
        model = build(make)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_tbptt_trainer(
            model, optimizer, nn.MSELoss(), 4, carry=True, **options
        )
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


def test_a_checkpoint_of_the_end_of_an_epoch_begins_the_next_one_anew() -> None:
    data = batches(3)
    trainer, model = trainer_of(create_supervised_tbptt_trainer, carry=True)
    saved: list[Any] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=3),
        lambda engine: saved.append((engine.state_dict(), weights(model))),
    )
    trainer.run(data, max_epochs=2)
    again, other = trainer_of(create_supervised_tbptt_trainer, carry=True)
    state, at_that_time = saved[0]
    assert state["hidden"] is not None
    again.load_state_dict(state)
    for weight, value in zip(other.parameters(), at_that_time, strict=True):
        weight.data.copy_(value)
    again.run(data)
    assert same(weights(other), weights(model))


def test_a_terminated_run_starts_the_next_epoch_without_the_state() -> None:
    data = batches(4)
    trainer, model = trainer_of(create_supervised_tbptt_trainer, carry=True)
    stop = trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate)
    trainer.run(data, max_epochs=2)
    stop.remove()
    trainer.run(data)
    plain = gru()
    unbroken(data[:2], plain)
    assert same(weights(model), unbroken(data, plain))


def test_a_stride_without_a_target_that_counts_only_carries_the_state_on() -> None:
    x = batches(1, steps=12)[0][0]
    y = torch.full((12, 3), 9)
    y[:4] = 1
    model = gru()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_tbptt_trainer(
        model, optimizer, nn.CrossEntropyLoss(ignore_index=9), 4, horizon=4, carry=True
    )
    outputs_of_chunks: list[float] = []
    trainer.add_event_handler(
        Tbptt_Events.TIME_ITERATION_COMPLETED,
        lambda engine: outputs_of_chunks.append(engine.state.output),
    )
    final: Any = trainer.run([(x, y)])
    assert len(outputs_of_chunks) == 1
    assert final.output == outputs_of_chunks[0]
    with torch.no_grad():
        first = build(lambda: Recurrent(nn.GRU))(x[:4])[1]
        expected = model(x[4:], first)[1]
    torch.testing.assert_close(final.hidden.transpose(0, 1), expected)
