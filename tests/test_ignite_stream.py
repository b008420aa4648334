"""Ignite engines on a stream: updates as in `tt.updates`, handlers, resuming, evaluation."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
)
from ignite.metrics import Accuracy, Loss
from torch import Tensor, nn

import throughtime as tt
from plain_loop import Growing, plain_loop
from processes import in_processes
from test_ignite import same, weights
from throughtime.carry import Carried
from throughtime.errors import ConfigError, DataError
from throughtime.integrations.ignite import (
    StreamEvaluator,
    StreamEvents,
    StreamTrainer,
)

LENGTHS = (61, 34, 50, 45, 38)


def recordings(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [
        {
            "inputs": torch.randn(n, 3, generator=draw).double(),
            "targets": torch.randn(n, generator=draw).double(),
        }
        for n in lengths
    ]


def stream(**options: Any) -> tt.Stream:
    settings: dict[str, Any] = {"lanes": 2, "chunk": 10} | options
    return tt.Stream(recordings(), **settings)


def net_of(dropout: float = 0.0, seed: int = 0) -> Carried:
    torch.manual_seed(seed)
    return tt.carry(nn.Sequential(nn.GRU(3, 6), nn.Dropout(dropout), nn.Linear(6, 1)).double())


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


POLICIES: dict[str, Callable[[], Any]] = {
    "truncated": lambda: tt.Truncated(stride=10),
    "horizon": lambda: tt.Truncated(stride=7, horizon=25),
    "exact": lambda: tt.Exact(chunk=9, cut_every=40),
    "growing": lambda: Growing(4),
}


def by_hand(
    policy: str, epochs: int, **options: Any
) -> tuple[list[Tensor], list[tuple[float, int]]]:
    net = net_of()
    torch.manual_seed(7)
    records = plain_loop(net, stream(), adam(net), POLICIES[policy](), epochs=epochs, **options)
    return weights(net), records


def trainer_of(
    policy: str = "truncated", net: Carried | None = None, **options: Any
) -> tuple[StreamTrainer, Carried, Any]:
    net = net_of() if net is None else net
    optimizer = adam(net)
    trainer = StreamTrainer(net, optimizer, nn.MSELoss(), gradient=POLICIES[policy](), **options)
    torch.manual_seed(7)
    return trainer, net, optimizer


@pytest.mark.parametrize(
    ("policy", "chunks"), [("truncated", 3), ("horizon", 1), ("exact", 100), ("growing", 3)]
)
def test_an_engine_makes_the_weights_of_the_plain_loop(policy: str, chunks: int) -> None:
    trainer, net, _ = trainer_of(policy, chunks=chunks)
    losses: list[tuple[float, int]] = []
    trainer.add_event_handler(
        StreamEvents.UPDATE_COMPLETED,
        lambda e: losses.append((e.state.update.loss.item(), e.state.update.steps)),
    )
    state: Any = trainer.run(stream(), max_epochs=3)
    came_to, records = by_hand(policy, 3)
    assert same(weights(net), came_to)
    assert losses == records
    assert state.updates == len(records) > 2
    assert state.iteration == 3 * -(-stream().steps // (10 * chunks))
    assert not same(came_to, weights(net_of()))


def test_several_updates_are_accumulated_into_one() -> None:
    trainer, net, _ = trainer_of(accumulate=3, chunks=2)
    trainer.run(stream(), max_epochs=2)
    assert same(weights(net), by_hand("truncated", 2, accumulate=3)[0])


def test_the_output_of_an_iteration_is_the_mean_over_its_valid_steps() -> None:
    own_stream = tt.Stream(recordings([73, 40]), lanes=1, chunk=10, seed=None)
    trainer, _, _ = trainer_of(chunks=100)
    records: list[tuple[float, int]] = []
    trainer.add_event_handler(
        StreamEvents.UPDATE_COMPLETED,
        lambda e: records.append((e.state.update.loss.item(), e.state.update.steps)),
    )
    output: Any = trainer.run(own_stream).output
    total = sum(steps for _, steps in records)
    assert total == 113
    assert abs(output - sum(loss * steps for loss, steps in records) / total) < 1e-12
    assert (
        abs(output - sum(loss for loss, _ in records) / len(records)) > 1e-6
    )  # the ragged tail does not count double


@pytest.mark.parametrize("end", ["terminate", "terminate_epoch"])
def test_terminate_stops_after_the_present_update(end: str) -> None:
    trainer, net, _ = trainer_of(chunks=100)
    trainer.add_event_handler(
        StreamEvents.UPDATE_COMPLETED(once=4), lambda engine: getattr(engine, end)()
    )
    state: Any = trainer.run(stream())
    assert state.updates == 4
    assert same(weights(net), by_hand("truncated", 1, stop=4)[0])


def to_save(trainer: StreamTrainer, net: Carried, optimizer: Any) -> dict[str, Any]:
    return {"trainer": trainer, "net": net, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("policy", "options", "at"),
    [
        ("horizon", {}, Events.ITERATION_COMPLETED(once=7)),
        ("growing", {}, Events.EPOCH_COMPLETED(once=1)),
        ("truncated", {"hand_off": True, "lanes": 3}, StreamEvents.UPDATE_COMPLETED(once=5)),
    ],
    ids=["horizon", "growing", "hand-off"],
)
def test_a_checkpoint_resumes_anywhere_to_the_bit(
    policy: str, options: dict[str, Any], at: Any, tmp_path: Path
) -> None:
    whole = trainer_of(policy, net_of(0.3), chunks=3)
    whole[0].run(stream(**options), max_epochs=3)
    first = trainer_of(policy, net_of(0.3), chunks=3)
    first[0].add_event_handler(at, Checkpoint(to_save(*first), DiskSaver(str(tmp_path))))
    first[0].add_event_handler(at, first[0].terminate)
    first[0].run(stream(**options), max_epochs=3)
    assert not same(weights(first[1]), weights(whole[1]))
    (saved,) = tmp_path.glob("*.pt")
    later = trainer_of(policy, net_of(0.3, seed=9), chunks=3)
    torch.manual_seed(99)
    Checkpoint.load_objects(to_save(*later), str(saved))
    later[0].run(stream(**options), max_epochs=3)
    assert same(weights(later[1]), weights(whole[1]))
    assert later[0].state.iteration == whole[0].state.iteration
    # a state takes any attribute
    counts = [getattr(run[0].state, "updates") for run in (later, whole)]  # noqa: B009
    assert counts[0] == counts[1]


def test_the_state_of_another_engine_and_of_another_stream_are_refused() -> None:
    trainer, _, _ = trainer_of()
    with pytest.raises(DataError, match="expected 'stream' as well"):
        trainer.load_state_dict({"iteration": 3, "epoch_length": 10, "max_epochs": 2})
    first, _, _ = trainer_of()
    first.add_event_handler(Events.ITERATION_COMPLETED(once=3), first.terminate)
    first.run(stream(seed=5))
    trainer.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="seed is 5 there and 0 here"):
        trainer.run(stream())


def test_what_makes_no_sense_is_refused() -> None:
    evaluator = StreamEvaluator(net_of())
    with pytest.raises(DataError, match=r"expected a tt\.Stream"):
        evaluator.run([torch.zeros(3)])
    with pytest.raises(ConfigError, match="one whole epoch"):
        evaluator.run(stream(), max_epochs=2)
    with pytest.raises(DataError, match=r"tt\.predict"):
        evaluator.run(tt.Stream([{"inputs": r["inputs"]} for r in recordings()], 2, 10))
    with pytest.raises(DataError, match="expected a batch of a stream"):
        trainer_of()[0].run(list(stream()))
    with pytest.raises(ConfigError, match="amp_mode='amp'"):
        trainer_of(scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ConfigError, match="chunks=0"):
        trainer_of(chunks=0)[0].run(stream())


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
    data = recordings()
    data[1]["targets"][::3] = torch.nan  # ranks with unequal numbers of valid steps
    trainer, net, _ = trainer_of("horizon", chunks=2)
    state: Any = trainer.run(tt.Stream(data, lanes, 10), max_epochs=3)
    evaluator = StreamEvaluator(net, {"loss": Loss(nn.MSELoss())})
    loss = evaluator.run(tt.Stream(data, lanes, 10)).metrics["loss"]
    flat = torch.cat([weight.flatten() for weight in weights(net)])
    return {"weights": flat, "output": state.output, "updates": state.updates, "loss": loss}


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
