"""Several updates as one: the mean of their gradients by what they count, the state carried on.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from strategies import recordings
from throughtime.carry import Carried
from throughtime.errors import ConfigError
from throughtime.gradient import Policy

STRIDE = 7


def data(length: int = 75) -> dict[str, Any]:
    """Targets with gaps: some strides have few, some none."""
    one = recordings([length], outputs=1)[0]
    one["targets"][np.arange(length) % 23 > 9] = np.nan
    one["targets"][STRIDE : 2 * STRIDE] = np.nan
    return one


def net_of(outputs: int = 1) -> Carried:
    torch.manual_seed(1)
    return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, outputs))).double()


def found(
    policy: Policy, accumulate: int, source: dict[str, Any] | None = None
) -> list[tuple[Tensor, float, int]]:
    """Gradient, loss and steps of every update, at fixed weights."""
    net = net_of()
    told: list[tuple[Tensor, float, int]] = []
    stream = tt.Stream(data() if source is None else source, 1, 10)
    for update in tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate):
        told.append((flat(net), update.loss.item(), update.steps))
        net.zero_grad()
    return told


def flat(net: nn.Module) -> Tensor:
    return torch.cat(
        [
            torch.zeros(p.numel()).double() if p.grad is None else p.grad.flatten()
            for p in net.parameters()
        ]
    )


def strides(policy: Policy) -> list[tuple[Tensor, float, int]]:
    """Sum the losses stride by stride; a stride without targets gets one more, subtracted again."""
    told = dict(zip(_counted(), found(policy, 1), strict=True))
    nothing = (torch.zeros_like(flat(net_of())), 0.0, 0)
    return [told.get(at, nothing) for at in range(0, 75, STRIDE)]


def _counted() -> list[int]:
    valid = ~np.isnan(data()["targets"]).reshape(75)
    return [at for at in range(0, 75, STRIDE) if valid[at : at + STRIDE].any()]


def test_what_grad_held_before_is_added_to() -> None:
    net = net_of()
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    next(
        tt.updates(
            net, tt.Stream(data(), 1, 10), nn.MSELoss(), gradient=tt.Truncated(STRIDE), accumulate=3
        )
    )
    assert torch.allclose(flat(net) - 1, found(tt.Truncated(STRIDE), 3)[0][0], atol=1e-14)


def test_failure_in_the_middle_leaves_grad_as_it_was() -> None:
    net, calls = net_of(), [0]

    def loss_fn(rows: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 4:
            raise RuntimeError("enough")
        return nn.functional.mse_loss(rows, targets)

    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="enough"):
        next(
            tt.updates(
                net,
                tt.Stream(data(), 1, 10),
                loss_fn,
                gradient=tt.Truncated(STRIDE),
                accumulate=100,
            )
        )
    assert torch.equal(flat(net), torch.ones_like(flat(net)))


def test_resume_between_accumulated_updates_gives_the_same_bits() -> None:
    def train(stop: int | None) -> Tensor:
        net, stream = net_of(), tt.Stream(data(), 1, 10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        going = tt.updates(
            net, stream, nn.MSELoss(), gradient=tt.Truncated(STRIDE, 16), accumulate=2
        )
        for i, _ in enumerate(going):
            optimizer.step()
            optimizer.zero_grad()
            if i == stop:
                place, stream = going.state_dict(), tt.Stream(data(), 1, 10)
                going = tt.updates(
                    net, stream, nn.MSELoss(), gradient=tt.Truncated(STRIDE, 16), accumulate=2
                )
                going.load_state_dict(place)
                for _ in going:
                    optimizer.step()
                    optimizer.zero_grad()
                break
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    whole = train(None)
    assert all(torch.equal(train(stop), whole) for stop in (0, 1, 3))


def test_epoch_after_an_accumulated_one_begins_at_its_start() -> None:
    net, stream = net_of(), tt.Stream(data(), 1, 10)
    for epoch in range(3):
        assert stream.epoch == epoch
        assert (
            sum(
                u.steps
                for u in tt.updates(
                    net, stream, nn.MSELoss(), gradient=tt.Truncated(STRIDE), accumulate=4
                )
            )
            == 33
        )
        net.zero_grad()


@pytest.mark.parametrize("wrong", [0, -1, 2.0])
def test_a_number_of_updates_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"accumulate=.*expected a whole number of at least 1"):
        tt.updates(
            net_of(),
            tt.Stream(data(), 1, 10),
            nn.MSELoss(),
            gradient=tt.Truncated(STRIDE),
            accumulate=wrong,
        )


def test_randomized_truncation_is_refused_with_the_way_out() -> None:
    source, policy = tt.Stream(data(), 1, 10), tt.Randomized(10)
    run = tt.updates(net_of(), source, nn.MSELoss(), gradient=policy, accumulate=2)
    with pytest.raises(ConfigError, match=r"Randomized\(.*unbiased as they are.*zero_grad"):
        next(run)


def test_chunks_of_an_iterator_are_accumulated_too() -> None:
    make: Callable[[], Carried] = net_of
    a, b = make(), make()
    chunks = list(tt.Stream(data(), 1, STRIDE))
    for net, source in ((a, iter(chunks)), (b, tt.Stream(data(), 1, 10))):
        for _ in tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(STRIDE), accumulate=3):
            pass
    assert torch.equal(flat(a), flat(b))
