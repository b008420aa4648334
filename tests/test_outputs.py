"""Nets of several outputs, as people write them: equal to plain loops in values and gradients.

The reference plays the layers of a module step by step, lane by lane, and knows neither the ways
of calling a module nor policies. Every net has two outputs of the same hidden units: `a`
`(T, B, 2)`, and `b` `(T, B)` without a dimension of features.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import throughtime as tt
from throughtime.carry import Carried
from throughtime.errors import ModelError, ThroughtimeError

EXACT = 1e-10
LENGTHS = 13, 8, 5


class Heads(nn.Module):
    """Layers of all nets; subclasses differ in what they take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4)
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 1)

    def heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(hidden), self.second(hidden)[..., 0]


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


class Penalty(Heads):
    """A scalar beside, which is no output."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Any:
        hidden, h = self.layer(x, h)
        return self.heads(hidden), h, hidden.square().mean()


class Style(NamedTuple):
    make: Callable[[], Heads]
    output: Any = "all"
    named: bool = False


STYLES: dict[str, Style] = {
    "flat": Style(Flat),
    "names and state": Style(NamesAndState, named=True),
    "nested by paths": Style(Nested, [(0, "heads", "a"), (0, "rest", 0)]),
}


def net_of(style: str) -> Carried:
    torch.manual_seed(1)
    return tt.carry(STYLES[style].make().double(), output=STYLES[style].output)


def pair(outputs: Any) -> tuple[Tensor, Tensor]:
    """Outputs `a` and `b` of a structure."""
    return (outputs["a"], outputs["b"]) if isinstance(outputs, dict) else outputs[:2]


def data() -> list[dict[str, Tensor]]:
    torch.manual_seed(2)
    return [
        {
            "inputs": torch.randn(n, 3, dtype=torch.float64),
            "targets": torch.randint(2, (n,)),
        }
        for n in LENGTHS
    ]


def test_losses_of_an_evaluation_get_the_structure() -> None:
    net, recordings = net_of("names and state"), data()

    def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
        a, b = pair(outputs)
        return functional.cross_entropy(a, targets) + b.square().mean()

    result = tt.evaluate(net, recordings, loss_fn)
    both = [plain(net.module, r["inputs"][:, None]) for r in recordings]
    a, b = (torch.cat([outputs[i][:, 0].detach() for outputs in both]) for i in (0, 1))
    loss = loss_fn((a, b), torch.cat([r["targets"] for r in recordings]))
    assert float(result.loss) == pytest.approx(loss.item(), rel=EXACT)


def plain(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of inputs `(T, B, 3)`."""
    h, hidden = torch.zeros(1, x.shape[1], 4, dtype=torch.float64), list[Tensor]()
    for step in x:
        h = module.layer(step[None], h)[0]
        hidden.append(h[0])
    return module.heads(torch.stack(hidden))


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("style", STYLES)
def test_predictions_have_the_structure(style: str) -> None:
    net, recording = net_of(style), data()[0]
    x = recording["inputs"]
    theirs = plain(net.module, torch.cat([x, x])[:, None])
    outputs, state = tt.predict(net, recording, chunk=5)
    more, _ = tt.predict(net, recording, state=state, chunk=5)
    assert isinstance(outputs, dict if STYLES[style].named else tuple)
    for ours, after, their in zip(pair(outputs), pair(more), theirs, strict=True):
        close(torch.cat([ours, after]), their.detach()[:, 0])


def test_losses_and_metrics_of_one_tensor_say_what_several_outputs_need() -> None:
    with pytest.raises(ModelError, match="this metric takes one tensor"):
        tt.evaluate(net_of("flat"), data(), metrics=tt.metrics.Classification(2))
    net, stream, loss_fn = net_of("flat"), tt.Stream(data(), 2, 4, seed=None), nn.MSELoss()
    for call in (
        lambda: next(tt.updates(net, stream, loss_fn, gradient=tt.Truncated(5))),
        lambda: tt.evaluate(net, data(), loss_fn),
    ):
        with pytest.raises(ModelError, match="several outputs, and this loss"):
            call()


def test_a_scalar_beside_is_neither_output_nor_state() -> None:
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    net = tt.carry(Penalty().double(), x, output=(0, 0))
    close(net(x, net.initial_state(2))[0], plain(net.module, x)[0])
    with pytest.raises(ThroughtimeError, match="output"):
        tt.carry(Flat(), torch.randn(5, 2, 3), output=[0, 7])
