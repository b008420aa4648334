"""Ignite engines on a stream: updates as in `tt.updates`, handlers, resuming, evaluation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from torch import Tensor, nn

import throughtime as tt
from plain_loop import LENGTHS, Course, adam, by_hand, check, every_course, flat
from processes import in_processes
from strategies import recordings
from throughtime.errors import ConfigError, DataError
from throughtime.integrations.ignite import StreamEvaluator, StreamEvents, StreamTrainer

PLAIN = Course()


def trainer_of(
    course: Course = PLAIN, *, chunks: int = 3, seed: int = 5, **more: Any
) -> tuple[StreamTrainer, dict[str, Any]]:
    """A trainer, and all that a checkpoint holds."""
    net = course.net()
    optimizer = adam(net)
    options: dict[str, Any] = {"gradient": course.gradient, "accumulate": course.accumulate}
    options |= {"max_norm": course.clip, "amp_mode": "amp" if course.bfloat16 else None}
    trainer = StreamTrainer(net, optimizer, nn.MSELoss(), chunks=chunks, **options | more)
    torch.manual_seed(seed)
    return trainer, {"trainer": trainer, "net": net, "optimizer": optimizer}


def train(course: Course, folder: Path) -> Tensor:
    """Stopped within an epoch, or after the first."""
    trainer, parts = trainer_of(course)
    if course.resume:
        of_update, of_epoch = StreamEvents.UPDATE_COMPLETED, Events.EPOCH_COMPLETED
        at = of_update(once=course.resume) if course.resume < 10 else of_epoch(once=1)
        trainer.add_event_handler(at, Checkpoint(parts, DiskSaver(str(folder))))
        trainer.add_event_handler(at, trainer.terminate)
        trainer.run(course.stream(), max_epochs=2)
        trainer, parts = trainer_of(course, seed=99)
        (saved,) = folder.glob("*.pt")
        Checkpoint.load_objects(parts, str(saved))
    state: Any = trainer.run(course.stream(), max_epochs=2)
    assert state.iteration == 2 * -(-course.stream().steps // 30)
    return flat(parts["net"])


@every_course
def test_an_engine_makes_the_weights_of_the_plain_loop(course: Course, tmp_path: Path) -> None:
    check(train, course, tmp_path)


def test_the_output_of_an_iteration_is_the_mean_over_its_valid_steps() -> None:
    own_stream = tt.Stream(recordings([73, 40], outputs=1), lanes=1, chunk=10, seed=None)
    trainer, _ = trainer_of(chunks=100)
    records: list[tuple[float, int]] = []
    trainer.add_event_handler(
        StreamEvents.UPDATE_COMPLETED,
        lambda e: records.append((e.state.update.loss.item(), e.state.update.steps)),
    )
    output: Any = trainer.run(own_stream).output
    total = sum(steps for _, steps in records)
    assert total == 113
    assert abs(output - sum(loss * steps for loss, steps in records) / total) < 1e-12
    # the ragged tail does not count double
    assert abs(output - sum(loss for loss, _ in records) / len(records)) > 1e-6


@pytest.mark.parametrize("end", ["terminate", "terminate_epoch"])
def test_terminate_stops_after_the_present_update(end: str) -> None:
    trainer, parts = trainer_of(chunks=100)
    trainer.add_event_handler(
        StreamEvents.UPDATE_COMPLETED(once=4), lambda engine: getattr(engine, end)()
    )
    state: Any = trainer.run(PLAIN.stream())
    assert state.updates == 4
    assert torch.equal(flat(parts["net"]), by_hand(PLAIN, 4))


def test_the_state_of_another_engine_and_of_another_stream_are_refused() -> None:
    trainer, _ = trainer_of()
    with pytest.raises(DataError, match="expected 'stream' as well"):
        trainer.load_state_dict({"iteration": 3, "epoch_length": 10, "max_epochs": 2})
    first, _ = trainer_of()
    first.add_event_handler(Events.ITERATION_COMPLETED(once=2), first.terminate)
    first.run(tt.Stream(recordings(LENGTHS, outputs=1), 2, 10, seed=5))
    trainer.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="seed is 5 there and 0 here"):
        trainer.run(PLAIN.stream())


def test_what_makes_no_sense_is_refused() -> None:
    evaluator = StreamEvaluator(PLAIN.net())
    with pytest.raises(DataError, match=r"expected a tt\.Stream"):
        evaluator.run([torch.zeros(3)])
    with pytest.raises(ConfigError, match="one whole epoch"):
        evaluator.run(PLAIN.stream(), max_epochs=2)
    with pytest.raises(DataError, match=r"tt\.predict"):
        evaluator.run(tt.Stream({"inputs": torch.zeros(9, 3)}, 1, 10))
    with pytest.raises(DataError, match="expected a batch of a stream"):
        trainer_of()[0].run(list(PLAIN.stream()))
    with pytest.raises(ConfigError, match="amp_mode='amp'"):
        trainer_of(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match="chunks=0"):
        trainer_of(chunks=0)[0].run(PLAIN.stream())


def labelled() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    result: list[dict[str, Tensor]] = []
    for n in LENGTHS:
        targets = torch.randint(0, 2, (n,), generator=draw)
        targets[torch.rand(n, generator=draw) < 0.4] = -100
        targets[: n // 2] = -100  # whole chunks without any
        result.append({"inputs": torch.randn(n, 3, generator=draw).double(), "targets": targets})
    return result


def test_metrics_are_those_of_evaluate_over_valid_steps() -> None:
    torch.manual_seed(2)
    net = tt.carry(nn.Sequential(nn.GRU(3, 6), nn.Dropout(0.5), nn.Linear(6, 2)).double())
    loss_fn = nn.CrossEntropyLoss()
    evaluator = StreamEvaluator(net, {"loss": Loss(loss_fn), "accuracy": Accuracy()})
    for chunk in (7, 3):  # another number of chunks in the second run
        data = tt.Stream(labelled(), lanes=2, chunk=chunk)
        expected = tt.evaluate(net, data, loss_fn, metrics=tt.metrics.Classification(("no", "yes")))
        result = evaluator.run(data).metrics
        # the metrics of Ignite add up in float32
        assert abs(result["loss"] - expected.loss) < 1e-6
        assert abs(result["accuracy"] - expected.metrics["accuracy"]) < 1e-6
    assert all(module.training for module in net.modules())


def trained(lanes: int) -> dict[str, Any]:
    data = recordings(LENGTHS, outputs=1)
    data[1]["targets"][::3] = torch.nan  # ranks with unequal numbers of valid steps
    trainer, parts = trainer_of(Course(dropout=0), chunks=2)
    state: Any = trainer.run(tt.Stream(data, lanes, 10), max_epochs=3)
    evaluator = StreamEvaluator(parts["net"], {"loss": Loss(nn.MSELoss())})
    loss = evaluator.run(tt.Stream(data, lanes, 10)).metrics["loss"]
    figures = {"output": state.output, "updates": state.updates, "loss": loss}
    return {"weights": flat(parts["net"])} | figures


def work(rank: int, early: Any) -> Iterator[tuple[str, Any]]:
    del rank, early
    yield from trained(lanes=1).items()


def nothing() -> None:
    """Before there is a group."""


@pytest.mark.slow
def test_two_ranks_come_to_the_weights_and_metrics_of_one_process() -> None:
    together, alone = trained(lanes=2), trained(lanes=1)
    for rank in in_processes(2, nothing, work):
        assert rank["updates"] == together["updates"]
        assert abs(rank["output"] - together["output"]) < 1e-9
        assert abs(rank["loss"] - together["loss"]) < 1e-6  # Ignite's metrics add up in float32
        assert (rank["weights"] - together["weights"]).abs().max() < 1e-9
        assert (rank["weights"] - alone["weights"]).abs().max() > 1e-3
