"""Losses of sequences, `tt.SequenceLoss`, equal those of plain autograd, and what is refused.

The reference plays the carried net over the last steps of each window, and calls the loss once for
all of a window, or once for each run of a recording.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Chunk, join
from throughtime.errors import ConfigError, ThroughtimeError

EXACT = 1e-10
LENGTHS = 17, 9, 6
POLICIES = tt.Truncated(4, 11), tt.Exact(), tt.Exact(chunk=3), tt.Exact(cut_every=7)


class Net(nn.Module):
    """A GRU with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.gru(x, h)
        return {"height": self.first(hidden), "kind": self.second(hidden)}, h


def net_of() -> Carried:
    torch.manual_seed(1)
    return tt.carry(Net().double(), torch.zeros(4, 2, 3, dtype=torch.float64), output="all")


def data() -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    return [
        {
            "inputs": torch.randn(n, 3, dtype=torch.float64),
            "targets": torch.randn(n, 1, dtype=torch.float64),
            "kind": torch.randint(2, (n,)),
            "scale": torch.rand(n, dtype=torch.float64) + 0.1,
        }
        for n in LENGTHS
    ]


def stream_of(warm_up: int = 2) -> tt.Stream:
    return tt.Stream(data(), lanes=2, chunk=4, seed=None, warm_up=warm_up)


def ratio(outputs: Any, chunk: Any) -> Tensor:
    """No sum over steps."""
    errors = (outputs["height"] - chunk.targets)[chunk.mask].square().sum()
    total = errors / (0.5 + chunk.targets[chunk.mask].square().sum())
    return total + outputs["kind"][chunk.mask].square().mean().sqrt()


def mean(outputs: Any, chunk: Any) -> Tensor:
    """A mean over valid steps."""
    rows = outputs["kind"][chunk.mask], chunk["kind"][chunk.mask]
    errors = (outputs["height"] - chunk.targets)[chunk.mask]
    return errors.square().mean() + functional.cross_entropy(*rows)


def weighted(outputs: Any, chunk: Any) -> tuple[Tensor, Tensor]:
    """A sum and its weight."""
    weight = chunk["scale"] * chunk.mask
    errors = (outputs["height"] - chunk.targets).square()[..., 0] + outputs["kind"].square().sum(-1)
    return (weight * errors).sum(), weight.sum()


def changes(outputs: Any, chunk: Any) -> Any:
    """Of pairs of steps: a piece of one step says nothing."""
    heights = outputs["height"]
    if len(heights) < 2:
        return heights.sum(), 0
    return (heights.diff(dim=0) - chunk.targets.diff(dim=0)).square().mean().sqrt()


class Loss(NamedTuple):
    fn: Callable[[Any, Any], Any]
    over: Any
    additive: bool


LOSSES = {
    "window": Loss(ratio, "window", False),
    "window weights": Loss(weighted, "window", False),
    "additive": Loss(mean, "window", True),
    "recording": Loss(changes, "recording", False),
    "recording weights": Loss(weighted, "recording", False),
    "recording additive": Loss(weighted, "recording", True),
}


def call(fn: Any, outputs: Any, chunk: Any) -> tuple[Tensor, float]:
    """The sum and the weight of one call."""
    result = fn(outputs, chunk)
    if isinstance(result, tuple):
        return result[0], float(result[1])
    weight = float(chunk.mask.sum())
    return result * weight, weight


def total(loss: Loss, outputs: Any, chunk: Any) -> tuple[Tensor, float]:
    """The loss of a window, and its weight."""
    if loss.over == "window":
        parts = [call(loss.fn, outputs, chunk)]
    else:
        parts = [
            call(loss.fn, {name: y[at] for name, y in outputs.items()}, run)
            for at, run in chunk.runs()
        ]
    weight = sum(weight for _, weight in parts)
    sums = torch.stack([s for s, _ in parts])
    used = torch.tensor([w > 0 for _, w in parts])
    return sums[used].sum() / max(weight, 1e-9), weight


class Answer(NamedTuple):
    loss: float
    weight: float
    grads: Tensor


def by_hand(
    net: Carried, stream: tt.Stream, loss: Loss, policy: Any, more: Iterable[nn.Parameter] = ()
) -> list[Answer]:
    """Every update, by autograd over its steps after those before them without a graph."""
    epoch: Chunk = join(list(stream))
    weights = [*net.parameters(), *more]
    stride = getattr(policy, "stride", None) or getattr(policy, "cut_every", None) or epoch.steps
    horizon = getattr(policy, "horizon", None) or stride
    answers: list[Answer] = []
    for begin in range(0, epoch.steps, stride):
        window = epoch[begin : begin + stride]
        first = begin if horizon <= stride else max(0, begin + window.steps - horizon)
        with torch.no_grad():
            before, lead = net.initial_state(epoch.lanes), epoch[:first]
            _, h = net(lead.inputs, before, lead.resets) if first else (None, before)
        played = epoch[first : begin + stride]
        outputs, _ = net(played.inputs, h, played.resets)
        outputs = {name: y[begin - first :] for name, y in outputs.items()}
        if not window.mask.any():
            continue
        value, weight = total(loss, outputs, window)
        if weight:
            grads = torch.autograd.grad(value, weights, allow_unused=True)
            answers.append(Answer(value.item(), weight, flat(weights, grads)))
    return answers


def flat(weights: Any, grads: Any) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(w) if g is None else g).flatten()
            for w, g in zip(weights, grads, strict=True)
        ]
    )


def answers_of(
    net: Carried, stream: Any, loss_fn: Any, policy: Any, accumulate: int = 1
) -> list[Answer]:
    weights = [*net.parameters(), *loss_fn.parameters()]
    answers: list[Answer] = []
    for update in tt.updates(net, stream, loss_fn, gradient=policy, accumulate=accumulate):
        grads = flat(weights, [w.grad for w in weights])
        answers.append(Answer(update.loss.item(), float(update.weight), grads))
        for weight in weights:
            weight.grad = None
    return answers


def same(ours: list[Answer], theirs: list[Answer]) -> None:
    assert len(ours) == len(theirs) > 0
    for our, their in zip(ours, theirs, strict=True):
        assert our.loss == pytest.approx(their.loss, rel=EXACT)
        assert our.weight == pytest.approx(their.weight, rel=EXACT)
        torch.testing.assert_close(our.grads, their.grads, rtol=EXACT, atol=EXACT)


@pytest.mark.covering
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_updates_are_those_of_autograd(name: str, policy: Any) -> None:
    net, loss = net_of(), LOSSES[name]
    loss_fn = tt.SequenceLoss(loss.fn, over=loss.over, additive=loss.additive)
    ours = answers_of(net, stream_of(), loss_fn, policy)
    same(ours, by_hand(net, stream_of(), loss, policy))


class Learned(nn.Module):
    """A loss with a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, outputs: Any, chunk: Any) -> Tensor:
        errors = (outputs["height"] - chunk.targets)[chunk.mask].square().mean()
        return errors * (-self.log_scale).exp() + self.log_scale


def test_parameters_of_the_loss_get_gradients() -> None:
    net, policy = net_of(), tt.Exact(chunk=3)
    loss_fn = tt.SequenceLoss(Learned().double(), additive=True)
    loss = Loss(loss_fn.fn, "window", True)
    ours = answers_of(net, stream_of(), loss_fn, policy)
    same(ours, by_hand(net, stream_of(), loss, policy, loss_fn.parameters()))


@pytest.mark.parametrize(
    "policy", [tt.Randomized(6), tt.Adaptive(0.5, min=4, max=8)], ids=["randomized", "adaptive"]
)
def test_a_policy_that_cuts_windows_wants_an_additive_loss(policy: Any) -> None:
    with pytest.raises(ThroughtimeError, match="additive"):
        list(tt.updates(net_of(), stream_of(), tt.SequenceLoss(ratio), gradient=policy))


def test_a_ratio_that_is_said_to_be_additive_is_found() -> None:
    loss_fn = tt.SequenceLoss(ratio, additive=True)
    with pytest.raises(ThroughtimeError, match="additive"):
        list(tt.updates(net_of(), stream_of(), loss_fn, gradient=tt.Exact(chunk=3)))


def test_settings_out_of_range_are_refused() -> None:
    for fn, over in ((ratio, "windows"), (3.0, "window")):
        with pytest.raises(ConfigError):
            tt.SequenceLoss(fn, over=over)  # type: ignore[arg-type]


RESULTS: dict[str, Callable[[Any, Chunk], Any]] = {
    "vector": lambda y, _: y["height"].square(),
    "nothing": lambda *_: None,
    "three": lambda y, _: (y["height"].sum(), 1.0, 2.0),
    "weight with a graph": lambda y, _: (y["height"].sum(), y["height"].square().sum()),
    "negative weight": lambda y, _: (y["height"].sum(), -1.0),
    "detached": lambda y, _: y["height"].detach().square().mean(),
}


@pytest.mark.parametrize("result", RESULTS)
def test_results_that_are_no_loss_are_refused(result: str) -> None:
    for additive, policy in ((False, tt.Truncated(5)), (True, tt.Exact(chunk=3))):
        loss_fn = tt.SequenceLoss(RESULTS[result], additive=additive)
        with pytest.raises(ThroughtimeError):
            list(tt.updates(net_of(), stream_of(), loss_fn, gradient=policy))


@pytest.mark.parametrize("name", LOSSES)
def test_an_evaluation_has_the_loss_of_whole_recordings(name: str) -> None:
    net, loss = net_of(), LOSSES[name]
    loss_fn = tt.SequenceLoss(loss.fn, over=loss.over, additive=loss.additive)
    (theirs,) = by_hand(net, stream_of(), loss, tt.Exact())
    value = tt.evaluate(net, stream_of(), loss_fn).loss
    assert float(value) == pytest.approx(theirs.loss, rel=EXACT)
