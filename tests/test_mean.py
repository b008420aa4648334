"""The law of the mean: which losses are accused of being no mean over rows, and what follows.

Shapes: `N` rows, `C` outputs.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ModelError
from throughtime.gradient import Objective
from throughtime.gradient._mean import is_mean, pairs_rows

Loss = Callable[[Tensor, Tensor], Tensor]
Data = Callable[[int, torch.dtype], tuple[Tensor, Tensor]]
C = 5
SIZES = (2, 100, 3_000)
TYPES = (torch.float64, torch.bfloat16)
WEIGHT = (1.0, 3.0, 0.2, 2.0, 0.5)


def numbers(columns: int = 1) -> Data:
    return lambda n, d: (torch.randn(n, columns).to(d), torch.randn(n, columns).to(d))


def classes(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).to(d), torch.randint(C, (n,))


def one_class(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).to(d), torch.zeros(n, dtype=torch.long)


def some_ignored(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    outputs, labels = classes(n, d)
    return outputs, labels.where(torch.rand(n) < 0.6, -100)


def bits(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).to(d), (torch.rand(n, C) < 0.5).to(d)


class Weighted(nn.Module):
    """A loss of torch with a weight in the type of the data."""

    def __init__(self, make: Callable[..., nn.Module], name: str = "weight", **options: Any):
        super().__init__()
        self.inner = make(**{name: torch.tensor(WEIGHT)}, **options)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner(outputs, targets)


class RootInTraining(nn.Module):
    """A mean in evaluation mode."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.mse_loss(outputs, targets)
        return loss.sqrt() if self.training else loss


def dropping(o: Tensor, t: Tensor) -> Tensor:
    """A function, which no eval() reaches: it draws random numbers."""
    return (functional.dropout(o, 0.3) - t).square().mean()


def root(o: Tensor, t: Tensor) -> Tensor:
    return functional.mse_loss(o, t).sqrt()


def ratio(o: Tensor, t: Tensor) -> Tensor:
    return (o - t).square().sum() / (t.square().sum() + 1e-6)


def ranking(o: Tensor, t: Tensor) -> Tensor:
    s, y = o[:500, 0], t[:500, 0]
    return (1 - (s[:, None] - s) * (y[:, None] - y).sign()).relu().mean()


MEANS: dict[str, tuple[Loss, Data]] = {
    "MSE": (nn.MSELoss(), numbers()),
    "CE smooth, weight, ignored": (
        nn.CrossEntropyLoss(torch.tensor(WEIGHT), label_smoothing=0.1),
        some_ignored,
    ),
    "BCE with logits, pos_weight": (Weighted(nn.BCEWithLogitsLoss, "pos_weight"), bits),
    "root in training": (RootInTraining(), numbers()),
    "dropout": (dropping, numbers()),
}
OTHERS: dict[str, tuple[Loss, Data]] = {
    "sum": (lambda o, t: (o - t).abs().sum(), numbers()),
    "root": (root, numbers()),
    "root with dropout": (lambda o, t: dropping(o, t).sqrt(), numbers()),
    "error to signal": (ratio, numbers()),
    "ranking": (ranking, numbers()),
    "differences in time": (lambda o, t: (o.diff(dim=0) - t.diff(dim=0)).abs().mean(), numbers()),
    "CE weight of a function": (
        lambda o, t: functional.cross_entropy(o, t, torch.tensor(WEIGHT, dtype=o.dtype)),
        classes,
    ),
    "(N,) beside (N, 1)": (lambda o, t: (o[:2000, 0] - t[:2000]).square().mean(), numbers()),
}


def verdict(name: str, size: int, kind: torch.dtype, seed: int) -> bool | None:
    """The verdict on a loss of one of the tables, which must change nothing."""
    loss_fn, data = (MEANS | OTHERS)[name]
    torch.manual_seed(seed * 1_000 + size)
    outputs, targets = data(size, kind)
    if isinstance(loss_fn, nn.Module):
        loss_fn.to(kind)
    state = torch.get_rng_state()
    summed = getattr(loss_fn, "reduction", "mean") == "sum"
    counts_rows: Callable[[Tensor], float] = lambda labels: float(len(labels))  # noqa: E731
    result = is_mean(
        loss_fn, outputs, targets, counts_rows if summed else Objective(loss_fn)._weigh
    )
    assert torch.equal(torch.get_rng_state(), state)
    return result


@pytest.mark.parametrize("name", MEANS)
def test_no_mean_is_accused(name: str) -> None:
    verdicts = [verdict(name, n, kind, 0) for n in SIZES for kind in TYPES]
    assert False not in verdicts
    assert verdicts.count(True) >= len(verdicts) - 3  # some losses run in bfloat16 alone


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_mean_is_caught_or_undecided_and_caught_within_five_updates(name: str) -> None:
    for kind in TYPES:
        for n in SIZES:
            verdicts = [verdict(name, n, kind, seed) for seed in range(5 if n < 10 else 1)]
            assert True not in verdicts
            assert False in verdicts


def test_weights_of_classes_are_not_trusted_where_one_class_occurs() -> None:
    loss_fn, data = OTHERS["CE weight of a function"][0], one_class(100, torch.float64)
    count: Callable[[Tensor], float] = lambda t: float(len(t))  # noqa: E731
    assert is_mean(loss_fn, *data, count) is None
    outputs, labels = data
    rare = torch.zeros_like(labels)
    rare[37] = 3
    assert is_mean(loss_fn, outputs, rare, count) is False


# what is refused, what is a warning


def net_and_stream(steps: int = 40, chunk: int = 10) -> tuple[Carried, tt.Stream]:
    torch.manual_seed(0)
    recording = {"inputs": torch.randn(steps, 2), "targets": torch.randn(steps)}
    net = tt.carry(nn.Sequential(tt.nn.GRU(2, 4), nn.Linear(4, 1)))
    return net, tt.Stream(recording, lanes=1, chunk=chunk)


def test_a_root_is_refused_where_it_is_split() -> None:
    splitting: list[tuple[Any, int]] = [
        (tt.Exact(chunk=10), 1),
        (tt.Randomized(10), 1),
        (tt.Truncated(10), 2),
        (tt.Adaptive(0.5, min=5, max=10), 1),
    ]
    for policy, accumulate in splitting:
        net, stream = net_and_stream()
        updates = tt.updates(net, stream, root, gradient=policy, accumulate=accumulate)
        with pytest.raises(ModelError, match="no mean over its rows"):
            next(updates)
        assert all(weight.grad is None for weight in net.parameters())


def test_a_root_over_each_stride_is_a_warning_once() -> None:
    net, stream = net_and_stream()
    with pytest.warns(UserWarning, match=r"no mean over its rows.*SequenceLoss") as record:
        assert len(list(tt.updates(net, stream, root, gradient=tt.Truncated(10)))) == 4
    assert len(record) == 1


# (N,) beside (N, 1)


def by_accident(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs().mean()


def test_statistics_of_all_rows_are_no_pairs() -> None:
    assert not pairs_rows(ranking, *numbers()(100, torch.float64))


def test_pairs_are_refused_before_they_take_memory() -> None:
    """A million rows would pair to four terabytes."""
    rows = 1_000_000
    chunk = Chunk.from_tensors(torch.zeros(rows, 1, 1), torch.randn(rows, 1))
    with warnings.catch_warnings(), pytest.raises(ModelError, match="pairs each row"):
        Objective(by_accident)(torch.randn(rows, 1, 1), chunk)
