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
from policy_data import PolicyData, policy_gradients
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
    lengths: Sequence[int], lanes: int, warm_up: int = 0, chunk: int = 16, outputs: int = 2
) -> tt.Stream:
    return tt.Stream(
        recordings(lengths, outputs=outputs),
        lanes=min(lanes, sum(lengths)),
        chunk=chunk,
        warm_up=warm_up,
    )


def width(net: Carried) -> int:
    x = inputs(1, 1)
    return net(x, start(net, x))[0].shape[2]


@examples(10)
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
@some_nets("tensor-state", "lstm", "hides-cell", "dict-state", "learnt-start")
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


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stride", [None, 2])
def test_nothing_is_moved_or_changed(training: bool, stride: int | None) -> None:
    """Neither the stream, `.grad`, weights, buffers, generators nor the mode."""
    net, source = (
        lawless(tt.carry(Noisy().double()).train(training), inputs(3, 2)),
        stream_of([40, 33], 2),
    )
    for update in tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(5)):
        if update.chunk.position[0, 0] == 10:
            break
    kept = [
        None if weight.grad is None else (weight.grad, weight.grad.clone())
        for weight in net.parameters()
    ]
    before = (
        weights(net),
        {n: b.clone() for n, b in net.named_buffers()},
        torch.get_rng_state(),
        source.state_dict(),
        source._generation,
    )
    first = tt.audit(net, source, nn.MSELoss(), (3, 8), stride=stride)
    assert all(torch.equal(w, before[0][name]) for name, w in weights(net).items())
    assert all(torch.equal(b, before[1][name]) for name, b in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), before[2])
    assert (source.state_dict(), source._generation) == before[3:]
    assert net.training == training
    assert all(module.training == training for module in net.modules())
    for weight, held in zip(net.parameters(), kept, strict=True):
        assert held is not None
        assert weight.grad is held[0]
        assert torch.equal(held[0], held[1])
    assert (
        tt.audit(net, source, nn.MSELoss(), (3, 8), stride=stride) == first
    )  # dropout draws the same again


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_dropout_is_the_same_in_every_gradient_compared(chunk: int) -> None:
    """One forward pass draws the noise: a horizon over the whole excerpt has no bias."""
    torch.manual_seed(3)
    net = tt.carry(HidesLayer(dropout=0.4).double())
    long, short = (
        tt.audit(net, stream_of([50, 41], 2), nn.MSELoss(), (4, h), chunk=chunk) for h in (50, 30)
    )
    assert long.rows[-1].bias < 1e-12
    assert long.rows[0].bias > 1e-3
    assert long.loss != pytest.approx(
        tt.audit(net.eval(), stream_of([50, 41], 2), nn.MSELoss(), (4,)).loss, rel=1e-3
    )
    assert short.steps == long.steps


@pytest.mark.parametrize(
    ("steps", "stride", "expected"),
    [(5000, None, [50, 200, 800, 3200]), (800, 100, [200]), (40, None, [20]), (1, None, [1])],
)
def test_default_horizons_are_those_shorter_than_the_stretch(
    steps: int, stride: int | None, expected: list[int]
) -> None:
    net = tt.carry(nn.Sequential(nn.RNN(3, 2), nn.Linear(2, 2)).double())
    results = tt.audit(net, stream_of([5000], 1), nn.MSELoss(), steps=steps, stride=stride)
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
        ({1: 0.0, 2: 0.0}, 0.1, 1),
        ({1: 0.5, 2: 0.2}, 0.6, 1),
    ],
)
def test_suggestion_is_the_shortest_from_which_on_none_is_above_the_tolerance(
    biases: dict[int, float], tolerance: float, expected: int | None
) -> None:
    assert rows_of(biases).suggest(tolerance) == expected


def test_bias_that_is_no_number_is_not_within_the_tolerance() -> None:
    assert rows_of({1: math.nan, 2: 0.01}).suggest(0.1) == 2


def test_table_says_the_figures_and_the_worst_parameter() -> None:
    results = rows_of({1: 0.5, 20: 0.25})
    lines = str(results).splitlines()
    assert lines[0].split() == [
        "horizon",
        "stride",
        "bias",
        "cosine",
        "norm",
        "worst",
        "parameter",
    ]
    assert lines[1].split() == ["1", "1", "0.500", "0.900", "0.80", "lstm.weight", "0.500"]
    assert lines[2].split() == ["20", "20", "0.250", "0.900", "0.80", "lstm.weight", "0.250"]
    assert lines[3].startswith("over 100 steps of 2 lanes, at fixed weights; loss 0.5, |g| 1.5")
    assert lines[3].endswith("its noise 0 times that")


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


def frozen() -> Carried:
    return named("hides-layer").net().requires_grad_(False)


REFUSED: dict[str, tuple[Callable[[], Audit], type[Exception], str]] = {
    "horizon 0": (
        lambda: audited(horizons=(0, 3)),
        ConfigError,
        "(stride|horizon)=0: expected a whole number of at least 1",
    ),
    "horizon below the stride": (
        lambda: audited(horizons=(3, 8), stride=5),
        ConfigError,
        "horizon=3 is below stride=5",
    ),
    "stride 0": (lambda: audited(stride=0), ConfigError, "stride=0: expected"),
    "horizon a float": (
        lambda: audited(horizons=(3.5,)),
        ConfigError,
        r"=3\.5: expected a whole number of at least 1",
    ),
    "steps 0": (
        lambda: audited(steps=0),
        ConfigError,
        "steps=0: expected a whole number of at least 1",
    ),
    "chunk 0": (
        lambda: audited(chunk=0),
        ConfigError,
        "chunk=0: expected a whole number of at least 1",
    ),
    "no valid step": (
        lambda: audited(source=stream_of([20], 1, warm_up=20)),
        DataError,
        "none of the 20 steps has a target that counts",
    ),
    "no targets": (
        lambda: audited(source=tt.Stream({"inputs": inputs(9, 1)[:, 0]}, 1, 4)),
        DataError,
        "the recordings of this stream have no targets",
    ),
    "raw module": (
        lambda: audited(HidesLayer()),
        ModelError,
        r"the net is a HidesLayer; .*net = tt\.carry\(module\)",
    ),
    "list of chunks": (
        lambda: audited(source=list(stream_of([20], 1))),
        DataError,
        r"got a list, expected a tt\.Stream",
    ),
    "frozen net": (
        lambda: audited(frozen()),
        ModelError,
        "the loss depends on no parameter that requires a gradient",
    ),
    "not finite": (
        lambda: audited(explodes()),
        RunError,
        "the exact gradient is not finite .* nothing can be compared",
    ),
    "loss of every row": (
        lambda: audited(loss_fn=nn.MSELoss(reduction="none")),
        ModelError,
        r"expected one number.*reduction='none'",
    ),
    "loss summed": (
        lambda: audited(loss_fn=nn.MSELoss(reduction="sum")),
        ModelError,
        "reduction='sum', expected 'mean'",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_what_cannot_be_audited_is_refused(
    call: Callable[[], Audit], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
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


@pytest.mark.parametrize("chunk", [None, 10])
@pytest.mark.parametrize("horizons", [(8, 24), (9, 12, 27)])
def test_a_loss_over_strides_is_compared_stride_by_stride(
    horizons: tuple[int, ...], chunk: int | None
) -> None:
    """Credit may be cut within a stride, whose loss stays whole."""
    assert agrees_by_stride(horizons, chunk)


def test_a_loss_over_strides_needs_a_stride() -> None:
    with pytest.raises(ConfigError, match="give a stride, or take one with additive=True"):
        audited(loss_fn=tt.SequenceLoss(root))


@pytest.mark.parametrize("over", ["window", "recording"])
@pytest.mark.parametrize(("stride", "piece"), [(None, None), (4, None), (3, 7)])
def test_an_additive_loss_takes_any_horizons(
    over: Any, stride: int | None, piece: int | None
) -> None:
    """As the same loss of rows does."""

    def mean(outputs: Tensor, chunk: Chunk) -> Tensor:
        return nn.functional.mse_loss(*chunk.valid_pairs(outputs))

    net = named("lstm").net()
    source = stream_of([19, 8, 14], 2, warm_up=2, outputs=width(net))
    horizons, loss_fn = (5, 7, 11), tt.SequenceLoss(mean, over=over, additive=True)
    ours = tt.audit(net, source, loss_fn, horizons, stride=stride, chunk=piece)
    theirs = tt.audit(net, source, nn.MSELoss(), horizons, stride=stride, chunk=piece)
    assert [row.horizon for row in ours.rows] == [*horizons]
    for own, row in zip(ours.rows, theirs.rows, strict=True):
        assert (own.bias, own.cosine) == pytest.approx((row.bias, row.cosine), rel=CLOSE)
    assert (ours.loss, ours.norm, ours.noise) == pytest.approx(
        (theirs.loss, theirs.norm, theirs.noise), rel=CLOSE
    )


def test_refused_audit_leaves_the_net_as_it_was() -> None:
    net = lawless(tt.carry(Noisy().double()), inputs(3, 2))
    before, buffers = torch.get_rng_state(), {n: b.clone() for n, b in net.named_buffers()}
    with pytest.raises(DataError):
        audited(net, stream_of([20], 1, warm_up=20))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(b, buffers[name]) for name, b in net.named_buffers())
    assert policy_gradients(net.eval(), list(stream_of([20], 1)), tt.Truncated(5))
