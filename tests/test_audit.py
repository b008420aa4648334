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
from throughtime.chunk import Chunk, join
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

    def everything() -> list[Any]:
        return [
            *(tensor.clone() for tensor in net.state_dict().values()),
            *gradients(net).values(),
            torch.get_rng_state(),
            (source.state_dict(), source._generation, [m.training for m in net.modules()]),
        ]

    own, before = [weight.grad for weight in net.parameters()], everything()
    first = tt.audit(net, source, nn.MSELoss(), (3, 8))
    with pytest.raises(ConfigError):
        tt.audit(net, source, nn.MSELoss(), (0,))
    *tensors, others = everything()
    assert all(map(torch.equal, tensors, before[:-1]))
    assert others == before[-1]
    assert all(weight.grad is grad for weight, grad in zip(net.parameters(), own, strict=True))
    # dropout draws the same again
    assert tt.audit(net, source, nn.MSELoss(), (3, 8)) == first


def test_dropout_is_the_same_in_every_gradient_compared() -> None:
    """One forward pass draws the noise: a horizon over the whole excerpt has no bias."""
    torch.manual_seed(3)
    net = tt.carry(HidesLayer(dropout=0.4).double())
    result = tt.audit(net, stream_of([50, 41], 2), nn.MSELoss(), (4, 50), chunk=7)
    assert result.rows[-1].bias < 1e-12
    assert result.rows[0].bias > 1e-3


@pytest.mark.parametrize(
    ("steps", "stride", "expected"),
    [(1000, None, [50, 200, 800]), (800, 100, [200]), (1, None, [1])],
)
def test_default_horizons_are_those_shorter_than_the_stretch(
    steps: int, stride: int | None, expected: list[int]
) -> None:
    net = tt.carry(nn.Sequential(nn.RNN(3, 2), nn.Linear(2, 2)).double())
    results = tt.audit(net, stream_of([1000], 1), nn.MSELoss(), steps=steps, stride=stride)
    assert [row.horizon for row in results.rows] == expected


def rows_of(biases: dict[int, float]) -> Audit:
    rows = tuple(
        Truncation(h, h, bias, 0.9, 0.8, {"lstm.weight": bias, "head.bias": bias / 2})
        for h, bias in biases.items()
    )
    return Audit(100, 2, 0.5, 1.5, rows)


@pytest.mark.parametrize(
    ("biases", "tolerance", "expected"),
    [
        ({1: 0.5, 2: 0.2, 4: 0.05, 8: 0.01}, 0.1, 4),
        ({1: 0.5, 2: 0.05, 4: 0.2, 8: 0.01}, 0.1, 8),  # 2 was luck
        ({1: 0.5, 2: 0.2, 4: 0.05, 8: 0.11}, 0.1, None),
        ({1: 0.5, 2: 0.2, 4: 0.05, 8: 0.1}, 0.1, 4),
        ({1: 0.5, 2: 0.2}, 0.6, 1),
        ({1: math.nan, 2: 0.01}, 0.1, 2),
    ],
)
def test_suggestion_is_the_shortest_from_which_on_none_is_above_the_tolerance(
    biases: dict[int, float], tolerance: float, expected: int | None
) -> None:
    assert rows_of(biases).suggest(tolerance) == expected


def test_noise_is_the_difference_of_two_halves_of_the_losses() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.GRU(3, 4), nn.Linear(4, 1)).double()
    x, target = torch.randn(70, 3).double(), torch.randn(70, 1).double()
    stream = tt.Stream({"inputs": x, "targets": target}, lanes=1, chunk=9, dtype=torch.float64)
    results = tt.audit(tt.carry(module), stream, nn.MSELoss(), horizons=(10,), chunk=13)
    errors = (module[1](module[0](x)[0]) - target).square()[:, 0] / 70
    first = torch.arange(70) // 4 % 2 == 0
    halves = [
        torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    errors[own].sum(), list(module.parameters()), retain_graph=True
                )
            ]
        )
        for own in (first, ~first)
    ]
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
    "horizon below the stride": (ConfigError, lambda: audited(horizons=(3, 8), stride=5)),
    "steps 0": (ConfigError, lambda: audited(steps=0)),
    "chunk 0": (ConfigError, lambda: audited(chunk=0)),
    "no valid step": (DataError, lambda: audited(source=stream_of([20], 1, warm_up=20))),
    "no targets": (
        DataError,
        lambda: audited(source=tt.Stream({"inputs": inputs(9, 1)[:, 0]}, 1, 4)),
    ),
    "raw module": (ModelError, lambda: audited(HidesLayer())),
    "list of chunks": (DataError, lambda: audited(source=list(stream_of([20], 1)))),
    "frozen": (ModelError, lambda: audited(named("hides-layer").net().requires_grad_(False))),
    "not finite": (RunError, lambda: audited(explodes())),
    "loss summed": (ModelError, lambda: audited(loss_fn=nn.MSELoss(reduction="sum"))),
    "a loss of strides": (ConfigError, lambda: audited(loss_fn=tt.SequenceLoss(root))),
}


@pytest.mark.parametrize(("kind", "call"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_cannot_be_audited_is_refused(
    kind: type[Exception], call: Callable[[], Audit]
) -> None:
    with pytest.raises(kind):
        call()


def root(outputs: Tensor, chunk: Chunk) -> Tensor:
    """A loss of a whole stride."""
    return nn.functional.mse_loss(*chunk.valid_pairs(outputs)).sqrt()


def agrees_by_stride(horizons: tuple[int, ...], chunk: int | None) -> bool:
    """Whether biases are those of updates of `tt.Truncated` at a stride of 8, and one of all."""
    net, loss_fn = named("hides-layer").net(), tt.SequenceLoss(root)
    stream = stream_of([41], 1)
    result = tt.audit(net, stream, loss_fn, horizons, stride=8, chunk=chunk)
    gradients: dict[int, Tensor] = {}
    for horizon in (*horizons, 40):
        parts: list[Tensor] = []
        steps = [stream.read(0, 40)]
        policy = tt.Truncated(8, horizon)
        for update in tt.updates(net, steps, loss_fn, gradient=policy):
            grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in net.parameters()]
            parts.append(torch.cat([grad.flatten() for grad in grads]) * update.weight)
            net.zero_grad()
        gradients[horizon] = sum(parts, torch.zeros(())) / 40
    exact = gradients[40]
    sizes = {h: ((g - exact).norm() / exact.norm()).item() for h, g in gradients.items()}
    assert [row.horizon for row in result.rows] == [*horizons]
    return all(row.bias == pytest.approx(sizes[row.horizon], rel=1e-9) for row in result.rows)


@pytest.mark.parametrize(("horizons", "chunk"), [((8, 24), None), ((9, 12, 27), 10)])
def test_a_loss_over_strides_is_compared_stride_by_stride(
    horizons: tuple[int, ...], chunk: int | None
) -> None:
    """Credit may be cut within a stride, whose loss stays whole."""
    assert agrees_by_stride(horizons, chunk)
