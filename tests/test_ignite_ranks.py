"""Ignite on two ranks over gloo: the weights and metrics of one process with all lanes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ignite.metrics import Loss
from torch import Tensor, nn

import throughtime as tt
from processes import in_processes
from throughtime.integrations.ignite import StreamEvaluator, StreamTrainer

pytestmark = pytest.mark.slow


def recordings() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    results = [
        {
            "inputs": torch.randn(n, 3, generator=draw).double(),
            "targets": torch.randn(n, generator=draw).double(),
        }
        for n in (90, 61, 47)
    ]
    results[1]["targets"][::3] = torch.nan  # ranks with unequal numbers of valid steps
    return results


def trained(lanes: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = tt.carry(nn.Sequential(nn.GRU(3, 6), nn.Linear(6, 1)).double())
    optimizer, policy = torch.optim.SGD(net.parameters(), lr=0.1), tt.Truncated(10, 20)
    trainer = StreamTrainer(net, optimizer, nn.MSELoss(), gradient=policy, chunks=2)
    state: Any = trainer.run(tt.Stream(recordings(), lanes, 10), max_epochs=4)
    evaluator = StreamEvaluator(net, {"loss": Loss(nn.MSELoss())})
    loss = evaluator.run(tt.Stream(recordings(), lanes, 10)).metrics["loss"]
    return {
        "weights": torch.cat([p.detach().flatten() for p in net.parameters()]),
        "output": state.output,
        "updates": state.updates,
        "loss": loss,
    }


def work(rank: int, early: Any) -> Iterator[tuple[str, Any]]:
    del rank, early
    yield from trained(lanes=1).items()


def nothing() -> None:
    """Before there is a group."""


def test_two_ranks_come_to_the_weights_and_metrics_of_one_process() -> None:
    together, apart = trained(lanes=2), in_processes(2, nothing, work)
    alone = trained(lanes=1)
    assert together["updates"] >= 40
    for rank in apart:
        assert rank["updates"] == together["updates"]
        assert abs(rank["output"] - together["output"]) < 1e-9
        assert abs(rank["loss"] - together["loss"]) < 1e-6  # Ignite's metrics add up in float32
        assert (rank["weights"] - together["weights"]).abs().max() < 1e-9
        assert (rank["weights"] - alone["weights"]).abs().max() > 1e-3
