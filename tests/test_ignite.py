"""Ignite's trainer: scripts written against the original run with the import changed, and its
faults are mended.

Each fault is first shown in the original, which is installed, so that no test can pass for want of
it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.contrib.engines.tbptt import Tbptt_Events as OriginalEvents
from ignite.contrib.engines.tbptt import create_supervised_tbptt_trainer as original
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.integrations.ignite import Tbptt_Events, create_supervised_tbptt_trainer

SCRIPT = """
import torch
from {module} import Tbptt_Events, create_supervised_tbptt_trainer
from ignite.engine import Events
from ignite.metrics import RunningAverage

def prepare(batch, device, non_blocking):
    log.append(("prepare", type(batch).__name__, tuple(batch[0].shape), device, non_blocking))
    return tuple(part * 2 for part in batch)

def note(engine, name):
    weight = sum(p.double().sum().item() for p in model.parameters())
    state = engine.state
    log.append((name, state.epoch, state.iteration, state.output, model.training, weight))

options = 4, {dim}, "cpu", True, prepare
trainer = create_supervised_tbptt_trainer(model, optimizer, loss_fn, *options)
for event in [*Events, *Tbptt_Events]:
    if event not in (Events.EXCEPTION_RAISED, Events.TERMINATE_SINGLE_EPOCH):
        trainer.add_event_handler(event, note, str(event.value))
RunningAverage(output_transform=lambda x: x).attach(trainer, "average")
add = trainer.add_event_handler
add(Events.EPOCH_COMPLETED, lambda engine: log.append(engine.state.metrics["average"]))
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: model.eval())
final = trainer.run(data, max_epochs=2)
log.append(final.output)
log.append(list(trainer.state_dict()))
"""


class Recurrent(nn.Module):
    """A layer with a readout; its state is in a dict."""

    def __init__(self, *, batch_first: bool = False) -> None:
        super().__init__()
        self.layer, self.out = nn.GRU(3, 5, batch_first=batch_first), nn.Linear(5, 2)

    def forward(self, x: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        y, h = self.layer(x, None if hidden is None else hidden["memory"][0])
        return self.out(y), {"memory": [h]}


def build(make: Callable[[], nn.Module] = Recurrent) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def batches(count: int, steps: int = 11, lanes: int = 3, dim: int = 0) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    shape = (steps, lanes) if dim == 0 else (lanes, steps)
    return [
        [torch.randn(*shape, width, generator=draw, dtype=torch.float64) for width in (3, 2)]
        for _ in range(count)
    ]


def weights(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def ran(module: str, dim: int) -> tuple[list[Any], list[Tensor]]:
    """What the script logged, and the weights that it came to."""
    model = build(lambda: Recurrent(batch_first=dim != 0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "loss_fn": nn.MSELoss(),
        "data": batches(3, dim=dim),
        "log": [],
    }
    exec(SCRIPT.format(module=module, dim=dim), names)
    return names["log"], weights(model)


@pytest.mark.parametrize("dim", [0, -2])
def test_a_script_runs_with_only_the_import_changed(dim: int) -> None:
    log, came_to = ran("ignite.contrib.engines", dim)
    mine, mine_came_to = ran("throughtime.integrations.ignite", dim)
    assert len(log) > 60
    assert mine == log
    assert same(mine_came_to, came_to)


def trainer_of(
    create: Callable[..., Engine] = create_supervised_tbptt_trainer,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    model, step = build() if model is None else model, options.pop("step", 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return create(model, optimizer, nn.MSELoss(), step, **options), model


def chunks_trained(
    trainer: Engine, data: Any, event: Any = Tbptt_Events.TIME_ITERATION_COMPLETED
) -> int:
    records: list[int] = []
    trainer.add_event_handler(event, lambda: records.append(1))
    trainer.run(data)
    return len(records)


def by_hand(
    data: list[Any],
    model: nn.Module,
    *,
    epochs: int = 1,
    carry: bool = False,
    clip: float | None = None,
    amp: bool = False,
    scaler: Any = None,
) -> list[Tensor]:
    """The loop with every option written out; epochs start anew, and without `carry` batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        hidden = None
        for x, y in data:
            hidden = hidden if carry else None
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


def test_the_state_is_carried_over_batches_and_starts_anew_with_epochs() -> None:
    data = batches(4)
    trainer, theirs = trainer_of(original)
    trainer.run(data, max_epochs=2)
    assert same(weights(theirs), by_hand(data, build(), epochs=2))
    trainer, mine = trainer_of(carry=True)
    trainer.run(data, max_epochs=2)
    assert same(weights(mine), by_hand(data, build(), epochs=2, carry=True))
    assert not same(weights(mine), weights(theirs))
    # the epochs are told apart
    assert not same(weights(mine), by_hand(data * 2, build(), carry=True))


@pytest.mark.parametrize("end", ["terminate", "terminate_epoch"])
def test_terminate_stops_after_the_present_chunk(end: str) -> None:
    (whole,) = batches(1, steps=16)
    for event in Tbptt_Events:
        mine, theirs = trainer_of(), trainer_of(original)
        for trainer, _ in (mine, theirs):
            trainer.add_event_handler(event, lambda engine: getattr(engine, end)())
        assert chunks_trained(theirs[0], [whole], OriginalEvents.TIME_ITERATION_COMPLETED) == 4
        assert chunks_trained(mine[0], [whole]) == 1
        assert same(weights(mine[1]), by_hand([[part[:4] for part in whole]], build()))


class Speaking(nn.Module):
    """Takes a dictionary: what changes over time, and who speaks."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.records = nn.GRU(3, 2), list[Any]()

    def forward(self, x: Any, hidden: Any = None) -> tuple[Tensor, Any]:
        self.records.append(x)
        return self.gru(x["audio"], hidden)


def test_nested_batches_are_cut_along_time_and_static_parts_go_whole() -> None:
    audio, y = batches(1, 7)[0]
    speaker = torch.arange(6.0).view(3, 2)
    batch = {"audio": audio, "speaker": speaker}, y
    trainer, model = trainer_of(model=build(Speaking), static=["0.speaker"])
    trainer.run([batch])
    assert [len(record["audio"]) for record in model.records] == [4, 3]
    assert torch.equal(torch.cat([record["audio"] for record in model.records]), audio)
    assert all(torch.equal(record["speaker"], speaker) for record in model.records)


def test_loss_that_is_not_finite_ends_the_run_before_the_step() -> None:
    """The square of a huge target is infinite, its gradient is not."""
    model = Recurrent()
    x, y = torch.randn(9, 2, 3), torch.randn(9, 2, 2)
    y[4, 1, 0] = torch.finfo(y.dtype).max ** 0.5 * 100
    steps = list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trainer = create_supervised_tbptt_trainer(model, optimizer, nn.functional.mse_loss, 3)
    with pytest.raises(RunError, match="steps 3 to 5 of the batch"):
        trainer.run([(x, y)])
    assert len(steps) == 1


@pytest.mark.parametrize(("amp", "scaled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_clipping_and_mixed_precision_are_those_of_the_loop_by_hand(
    clip: float | None, amp: bool, scaled: bool
) -> None:
    data = [(x.float(), y.float()) for x, y in batches(3)]

    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if scaled else None

    kind = "amp" if amp else None
    options: dict[str, Any] = {"amp_mode": kind, "scaler": scaler(), "max_norm": clip}
    trainer, mine = trainer_of(model=build().float(), **options)
    trainer.run(data)
    expected = by_hand(data, build().float(), clip=clip, amp=amp, scaler=scaler())
    assert same(weights(mine), expected)
    assert same(weights(mine), by_hand(data, build().float())) == (not amp and clip is None)


def test_batches_and_arguments_that_make_no_sense_are_refused() -> None:
    one = torch.zeros(4, 1, 3)
    batches_: list[tuple[Any, dict[str, Any]]] = [
        ({"inputs": one, "targets": one, "more": one}, {}),
        ((one, one, one), {}),
        ((one, one), {"static": ("2",)}),
        ((one, one), {"dim": 5}),
        ((one[:0], one[:0]), {}),
    ]
    for batch, options in batches_:
        with pytest.raises(DataError, match="batch"):
            trainer_of(model=nn.GRU(3, 3), **options)[0].run([batch])
    wrongs: list[dict[str, Any]] = [
        {"step": 0},
        {"scaler": torch.amp.GradScaler("cpu")},
        {"scaler": True, "amp_mode": "amp"},
        {"amp_mode": "apex"},
        {"max_norm": 0.0},
    ]
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            trainer_of(**wrong)
    with pytest.raises(ConfigError, match=r"StreamTrainer\(net, .*or give net.module"):
        trainer_of(model=tt.carry(nn.GRU(3, 3)))
    # another number of lanes where the state is carried; of steps is nothing to refuse
    data = [*batches(1), *batches(1, steps=14), *batches(1, lanes=2)]
    trainer, _ = trainer_of(carry=True)
    with pytest.raises(DataError, match=r"has 2 lanes, the carried state 3.*drop_last=True"):
        trainer.run(data)
    trainer_of()[0].run(data)
    trainer, _ = trainer_of(carry=True)
    trainer.run(data[:2])
    trainer.run(data[2:])  # a new epoch may be of another size


def test_a_checkpoint_resumes_in_the_middle_of_an_epoch_to_the_bit(tmp_path: Path) -> None:
    data = batches(5)
    whole = by_hand(data, build(), carry=True)

    def begun() -> tuple[Engine, dict[str, Any]]:
        trainer, model = trainer_of(carry=True)
        return trainer, {"trainer": trainer, "model": model}

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
