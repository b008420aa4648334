"""A loss or gradient that is not finite on a device: one flag, read before the next update."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mock_device import DEVICE
from torch import nn

import throughtime as tt
from throughtime.gradient import Update

CPU = torch.device("cpu")


class Loop:
    """600 steps in updates of 100; one target is infinite."""

    def __init__(
        self, policy: Any, device: torch.device = DEVICE, broken: int = 250, **options: Any
    ) -> None:
        torch.manual_seed(0)
        x, y = torch.randn(600, 3), torch.randn(600, 1)
        y[broken] = torch.inf
        net = nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1))
        self.net = tt.carry(net).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        stream = tt.Stream({"inputs": x, "targets": y}, lanes=1, chunk=100)
        self.updates = tt.updates(self.net, stream, nn.MSELoss(), gradient=policy, **options)
        self.gradients: list[float] = []

    def __iter__(self) -> Iterator[Update]:
        """The updates, each with the largest gradient beside it in `gradients`."""
        for update in self.updates:
            grads = [w.grad.abs().max().item() for w in self.net.parameters() if w.grad is not None]
            self.gradients.append(max(grads))
            yield update
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.mark.parametrize("policy", [tt.Truncated(100), tt.Truncated(100, 200)], ids=repr)
def test_the_update_after_it_raises_and_the_weights_are_those_before_it(policy: Any) -> None:
    loop = Loop(policy)
    message = r"steps 200 to 299 of the epoch .* It is the update before this one\. Its `\.grad`"
    updates = iter(loop)
    for start in (0, 100, 200):
        assert next(updates).chunk.start == start
        assert (start == 200) is (loop.gradients[-1] == 0)
    before = [weight.detach().cpu() for weight in loop.net.parameters()]
    with pytest.raises(tt.errors.RunError, match=message):
        next(updates)
    torch.testing.assert_close([w.detach().cpu() for w in loop.net.parameters()], before)


def test_now_reads_before_the_update_is_returned_as_the_cpu_does() -> None:
    ways: list[dict[str, Any]] = [{"finite": "now"}, {"device": CPU}]
    for options in ways:
        loop = Loop(tt.Exact(cut_every=100), **options)
        with pytest.raises(tt.errors.RunError, match=r"steps 200 to 299 .* weights are unchanged"):
            list(loop)
        assert len(loop.gradients) == 2


def test_the_last_update_is_read_at_the_end_of_the_epoch() -> None:
    loop = Loop(tt.Truncated(100), broken=599)
    with pytest.raises(tt.errors.RunError, match="steps 500 to 599"):
        list(loop)
    assert len(loop.gradients) == 6


def test_a_position_is_saved_after_the_flag_is_read() -> None:
    """The handler of the error saves the position before the update that was not finite."""
    policy = tt.Truncated(100, horizon=200)
    loop = Loop(policy)
    updates = iter(loop)
    for _ in range(3):
        next(updates)
    with pytest.raises(tt.errors.RunError, match="steps 200 to 299"):
        loop.updates.state_dict()
    saved = loop.updates.state_dict()
    assert saved["stream"]["position"] == 200
    again = Loop(policy)
    again.updates.load_state_dict(saved)
    with pytest.raises(tt.errors.RunError, match="steps 200 to 299"):
        list(again)


def test_inputs_elsewhere_are_refused_with_the_line_to_write() -> None:
    net, x = Loop(tt.Truncated(100)).net, torch.zeros(5, 1, 3, device=CPU)
    with pytest.raises((RuntimeError, tt.errors.ModelError)) as error:
        net(x, net.initial_state(1))
    assert any("on cpu" in note and "x.to('mock:0')" in note for note in error.value.__notes__)
