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
POLICIES = pytest.mark.parametrize(
    "policy",
    [tt.Truncated(STRIDE), tt.Truncated(STRIDE, 16), tt.Exact(cut_every=STRIDE)],
    ids=["stride", "horizon", "exact"],
)


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


def means(told: list[tuple[Tensor, float, int]], count: int) -> list[tuple[Tensor, float, int]]:
    groups = [told[i : i + count] for i in range(0, len(told), count)]
    out = []
    for group in groups:
        steps = sum(n for _, _, n in group)
        if steps:
            gradient = torch.stack([g * n for g, _, n in group]).sum(0) / steps
            out.append((gradient, sum(loss * n for _, loss, n in group) / steps, steps))
    return out


@POLICIES
@pytest.mark.parametrize("count", [1, 2, 3, 4, 100])
def test_accumulated_update_is_the_mean_of_its_strides_by_their_valid_steps(
    policy: Policy, count: int
) -> None:
    expected, mine = means(strides(policy), count), found(policy, count)
    assert [n for _, _, n in mine] == [n for _, _, n in expected]
    for (g, loss, _), (h, other, _) in zip(mine, expected, strict=True):
        assert torch.allclose(g, h, rtol=1e-12, atol=1e-14)
        assert loss == pytest.approx(other, rel=1e-12)


def test_unweighted_mean_is_another_gradient() -> None:
    """The mutant: without weights a stride of one target would count as much as a full one."""
    even = [(g, loss, min(n, 1)) for g, loss, n in strides(tt.Truncated(STRIDE))]
    apart = [
        (g - h).abs().max()
        for (g, *_), (h, *_) in zip(means(even, 3), found(tt.Truncated(STRIDE), 3), strict=True)
    ]
    assert max(apart) > 1e-4


def test_strides_without_a_target_are_there_so_that_counting_them_matters() -> None:
    assert 0 in [n for _, _, n in strides(tt.Truncated(STRIDE))]


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


def classes() -> dict[str, Any]:
    one = recordings([75])[0]
    one["targets"] = (one["inputs"][:, 0] > 0) + (one["inputs"][:, 1] > 0.5) * np.arange(75) // 30
    return one


def test_weights_of_classes_weigh_in_the_mean() -> None:
    loss_fn = nn.CrossEntropyLoss(torch.tensor([0.1, 1.0, 6.0])).double()
    whole, parts = net_of(4), net_of(4)
    loss_fn.weight = torch.tensor([0.1, 1.0, 6.0, 2.0]).double()
    update = next(
        tt.updates(
            whole, tt.Stream(classes(), 1, 10), loss_fn, gradient=tt.Truncated(1), accumulate=75
        )
    )
    chunk = next(iter(tt.Stream(classes(), 1, 75)))
    state, total, mass = parts.initial_state(1), torch.zeros(()).double(), 0.0
    for t in range(75):
        out, state = parts(chunk.inputs[t : t + 1], tt.state.detach(state), chunk.resets[t : t + 1])
        target = chunk.targets[t]  # pyright: ignore[reportOptionalSubscript]
        weight = loss_fn.weight[target[0]]
        total = total + weight * nn.functional.cross_entropy(out[0], target)
        mass += weight.item()
    (total / mass).backward()
    assert update.loss.item() == pytest.approx((total / mass).item(), rel=1e-12)
    assert torch.allclose(flat(whole), flat(parts), atol=1e-12)


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
