"""Nets of several outputs, as people write them: equal to plain loops in values and gradients.

The reference plays the layers of a module step by step, lane by lane, and knows neither the ways
of calling a module nor policies. Every net has two outputs of the same hidden units: `a`
`(T, B, 2)`, and `b` `(T, B)` without a dimension of features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from throughtime.carry import Carried
from throughtime.chunk import Chunk, join
from throughtime.errors import ModelError, ThroughtimeError

EXACT = 1e-10
LENGTHS = 13, 8, 5


class Heads(nn.Module):
    """Layers of all nets; subclasses differ in what they take and return."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.GRU(3, 4)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 1)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(hidden), self.second(hidden)[..., 0]


class Pair(Heads):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.layer(x, h)
        return self.heads(hidden), h


class Flat(Heads):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.layer(x, h)
        return *self.heads(hidden), h


class NamesAndState(Heads):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.layer(x, h)
        return {**dict(zip("ab", self.heads(hidden), strict=True)), "h": h}


class Nested(Heads):
    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.layer(x, h)
        a, b = self.heads(hidden)
        return {"heads": {"a": a}, "rest": (b,)}, h


class Step(Heads):
    def __init__(self) -> None:
        super().__init__(nn.GRUCell(3, 4))

    def forward(self, x: Tensor, h: Tensor) -> Any:
        h = self.layer(x, h)
        return self.heads(h), h


class Whole(Heads):
    """The class of each step, an integer, beside."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.layer(x, h)
        a, b = self.heads(hidden)
        return a, b, a.argmax(-1), h


class Penalty(Heads):
    """A scalar beside, which is no output."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.layer(x, h)
        return self.heads(hidden), h, hidden.square().mean()


class Style(NamedTuple):
    make: Callable[[], Heads]
    output: Any = "all"
    named: bool = False
    state: str | None = None


STYLES: dict[str, Style] = {
    "flat": Style(Flat),
    "names and state": Style(NamesAndState, named=True),
    "nested by paths": Style(Nested, [(0, "heads", "a"), (0, "rest", 0)]),
    "step": Style(Step),
    "two beside integers": Style(Whole, [0, 1]),
}
every_style = pytest.mark.parametrize("style", STYLES)


def net_of(style: str) -> Carried:
    torch.manual_seed(1)
    make, output, *_ = STYLES[style]
    return tt.carry(make().double(), output=output)


def pair(outputs: Any) -> tuple[Tensor, Tensor]:
    """Outputs `a` and `b` of a structure."""
    return (outputs["a"], outputs["b"]) if isinstance(outputs, dict) else outputs[:2]


def data(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    return [
        {
            "inputs": torch.randn(n, 3, dtype=torch.float64),
            "targets": torch.randint(2, (n,)),
            "height": torch.randn(n, dtype=torch.float64),
        }
        for n in lengths
    ]


def start(lanes: int) -> Tensor:
    return torch.zeros(lanes, 4, dtype=torch.float64)


def advance(module: Any, x: Tensor, h: Tensor) -> Tensor:
    """One step of inputs `(B, 3)`: the hidden units `(B, 4)`."""
    cell = isinstance(module.layer, nn.GRUCell)
    return module.layer(x, h) if cell else module.layer(x[None], h[None])[0][0]


def plain(
    module: Any, x: Tensor, state: Tensor | None = None, resets: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Outputs of inputs `(T, B, 3)`, and the states entering each step and after the last one."""
    states = [start(x.shape[1]) if state is None else state]
    for t, step in enumerate(x):
        h = states[-1] if resets is None else torch.where(resets[t, :, None], 0.0, states[-1])
        states.append(advance(module, step, h))
    hidden = torch.stack(states[1:])
    return module.heads(hidden), states


def loss_of(outputs: Any, chunk: Any) -> Tensor:
    """The mean over valid steps of the losses of both outputs."""
    a, b = pair(outputs)
    classes = functional.cross_entropy(a[chunk.mask], chunk.targets[chunk.mask])
    return classes + (b - chunk["height"]).square()[chunk.mask].mean()


def grads_of(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def expected(
    net: Carried, chunks: list[Chunk], stride: int, horizon: int
) -> list[tuple[float, Tensor, tuple[Tensor, Tensor]]]:
    """The loss, gradient and outputs of every stride, by autograd over the last steps."""
    epoch: Chunk = join(chunks)
    module: Any = net.module
    weights = list(module.parameters())
    results: list[tuple[float, Tensor, tuple[Tensor, Tensor]]] = []
    entering = [start(epoch.lanes)]
    for begin in range(0, epoch.steps, stride):
        stop = min(begin + stride, epoch.steps)
        first = begin if horizon <= stride else max(0, stop - horizon)
        part = epoch[first:stop]
        (a, b), states = plain(module, part.inputs, entering[first].detach(), part.resets)
        entering[begin:] = states[begin - first :]
        ours = a[begin - first :], b[begin - first :]
        loss = loss_of(ours, epoch[begin:stop])
        grads = torch.autograd.grad(loss, weights)
        results.append((loss.item(), torch.cat([g.flatten() for g in grads]), ours))
    return results


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


@every_style
@pytest.mark.parametrize(
    "policy",
    [tt.Truncated(3, 9), tt.Exact(chunk=4)],
    ids=["horizon", "exact by 4"],
)
def test_gradients_are_those_of_autograd(style: str, policy: Any) -> None:
    net = net_of(style)
    stream = tt.Stream(data(), lanes=2, chunk=4, seed=None)
    stride = getattr(policy, "stride", 100)
    theirs = expected(net, list(stream), stride, getattr(policy, "horizon", None) or stride)
    loss_fn = tt.SequenceLoss(loss_of, additive=True)
    count = 0
    for update in tt.updates(net, stream, loss_fn, gradient=policy):
        loss, grads, outputs = theirs[count]
        count += 1
        assert update.loss.item() == pytest.approx(loss, rel=EXACT)
        close(grads_of(net), grads)
        mask = update.chunk.mask
        for ours, their in zip(pair(update.outputs), outputs, strict=True):
            assert not ours.requires_grad
            close(ours[mask], their[-update.chunk.steps :][mask])
        net.zero_grad()
    assert count == len(theirs)


@every_style
def test_predictions_have_the_structure(style: str) -> None:
    net, recording = net_of(style), data()[0]
    x = recording["inputs"]
    theirs, _ = plain(net.module, torch.cat([x, x])[:, None])
    outputs, state = tt.predict(net, recording, chunk=5)
    more, _ = tt.predict(net, recording, state=state, chunk=5)
    assert isinstance(outputs, dict if STYLES[style].named else tuple)
    for ours, after, their in zip(pair(outputs), pair(more), theirs, strict=True):
        close(torch.cat([ours, after]), their.detach()[:, 0])


class Errors:
    """A metric of both outputs."""

    def __init__(self) -> None:
        self.right = self.steps = 0
        self.total = 0.0

    def new(self) -> "Errors":
        return Errors()

    def update(self, outputs: Any, targets: Tensor) -> None:
        a, b = pair(outputs)
        self.right += int((a.argmax(-1) == targets).sum())
        self.total += float(b.square().sum())
        self.steps += len(targets)

    def compute(self) -> dict[str, float]:
        return {"accuracy": self.right / self.steps, "size": self.total / self.steps}


@pytest.mark.parametrize("style", ["flat", "names and state"])
def test_metrics_and_losses_of_an_evaluation_get_the_structure(style: str) -> None:
    net, recordings = net_of(style), data()

    def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
        a, b = pair(outputs)
        return functional.cross_entropy(a, targets) + b.square().mean()

    result = tt.evaluate(net, recordings, loss_fn, metrics=Errors())
    both = [plain(net.module, r["inputs"][:, None])[0] for r in recordings]
    a, b = (torch.cat([outputs[i][:, 0].detach() for outputs in both]) for i in (0, 1))
    targets = torch.cat([r["targets"] for r in recordings])
    loss = functional.cross_entropy(a, targets) + b.square().mean()
    assert float(result.loss) == pytest.approx(loss.item(), rel=EXACT)
    assert result.metrics["accuracy"] == (a.argmax(-1) == targets).double().mean().item()
    assert result.metrics["size"] == pytest.approx(b.square().mean().item(), rel=EXACT)
    assert result.steps == sum(LENGTHS)


@pytest.mark.parametrize(
    "metric",
    [tt.metrics.Classification(2), tt.metrics.Regression(), torchmetrics.MeanSquaredError()],
    ids=["classes", "numbers", "torchmetrics"],
)
def test_a_metric_of_one_tensor_says_what_several_outputs_need(metric: Any) -> None:
    with pytest.raises(ModelError, match="this metric takes one tensor"):
        tt.evaluate(net_of("flat"), data(), metrics=metric)


def test_a_loss_of_torch_says_what_several_outputs_need() -> None:
    net, stream, loss_fn = net_of("flat"), tt.Stream(data(), 2, 4, seed=None), nn.MSELoss()
    for call in (
        lambda: next(tt.updates(net, stream, loss_fn, gradient=tt.Truncated(5))),
        lambda: tt.evaluate(net, data(), loss_fn),
    ):
        with pytest.raises(ModelError, match="several outputs, and this loss"):
            call()


@pytest.mark.parametrize("output", [(0, 0), [(0, 0), (0, 1)]])
def test_a_scalar_beside_is_neither_output_nor_state(output: Any) -> None:
    net = tt.carry(Penalty().double(), torch.randn(5, 2, 3, dtype=torch.float64), output=output)
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    outputs, _ = net(x, net.initial_state(2))
    theirs, _ = plain(net.module, x)
    close(outputs if isinstance(outputs, Tensor) else outputs[0], theirs[0])


@pytest.mark.parametrize(
    ("make", "output"),
    [(Flat, [0, 7]), (NamesAndState, ["a", "c"]), (Flat, [])],
)
def test_items_that_do_not_exist_are_named(make: Any, output: Any) -> None:
    with pytest.raises(ThroughtimeError, match="output"):
        tt.carry(make(), torch.randn(5, 2, 3), output=output)
