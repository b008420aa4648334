"""A loss that broadcasts `(N,)` against `(N, 1)` is refused at its first call; others run
unchanged.

Shapes: `N` rows, `C` outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ModelError
from throughtime.gradient import Objective, _pairing
from throughtime.gradient._pairing import check_rows, paired_size

Loss = Callable[[Tensor, Tensor], Tensor]
ROWS = 7


def scripted(o: Tensor, t: Tensor) -> Tensor:
    return (o[:, 0] - t).abs().mean()


def scripted_rows(o: Tensor, t: Tensor) -> Tensor:
    return (o[:, 0] - t[:, 0]).abs().mean()


class OwnFunction(torch.autograd.Function):
    """A custom function of autograd, whose operations a mode on functions does not see."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, t: Tensor) -> Tensor:
        del ctx
        return (o[:, 0] - t).abs().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        del ctx
        return grads[0].expand(ROWS, 1), None


class Squeezes(nn.Module):
    """A loss of one's own as a module."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.squeeze() - labels).square().mean()


def in_place(o: Tensor, t: Tensor) -> Tensor:
    return torch.empty(ROWS, ROWS).copy_(o[:, 0] * t).mean()


def swallows(o: Tensor, t: Tensor) -> Tensor:
    try:
        return (o[:, 0] - t).mean()
    except Exception:  # noqa: BLE001 (a loss may do so)
        return o.mean()


def some_rows(o: Tensor, t: Tensor) -> Tensor:
    high = t[:, 0] > 0
    return (o[high, 0] - t[high]).abs().mean()


def differences(o: Tensor, t: Tensor) -> Tensor:
    return (o[1:, 0] - t[:-1]).abs().mean()


def decays(o: Tensor, t: Tensor) -> Tensor:
    return (0.9 ** torch.arange(len(o)) * (o - t).square()).mean()


ACCIDENTS: dict[str, Loss] = {
    "flat outputs": lambda o, t: (o[:, 0] - t).abs().mean(),
    "flat targets": lambda o, t: (o - t[:, 0]).abs().mean(),
    "squeeze": lambda o, t: (o.squeeze() - t).square().mean(),
    "a dimension more": lambda o, t: (o - t[:, None]).square().mean(),
    "unsqueeze": lambda o, t: (o - t.unsqueeze(1)).square().mean(),
    "mse_loss": lambda o, t: functional.mse_loss(o[:, 0], t),
    "l1_loss": lambda o, t: functional.l1_loss(o, t[:, 0]),
    "huber_loss": lambda o, t: functional.huber_loss(o[:, 0], t),
    "smooth_l1_loss": lambda o, t: functional.smooth_l1_loss(o[:, 0], t),
    "poisson_nll_loss": lambda o, t: functional.poisson_nll_loss(o[:, 0], t),
    "gaussian_nll_loss": lambda o, t: functional.gaussian_nll_loss(
        o[:, 0], t, torch.ones_like(o[:, 0])
    ),
    "kl_div": lambda o, t: functional.kl_div(o[:, 0], t, reduction="batchmean"),
    "normal": lambda o, t: -torch.distributions.Normal(o[:, 0], 1.0).log_prob(t).mean(),
    "where": lambda o, t: torch.where(t > 0, o[:, 0], 0.0).mean(),
    "masked_fill": lambda o, t: o[:, 0].masked_fill(t > 0, 0.0).mean(),
    "comparison": lambda o, t: (o.mean() + ((o[:, 0] > t).float())).mean(),
    "maximum": lambda o, t: torch.maximum(o[:, 0], t).mean(),
    "addcmul": lambda o, t: torch.addcmul(o, o[:, 0], t).mean(),
    "lerp": lambda o, t: torch.lerp(o[:, 0], t, 0.5).mean(),
    "weights of the targets": lambda o, t: ((t > 0) * (o[:, 0] - t[:, 0]).square()).mean(),
    "weights by step": decays,
    "in place": in_place,
    "custom function": OwnFunction.apply,
    "scripted": torch.jit.script(scripted),
    "compiled": torch.compile(scripted, backend="eager"),
    "module": Squeezes(),
    "partial": partial(lambda scale, o, t: (o[:, 0] - t).abs().mean() * scale, 2.0),
    "swallows errors": swallows,
    "some rows": some_rows,
    "differences": differences,
}


def ranking(o: Tensor, t: Tensor) -> Tensor:
    s, y = o[:, 0], t[:, 0]
    return (1 - (s[:, None] - s) * (y[:, None] - y).sign()).relu().mean()


def soft_bins(o: Tensor, t: Tensor) -> Tensor:
    centres = torch.linspace(-1, 1, ROWS)
    return o.mean() * (t - centres).square().softmax(1).mean()


def per_class(o: Tensor, t: Tensor) -> Tensor:
    return (o.view(-1, 1, 1).expand(-1, ROWS, 1) - torch.arange(float(ROWS))).mean() + t.mean()


def penalty(o: Tensor, t: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((o - t).square().sum(), o, create_graph=True)
    return (o - t).abs().mean() + slope.square().mean()


INTENDED: dict[str, Loss] = {
    "MSELoss": nn.MSELoss(),
    "HuberLoss": nn.HuberLoss(),
    "BCEWithLogitsLoss": lambda o, t: functional.binary_cross_entropy_with_logits(o, t.sigmoid()),
    "flat": lambda o, t: (o[:, 0] - t[:, 0]).abs().mean(),
    "gaussian_nll_loss": lambda o, t: functional.gaussian_nll_loss(o, t, torch.ones_like(o)),
    "correlation": lambda o, t: -((o - o.mean()) * (t - t.mean())).mean(),
    "all pairs": lambda o, t: (o[:, None] - t[None, :]).abs().mean(),
    "transposed": lambda o, t: ((o - o.T) - (t - t.T)).square().mean(),
    "pairs of scores": lambda o, t: (o[:, 0][:, None] - t[:, 0][None]).abs().mean(),
    "ranking": ranking,
    "einsum": lambda o, t: torch.einsum("i,jk->ij", o[:, 0], t).mean(),
    "dot": lambda o, t: (o[:, 0] @ t).sum() / len(o),
    "cdist": lambda o, t: torch.cdist(o, t).mean(),
    "cosine": lambda o, t: functional.cosine_similarity(o[:, None], t[None], dim=-1).mean(),
    "as many values as rows": soft_bins,
    "as many classes as rows": per_class,
    "lookup": lambda o, t: o[:, 0][(t * 0).long()].mean(),
    "gradient penalty": penalty,
    "weights": lambda o, t: (torch.ones(len(o), 1) * (o - t).square()).mean(),
    "dropout": lambda o, t: (functional.dropout(o, 0.5) - t).square().mean(),
    "scripted": torch.jit.script(scripted_rows),
}


def pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    o, t = torch.randn(2, ROWS, 1, generator=draw)
    return o.requires_grad_(), t


@pytest.mark.parametrize("loss_fn", list(ACCIDENTS.values()), ids=list(ACCIDENTS))
def test_a_loss_over_all_pairs_by_accident_is_refused(loss_fn: Loss) -> None:
    with pytest.raises(ModelError, match=r"pairs each row with every other"):
        check_rows(loss_fn, *pair(), "loss_fn")


@pytest.mark.parametrize("loss_fn", list(INTENDED.values()), ids=list(INTENDED))
def test_other_losses_give_the_same_loss_gradient_and_random_numbers(loss_fn: Loss) -> None:
    o, t = pair()
    results: list[tuple[Tensor, ...]] = []
    for call in (loss_fn, partial(check_rows, loss_fn, role="loss_fn")):
        torch.manual_seed(3)
        loss = call(o, t)
        grads = torch.autograd.grad(loss, o)
        results.append((loss, *grads, torch.get_rng_state()))
    assert all(map(torch.equal, *results))


def test_the_refusal_says_what_is_paired_and_what_to_write() -> None:
    with pytest.raises(ModelError) as error:
        check_rows(ACCIDENTS["flat outputs"], *pair(), "loss_fn")
    text = str(error.value)
    assert text.startswith("loss_fn pairs each row with every other: sub broadcasts (7,)")
    assert "(7,) against (7, 1) to (7, 7)" in text
    assert "write targets[:, 0] beside outputs[:, 0], or outputs beside targets. " in text


def test_whole_numbers_as_targets_of_one_output() -> None:
    o, _ = pair()
    advice = r"write outputs\[:, 0\] beside targets, or targets\[:, None\] beside outputs"
    with pytest.raises(ModelError, match=advice):
        check_rows(lambda o, t: (o - t).square().mean(), o, torch.arange(ROWS), "loss_fn")


def test_one_class_of_cross_entropy_is_no_pair() -> None:
    o, _ = pair()
    check_rows(nn.CrossEntropyLoss(), o, torch.zeros(ROWS, dtype=torch.long), "loss_fn")


def test_a_loss_for_a_fixed_number_of_rows_is_judged_by_it() -> None:
    fixed: Loss = lambda o, t: (o.view(ROWS) - t).mean()  # noqa: E731
    with pytest.raises(ModelError, match="pairs each row"):
        check_rows(fixed, *pair(), "loss_fn")


def test_shapes_that_pair_by_accident() -> None:
    assert paired_size((7, 1, 1), (7, 1)) == paired_size((7, 1), (7,)) == 7
    for a, b in [((7, 1), (1, 7)), ((7, 3), (3,)), ((7, 1), (3,)), ((7,), ()), ((1,), (1, 1))]:
        assert paired_size(a, b) == 0


def net_and_stream(chunk: int = 10) -> tuple[Carried, tt.Stream]:
    torch.manual_seed(0)
    recording = {"inputs": torch.randn(40, 2), "targets": torch.randn(40)}
    net = tt.carry(nn.Sequential(tt.nn.GRU(2, 4), nn.Linear(4, 1)))
    return net, tt.Stream(recording, lanes=1, chunk=chunk)


POLICIES = {
    "truncated": tt.Truncated(10),
    "horizon": tt.Truncated(10, horizon=20),
    "exact": tt.Exact(),
    "adaptive": tt.Adaptive(0.5, min=5, max=20),
}


@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
def test_every_policy_refuses_before_a_gradient(policy: Any) -> None:
    net, stream = net_and_stream()
    with pytest.raises(ModelError, match="loss_fn pairs each row"):
        next(tt.updates(net, stream, ACCIDENTS["flat outputs"], gradient=policy))
    assert all(weight.grad is None for weight in net.parameters())


def test_evaluate_and_audit_refuse_it() -> None:
    net, stream = net_and_stream()
    with pytest.raises(ModelError, match="loss_fn pairs each row"):
        tt.evaluate(net, stream, ACCIDENTS["flat outputs"])
    _, stream = net_and_stream()
    with pytest.raises(ModelError, match="loss_fn pairs each row"):
        tt.audit(net, stream, ACCIDENTS["flat outputs"], horizons=(5,))


@dataclass
class MeanError:
    """A metric of one's own."""

    errors: list[Tensor] = field(default_factory=list[Tensor])
    flat: bool = True

    def new(self) -> "MeanError":
        return MeanError(flat=self.flat)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        own = targets[:, 0] if self.flat else targets
        self.errors.append((outputs[:, 0] - own).abs())

    def compute(self) -> dict[str, float]:
        return {"error": torch.cat(self.errors).mean().item()}


def test_metrics_are_checked_and_updated_once() -> None:
    net, stream = net_and_stream()
    metrics = tt.evaluate(net, stream, metrics=MeanError()).metrics
    _, stream = net_and_stream(chunk=40)
    outputs, _ = tt.predict(net, stream.recordings[0])
    targets = torch.from_numpy(stream.recordings[0].read(0, 40).targets)
    assert metrics["error"] == pytest.approx((outputs[:, 0] - targets).abs().mean().item())
    _, stream = net_and_stream()
    with pytest.raises(ModelError, match="metrics pairs each row"):
        tt.evaluate(net, stream, metrics=MeanError(flat=False))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of a loss that is checked."""
    rows_checked: list[int] = []

    def count(function: Loss, rows: Tensor, targets: Tensor, role: str) -> Tensor:
        rows_checked.append(len(rows))
        return check_rows(function, rows, targets, role)

    monkeypatch.setattr("throughtime.gradient.objective.check_rows", count)
    return rows_checked


def test_only_the_first_call_on_several_rows_is_checked(checked: list[int]) -> None:
    objective = Objective(lambda o, t: (o - t).square().mean())
    for steps in (1, 1, 5, 6):
        chunk = Chunk.from_tensors(torch.zeros(steps, 1, 2), torch.zeros(steps, 1))
        objective.loss(torch.zeros(steps, 1, 1), chunk)
    assert checked == [5]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_checks_its_loss_once(accumulate: int, checked: list[int]) -> None:
    net, stream = net_and_stream(chunk=5)
    loss_fn: Loss = lambda o, t: (o - t).square().mean()  # noqa: E731
    policy = tt.Truncated(5)
    assert list(tt.updates(net, stream, loss_fn, gradient=policy, accumulate=accumulate))
    assert len(checked) == 1


def test_a_compiled_loss_is_compiled_after_the_check() -> None:
    compiled: list[int] = []

    def backend(module: Any, example: Any) -> Any:
        compiled.append(len(example))
        return module.forward

    loss_fn = torch.compile(scripted_rows, backend=backend)
    o, t = pair()
    check_rows(loss_fn, o, t, "loss_fn")
    assert not compiled
    assert torch.equal(loss_fn(o, t), scripted_rows(o, t))
    assert compiled


@pytest.mark.parametrize("mutant", ["same dimensions", "without doubling", "itself"])
def test_mutants_refuse_intended_pairs(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part of the rule is needed: without it, a loss that pairs on purpose is refused."""
    cases = {"same dimensions": "all pairs", "without doubling": "as many values as rows"}
    if mutant == "same dimensions":
        monkeypatch.setattr(_pairing, "paired_size", lambda a, b: paired_size((1, *a), b))
    elif mutant == "without doubling":
        monkeypatch.setattr(_pairing, "_grows", lambda *_: True)
    else:
        monkeypatch.setattr(_pairing, "_is_same", lambda *_: False)
    with pytest.raises(ModelError, match="pairs each row"):
        check_rows(INTENDED[cases.get(mutant, "ranking")], *pair(), "loss_fn")
