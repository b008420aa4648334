"""The audit: the bias of truncations, against gradients computed one by one.

Shapes: `T` steps, `B` lanes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData
from quick import examples
from strategies import (
    HidesLayer,
    Noisy,
    Row,
    Weights,
    gradients,
    inputs,
    lawless,
    named,
    recordings,
    some_nets,
    start,
    weights,
)
from throughtime.carry import Carried
from throughtime.chunk import join
from throughtime.diagnose import Audit
from throughtime.diagnose.audit import Truncation
from throughtime.errors import ConfigError, DataError, ModelError, RunError
from throughtime.state import State

CLOSE = 1e-8


def flat(results: Weights) -> Tensor:
    return torch.cat([g.flatten() for g in results.values()])


def truncated(
    net: Carried, data: PolicyData, state: State, stride: int, horizon: int
) -> tuple[Weights, int]:
    """The gradient of the mean loss of all steps by `tt.updates`, and the number of updates."""
    run = tt.updates(
        net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(stride, horizon), state=state
    )
    sums: Weights = {name: torch.zeros_like(w) for name, w in weights(net).items()}
    count, total = 0, int(data.mask.sum())
    for update in run:
        for name, gradient in gradients(net).items():
            sums[name] += gradient * (update.steps / total)
        net.zero_grad()
        count += 1
    return sums, count


def exact(net: Carried, data: PolicyData, state: State) -> tuple[Weights, float]:
    """By plain autograd, and the mean loss."""
    y, _ = net(data.x, start(net, data.x) if state is None else state, data.resets)
    loss = nn.functional.mse_loss(y[data.mask], data.targets[data.mask])
    loss.backward()
    results = gradients(net)
    net.zero_grad()
    return results, loss.item()


def ratio(part: Tensor, whole: Tensor) -> float:
    """Of norms; nothing is no share of nothing."""
    return (part.norm() / whole.norm()).item() if part.norm() else 0.0


def agrees(results: Audit, net: Carried, data: PolicyData, state: State = None) -> bool:
    """Whether every figure is that of gradients computed one after another."""
    whole, loss = exact(net, data, state)
    size = flat(whole).norm().item()
    right = [
        results.loss == pytest.approx(loss, rel=CLOSE),
        results.norm == pytest.approx(size, rel=CLOSE),
    ]
    for row in results.rows:
        gradient, _ = truncated(net, data, state, row.stride, row.horizon)
        a, b = flat(gradient), flat(whole)
        biases = {
            name.removeprefix("module."): ratio(gradient[name] - g, g) for name, g in whole.items()
        }
        right += [
            row.bias == pytest.approx(ratio(a - b, b), abs=CLOSE),
            row.cosine == pytest.approx(((a @ b) / (a.norm() * b.norm())).item(), abs=CLOSE),
            row.norm == pytest.approx(ratio(a, b), abs=CLOSE),
            row.by_parameter == pytest.approx(biases, abs=CLOSE, rel=CLOSE),
        ]
    return all(right)


def stream_of(
    lengths: Sequence[int], lanes: int = 1, warm_up: int = 0, outputs: int = 2
) -> tt.Stream:
    lanes = min(lanes, sum(lengths))
    return tt.Stream(recordings(lengths, outputs=outputs), lanes, chunk=16, warm_up=warm_up)


def width(net: Carried) -> int:
    x = inputs(1, 1)
    return net(x, start(net, x))[0].shape[2]


@examples(4)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    lanes=st.sampled_from([1, 2, 3]),
    horizons=st.lists(
        st.sampled_from([1, 2, 3, 5, 7, 11, 16, 40]), min_size=1, max_size=3, unique=True
    ),
    stride=st.sampled_from([None, 1, 2, 5]),
    warm_up=st.sampled_from([0, 3]),
    piece=st.sampled_from([1, 2, 7, 50, None]),
)
@some_nets("lstm", "dict-state", "learnt-start")
def test_figures_are_those_of_separate_gradients(
    row: Row,
    lengths: list[int],
    lanes: int,
    horizons: list[int],
    stride: int | None,
    warm_up: int,
    piece: Any,
) -> None:
    net = row.net()
    horizons = [h for h in horizons if stride is None or h >= stride]
    source = stream_of(lengths, lanes, warm_up, outputs=width(net))
    data = PolicyData.of(join(list(stream_of(lengths, lanes, warm_up, outputs=width(net)))))
    assume(horizons and data.mask.any())
    results = tt.audit(net, source, nn.MSELoss(), horizons, stride=stride, chunk=piece)
    assert agrees(results, net, data)
    assert (results.steps, results.lanes) == data.mask.shape
    assert [(r.horizon, r.stride) for r in results.rows] == [
        (h, stride or h) for h in sorted(horizons)
    ]


def test_nothing_is_moved_or_changed() -> None:
    """Neither the stream, `.grad`, weights, buffers, generators nor the mode."""
    net, source = lawless(tt.carry(Noisy().double()), inputs(3, 2)), stream_of([40, 33], 2)
    next(tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(5)))

    def everything() -> list[Tensor]:
        tensors = *net.state_dict().values(), *gradients(net).values(), torch.get_rng_state()
        return [tensor.clone() for tensor in tensors]

    before, place = everything(), source.state_dict()
    first = tt.audit(net, source, nn.MSELoss(), (3, 8))
    assert all(map(torch.equal, everything(), before))
    assert (source.state_dict(), net.training) == (place, True)
    assert tt.audit(net, source, nn.MSELoss(), (3, 8)) == first  # dropout draws the same again


def rows_of(biases: dict[int, float]) -> Audit:
    rows = tuple(
        Truncation(h, h, bias, 0.9, 0.8, {"lstm.weight": bias, "head.bias": bias / 2})
        for h, bias in biases.items()
    )
    return Audit(100, 2, 0.5, 1.5, rows)


@pytest.mark.parametrize(
    ("biases", "tolerance", "expected"),
    [
        ({1: 0.5, 2: 0.05, 4: 0.2, 8: 0.01}, 0.1, 8),  # 2 was luck
        ({1: 0.5, 2: 0.2, 4: 0.05, 8: 0.11}, 0.1, None),
        ({1: 0.5, 2: 0.2, 4: 0.05, 8: 0.1}, 0.1, 4),
        ({1: math.nan, 2: 0.01}, 0.1, 2),
        ({1: 0.5, 100: 0.0}, 0.1, None),  # as long as the stretch: it cuts nothing there
    ],
)
def test_suggestion_is_the_shortest_from_which_on_none_is_above_the_tolerance(
    biases: dict[int, float], tolerance: float, expected: int | None
) -> None:
    assert rows_of(biases).suggest(tolerance) == expected


def test_noise_is_the_difference_of_two_halves_of_the_losses() -> None:
    module = nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 1)).double()
    x, target = torch.randn(70, 3).double(), torch.randn(70, 1).double()
    stream = tt.Stream({"inputs": x, "targets": target}, lanes=1, chunk=9, dtype=torch.float64)
    results = tt.audit(tt.carry(module), stream, nn.MSELoss(), horizons=(10,), chunk=13)
    errors = (module[1](module[0](x)[0]) - target).square()[:, 0] / 70
    first, halves = torch.arange(70) // 4 % 2 == 0, list[Tensor]()
    for own in (first, ~first):
        module.zero_grad()
        errors[own].sum().backward(retain_graph=True)
        halves.append(flat(gradients(module)))
    a, b = halves
    assert results.noise == pytest.approx(((a - b).norm() / (a + b).norm()).item(), rel=1e-9)
    assert results.norm == pytest.approx((a + b).norm().item(), rel=1e-9)


def audited(
    net: Any = None, source: Any = None, horizons: Any = (3,), loss_fn: Any = None, **options: Any
) -> Audit:
    return tt.audit(
        net or named("hides-layer").net(),
        source or stream_of([20], 1),
        loss_fn or nn.MSELoss(),
        horizons,
        **options,
    )


def explodes() -> Carried:
    net = named("tensor-state").net()
    net.prepare(inputs(3, 2))
    net.module.get_parameter("turn").data.mul_(1e200)
    return net


REFUSED: dict[str, tuple[type[Exception], Callable[[], Audit]]] = {
    "horizon 0": (ConfigError, lambda: audited(horizons=(0, 3))),
    "no valid step": (DataError, lambda: audited(source=stream_of([20], 1, warm_up=20))),
    "no targets": (
        DataError,
        lambda: audited(source=tt.Stream({"inputs": inputs(9, 1)[:, 0]}, 1, 4)),
    ),
    "raw module": (ModelError, lambda: audited(HidesLayer())),
    "frozen": (ModelError, lambda: audited(named("hides-layer").net().requires_grad_(False))),
    "not finite": (RunError, lambda: audited(explodes())),
}


@pytest.mark.parametrize(("kind", "call"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_cannot_be_audited_is_refused(
    kind: type[Exception], call: Callable[[], Audit]
) -> None:
    with pytest.raises(kind):
        call()
