"""What an update on a device costs: copies to it, and reads that the host waits for.

The device computes while the host goes on. Every value that the host reads stops it until the
device has caught up, so a steady update reads one flag of the update before, and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mock_device import DEVICE, Counts, counted
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.gradient import Update

CPU = torch.device("cpu")
LONG = (500,) * 200
SHORT = (130, 170, 95, 210, 60, 335) * 70


@dataclass(frozen=True)
class Loop:
    """A loop over updates. With 200 lanes every chunk is a block of its own, and sent alone."""

    policy: Any = field(default_factory=lambda: tt.Truncated(100))
    lengths: tuple[int, ...] = LONG
    masked: bool = False
    weighted: bool = False
    accumulate: int = 1
    lanes: int = 200

    @property
    def copies(self) -> int:
        """Inputs and targets of each stride; one more where a mask or resets are not trivial."""
        flags = self.masked or self.lengths is SHORT
        return self.accumulate * (3 if flags else 2)

    def recordings(self) -> list[dict[str, Tensor]]:
        torch.manual_seed(0)
        data = [(torch.randn(n, 3), torch.randint(2, (n,))) for n in self.lengths]
        for _, targets in data if self.masked else []:
            targets[::3] = -100
        return [{"inputs": x, "targets": y} for x, y in data]

    def run(self, device: torch.device) -> tuple[list[float], list[Counts]]:
        """The loss and the counts of every update, the optimizer's step included."""
        net = make_net(device)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        stream = tt.Stream(self.recordings(), lanes=self.lanes, chunk=100)
        loss_fn = nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]) if self.weighted else None)
        updates = tt.updates(
            net,
            stream,
            loss_fn.to(device),
            gradient=self.policy,
            accumulate=self.accumulate,
        )
        losses: list[Tensor] = []
        costs: list[Counts] = []
        while True:
            with counted() as counts:
                update = next(updates, None)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if update is None:
                return [loss.item() for loss in losses], costs
            losses.append(update.loss)
            costs.append(counts)


def make_net(device: torch.device) -> Carried:
    torch.manual_seed(1)
    return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 2))).to(device)


LOOPS = {
    "plain": Loop(),
    "mask and resets": Loop(lengths=SHORT, masked=True),
    "windows across blocks": Loop(tt.Truncated(70, horizon=150), (600,) * 200, masked=True),
    "accumulated, class weights": Loop(lengths=(800,) * 200, weighted=True, accumulate=2),
    "few lanes": Loop(lengths=(1000, 1000), masked=True, lanes=2),
    "Adaptive": Loop(tt.Adaptive(tolerance=0.1, min=50, max=100), (900, 900), lanes=2),
}


def check_budget(loop: Loop, costs: list[Counts]) -> None:
    """The first update tries the net; the second one ends what the first has left."""
    steady = costs[2:]
    assert steady
    for counts in steady:
        assert counts.waits == 1  # the sizes of loss and gradients of the update before
        assert counts.nonzero == 0
        assert counts.to_device <= loop.copies


@pytest.mark.parametrize("name", LOOPS)
def test_a_steady_update_keeps_to_its_budget_and_equals_the_cpu(name: str) -> None:
    loop = LOOPS[name]
    losses, costs = loop.run(DEVICE)
    check_budget(loop, costs)
    expected, _ = loop.run(CPU)
    assert losses == pytest.approx(expected, rel=1e-5)


def waits_of(function: Callable[[int], object], lengths: tuple[int, int]) -> list[int]:
    """How often the host waits, for a short and a long stream."""
    results: list[int] = []
    for n in lengths:
        with counted() as counts:
            function(n)
        results.append(counts.waits)
    return results


def recordings(n: int) -> list[dict[str, Tensor]]:
    return Loop(lengths=(n, n - 30, n // 2), masked=True).recordings()


class Shift(nn.Module):
    """A buffer that changes in training, as a running mean does, and one that never does."""

    shift: Tensor
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.level.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x - self.shift


def shifting() -> Carried:
    torch.manual_seed(3)
    return tt.carry(nn.Sequential(Shift(), nn.LSTM(3, 4), nn.Linear(4, 2))).to(DEVICE)


def exact_update(n: int, policy: Any, weight: Tensor | None = None) -> Update:
    """The first update of a recording of `n` steps in chunks of 100."""
    stream = tt.Stream(recordings(n)[:2], lanes=2, chunk=100)
    loss_fn = nn.CrossEntropyLoss(weight).to(DEVICE)
    return next(tt.updates(shifting(), stream, loss_fn, gradient=policy))


@pytest.mark.parametrize(
    ("policy", "weight"),
    [
        (tt.Exact(chunk=100), torch.tensor([1.0, 3.0], device="cpu")),
        (tt.Randomized(mean_horizon=1000), None),
    ],
    ids=["Exact", "Randomized"],
)
def test_an_exact_gradient_waits_a_fixed_number_of_times_for_each_recording(
    policy: Any, weight: Tensor | None
) -> None:
    first, second = waits_of(lambda n: exact_update(n, policy, weight=weight), (400, 1600))
    assert first == second
    # the gradient, the comparison with the forward pass, a random draw, and the trials of the net
    assert first - exact_trials() <= 4


def exact_trials() -> int:
    """Waits for the first call of a new net, which is tried."""
    with counted() as counts:
        net, x = shifting(), torch.zeros(8, 2, 3, device=DEVICE)
        net(x, net.initial_state(2, like=x))
    return counts.waits


@pytest.mark.parametrize("on_nan", ["raise", "hold"])
def test_a_prediction_waits_twice_for_each_chunk(on_nan: Any) -> None:
    def predicted(n: int) -> object:
        data = recordings(n)[0]["inputs"]
        return tt.predict(make_net(DEVICE), data, chunk=100, on_nan=on_nan)

    first, second = waits_of(predicted, (400, 1600))
    assert second - first == 2 * 12


@pytest.mark.parametrize("metrics", [None, tt.metrics.Classification(2)])
def test_an_evaluation_reads_a_fixed_number_for_each_recording(metrics: Any) -> None:
    net = make_net(DEVICE)

    def whole(n: int) -> None:
        stream = tt.Stream(recordings(n), lanes=3, chunk=50, seed=None)
        tt.evaluate(net, stream, nn.CrossEntropyLoss(), metrics=metrics)

    whole(100)  # the trials of the net
    first, second = waits_of(whole, (300, 1500))
    assert first == second
    # one for the loss, and two for the metrics of all recordings and of each of three
    assert first <= 1 + (0 if metrics is None else 4 * 2)
