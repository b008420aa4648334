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
OWN_TYPE = [torch.float64]  # the last one is that of the data


def numbers(columns: int = 1) -> Data:
    return lambda n, d: (torch.randn(n, columns).to(d), torch.randn(n, columns).to(d))


def classes(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).to(d), torch.randint(C, (n,))


def one_class(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).to(d), torch.zeros(n, dtype=torch.long)


def some_ignored(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    outputs, labels = classes(n, d)
    return outputs, labels.where(torch.rand(n) < 0.6, -100)


def log_chances(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).log_softmax(-1).to(d), torch.randint(C, (n,))


def soft(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).to(d), torch.randn(n, C).softmax(-1).to(d)


def log_soft(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    outputs, targets = soft(n, torch.float64)
    return outputs.log_softmax(-1).to(d), targets.to(d)


def bits(n: int, d: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(n, C).to(d), (torch.rand(n, C) < 0.5).to(d)


class Weighted(nn.Module):
    """A loss of torch with a weight in the type of the data."""

    def __init__(self, make: Callable[..., nn.Module], name: str = "weight", **options: Any):
        super().__init__()
        self.inner = make(**{name: torch.tensor(WEIGHT)}, **options)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner(outputs, targets)


class DropsOut(nn.Module):
    """A mean with dropout, or its root."""

    def __init__(self, root: bool = False) -> None:
        super().__init__()
        self.drop, self.root = nn.Dropout(0.3), root

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean = (self.drop(outputs) - targets).square().mean()
        return mean.sqrt() if self.root else mean


class RootInTraining(nn.Module):
    """A mean in evaluation mode."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.mse_loss(outputs, targets)
        return loss.sqrt() if self.training else loss


class CountsCalls(nn.Module):
    """A mean that counts its calls in a buffer, and has a weight."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (outputs - targets).abs().mean() * self.scale


class Normalizes(nn.Module):
    """A loss of outputs that a batch norm has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, affine=False, track_running_stats=False)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(self.norm(outputs), targets)


def root(o: Tensor, t: Tensor) -> Tensor:
    return functional.mse_loss(o, t).sqrt()


def gaussian(o: Tensor, t: Tensor) -> Tensor:
    return functional.gaussian_nll_loss(o[:, :1], t[:, :1], o[:, 1:].exp() + 0.1)


def penalty(o: Tensor, t: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((o - t).square().sum(), o, create_graph=True)
    return (o - t).abs().mean() + slope.square().mean()


def correlation(o: Tensor, t: Tensor) -> Tensor:
    a, b = o - o.mean(), t - t.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-12)


def ratio(o: Tensor, t: Tensor) -> Tensor:
    return (o - t).square().sum() / (t.square().sum() + 1e-6)


def ranking(o: Tensor, t: Tensor) -> Tensor:
    s, y = o[:500, 0], t[:500, 0]
    return (1 - (s[:, None] - s) * (y[:, None] - y).sign()).relu().mean()


def as_typed(loss_fn: Loss, columns: int = 1) -> Loss:
    """A loss that takes no type but that of the data."""

    def typed(o: Tensor, t: Tensor) -> Tensor:
        return loss_fn(o @ torch.eye(columns, dtype=OWN_TYPE[-1]), t)

    return typed


MEANS: dict[str, tuple[Loss, Data]] = {
    "MSE": (nn.MSELoss(), numbers()),
    "CE weight": (nn.CrossEntropyLoss(torch.tensor(WEIGHT)), classes),
    "CE smooth, weight, ignored": (
        nn.CrossEntropyLoss(torch.tensor(WEIGHT), label_smoothing=0.1),
        some_ignored,
    ),
    "CE of chances, weight": (nn.CrossEntropyLoss(torch.tensor(WEIGHT)), soft),
    "NLL weight, ignore_index=2": (nn.NLLLoss(torch.tensor(WEIGHT), ignore_index=2), log_chances),
    "BCE with logits, pos_weight": (Weighted(nn.BCEWithLogitsLoss, "pos_weight"), bits),
    "KLDiv": (nn.KLDivLoss(reduction="batchmean"), log_soft),
    "Gaussian": (gaussian, numbers(2)),
    "in its own type": (as_typed(functional.mse_loss), numbers()),
    "penalty of the gradient": (penalty, numbers()),
    "root in training": (RootInTraining(), numbers()),
    "dropout": (DropsOut(), numbers()),
    "dropout outside of a module": (
        lambda o, t: (functional.dropout(o, 0.3) - t).square().mean(),
        numbers(),
    ),
    "noise": (lambda o, t: (o + 0.3 * torch.randn_like(o) - t).abs().mean(), numbers()),
    "counts its calls": (CountsCalls(), numbers()),
}
OTHERS: dict[str, tuple[Loss, Data]] = {
    "sum": (lambda o, t: (o - t).abs().sum(), numbers()),
    "root": (root, numbers()),
    "root with dropout": (DropsOut(root=True), numbers()),
    "error to signal": (ratio, numbers()),
    "correlation": (correlation, numbers()),
    "ranking": (ranking, numbers()),
    "differences in time": (lambda o, t: (o.diff(dim=0) - t.diff(dim=0)).abs().mean(), numbers()),
    "batch norm": (Normalizes(), numbers()),
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
    OWN_TYPE.append(kind)
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


def test_buffers_weights_and_modes_stay_as_they_are() -> None:
    counter, dropout = CountsCalls(), DropsOut()
    for loss_fn in (counter, dropout):
        assert is_mean(loss_fn, *numbers()(50, torch.float32), lambda t: float(len(t)))
        assert loss_fn.training
    assert counter.calls == 0
    assert counter.scale.grad is None
    assert counter.scale.dtype == torch.float32


def test_weights_of_classes_are_not_trusted_where_one_class_occurs() -> None:
    loss_fn, data = OTHERS["CE weight of a function"][0], one_class(100, torch.float64)
    count: Callable[[Tensor], float] = lambda t: float(len(t))  # noqa: E731
    assert is_mean(loss_fn, *data, count) is None
    outputs, labels = data
    rare = torch.zeros_like(labels)
    rare[37] = 3
    assert is_mean(loss_fn, outputs, rare, count) is False


def test_labels_that_do_not_occur_are_not_tried() -> None:
    """Of four outputs three are classes: a fourth label would be no index."""

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        assert int(t.max()) < 3
        return functional.cross_entropy(o[:, :3], t).sqrt()

    torch.manual_seed(0)
    outputs, labels = torch.randn(50, 4), torch.randint(3, (50,))
    assert is_mean(loss_fn, outputs, labels, lambda t: float(len(t))) is False


def test_a_loss_that_takes_one_number_of_rows_is_undecided() -> None:
    fixed: Loss = lambda o, t: (o.view(7) - t.view(7)).abs().mean()  # noqa: E731
    assert is_mean(fixed, *numbers()(7, torch.float32), lambda t: float(len(t))) is None


# what is refused, what is a warning


def net_and_stream(steps: int = 40, chunk: int = 10) -> tuple[Carried, tt.Stream]:
    torch.manual_seed(0)
    recording = {"inputs": torch.randn(steps, 2), "targets": torch.randn(steps)}
    net = tt.carry(nn.Sequential(tt.nn.GRU(2, 4), nn.Linear(4, 1)))
    return net, tt.Stream(recording, lanes=1, chunk=chunk)


SPLITTING: dict[str, tuple[Any, int]] = {
    "exact": (tt.Exact(chunk=10), 1),
    "randomized": (tt.Randomized(10), 1),
    "accumulate": (tt.Truncated(10), 2),
    "adaptive": (tt.Adaptive(0.5, min=5, max=10), 1),
}


@pytest.mark.parametrize(("policy", "accumulate"), list(SPLITTING.values()), ids=list(SPLITTING))
def test_a_root_is_refused_where_it_is_split(policy: Any, accumulate: int) -> None:
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


def test_a_loss_that_is_known_to_be_no_mean_is_refused_when_a_window_is_split_later() -> None:
    net, _ = net_and_stream()
    lengths = (8, 40)  # the first to be played fits into one segment
    recordings = [{"inputs": torch.randn(n, 2), "targets": torch.randn(n)} for n in lengths]
    stream = tt.Stream(recordings, lanes=1, chunk=10, seed=None)
    updates = tt.updates(net, stream, root, gradient=tt.Exact(chunk=10))
    with pytest.warns(UserWarning, match="no mean over its rows"):
        assert next(updates).steps == 8
    with pytest.raises(ModelError, match="no mean over its rows"):
        next(updates)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """The verdicts of the law."""
    verdicts: list[bool | None] = []

    def note(*args: Any) -> bool | None:
        verdicts.append(is_mean(*args))
        return verdicts[-1]

    monkeypatch.setattr("throughtime.gradient.objective.is_mean", note)
    return verdicts


def test_the_law_is_tried_once(asked: list[bool | None]) -> None:
    net, stream = net_and_stream()
    loss_fn: Loss = lambda o, t: (o - t).square().mean()  # noqa: E731
    list(tt.updates(net, stream, loss_fn, gradient=tt.Truncated(5)))
    assert asked == [True]


def test_one_row_tells_enough() -> None:
    chunk = Chunk.from_tensors(torch.zeros(1, 1, 2), torch.zeros(1, 1))
    with pytest.raises(ModelError, match="no mean over its rows"):
        Objective(root, split=True)(torch.ones(1, 1, 1), chunk)


# (N,) beside (N, 1)

ACCIDENTS: dict[str, Loss] = {
    "flat outputs": lambda o, t: (o[:, 0] - t).abs().mean(),
    "mse_loss": lambda o, t: functional.mse_loss(o[:, 0], t),
    "normal": lambda o, t: -torch.distributions.Normal(o[:, 0], 1.0).log_prob(t).mean(),
}


@pytest.mark.parametrize("name", ACCIDENTS)
def test_pairs_by_accident_are_refused_before_a_gradient(name: str) -> None:
    net, stream = net_and_stream()
    with pytest.raises(ModelError, match="pairs each row"):
        next(tt.updates(net, stream, ACCIDENTS[name], gradient=tt.Truncated(10)))
    assert all(weight.grad is None for weight in net.parameters())


@pytest.mark.parametrize("loss_fn", [correlation, ranking])
def test_statistics_of_all_rows_are_no_pairs(loss_fn: Loss) -> None:
    assert not pairs_rows(loss_fn, *numbers()(100, torch.float64))


def test_whole_numbers_as_targets_of_one_output() -> None:
    chunk = Chunk.from_tensors(torch.zeros(7, 1, 2), torch.arange(7)[:, None])
    with pytest.raises(ModelError, match="pairs each row"):
        Objective(lambda o, t: (o - t).square().mean())(torch.randn(7, 1, 1), chunk)


def test_pairs_are_refused_before_they_take_memory() -> None:
    """A million rows would pair to four terabytes."""
    rows = 1_000_000
    chunk = Chunk.from_tensors(torch.zeros(rows, 1, 1), torch.randn(rows, 1))
    with warnings.catch_warnings(), pytest.raises(ModelError, match="pairs each row"):
        Objective(ACCIDENTS["flat outputs"])(torch.randn(rows, 1, 1), chunk)
