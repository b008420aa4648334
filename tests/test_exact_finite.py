"""Gradients that are not finite: refused, naming where they came from, or left to a scaler; and
going on after an error.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from policy_data import POLICIES, PolicyData, Tempered, every_policy, exact_updates
from strategies import FEATURES, HIDDEN, apart, gradients, named, recordings, remembering, weights
from throughtime.carry import Carried
from throughtime.chunk import Chunk, join
from throughtime.errors import RunError
from throughtime.gradient import Policy
from throughtime.updates import Updates

EXACT = 1e-10


class Roots(nn.Module):
    """`sqrt(|w x|)` has no gradient to `w` where x is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(FEATURES, HIDDEN)
        self.scale = nn.Parameter(torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn((self.scale * x).abs().sqrt())[0]


def rootless(*zeros: int) -> tt.Stream:
    """Recordings of 20 and 15 steps on one lane; the inputs are zero at some steps of the epoch."""
    results = recordings([20, 15], outputs=HIDDEN)
    for at in zeros:
        results[int(at >= 20)]["inputs"][at - 20 * (at >= 20)] = 0
    return tt.Stream(results, 1, 5, seed=None)


def faulty(
    zeros: Sequence[int] = (), inputs: Sequence[int] = (), targets: Sequence[int] = ()
) -> Chunk:
    """The same epoch; at some steps inputs are zero, or NaN, or targets are NaN."""
    epoch = join(list(rootless(*zeros)))
    assert epoch.targets is not None
    epoch.inputs[list(inputs)] = epoch.targets[list(targets)] = torch.nan
    return epoch


@pytest.mark.parametrize(
    ("policy", "steps", "recording", "before"),
    [
        (tt.Exact(chunk=4), "24 to 27", 1, 1),
        (tt.Exact(), "20 to 34", 1, 1),
        (tt.Exact(chunk=4, cut_every=10), "24 to 27", 1, 2),
    ],
    ids=repr,
)
def test_gradient_that_is_not_finite_is_refused_naming_where_it_came_from(
    policy: tt.Exact, steps: str, recording: int, before: int
) -> None:
    net = tt.carry(remembering(Roots()))
    updates = tt.updates(net, rootless(27), nn.MSELoss(), gradient=policy)
    for _ in range(before):
        next(updates)
    kept, own = (gradients(net), weights(net)), [p.grad for p in net.parameters()]
    where = (
        rf"in the chunk of steps {steps} of the epoch \(recording {recording}\), whose part of the"
        r" loss is [0-9.]+\."
    )
    with pytest.raises(
        RunError,
        match=(
            rf"the gradient of 'scale' is not finite \(NaN or infinite\) {where} `\.grad` and the"
            r" weights are unchanged"
        ),
    ):
        next(updates)
    assert apart(gradients(net), kept[0]) == apart(weights(net), kept[1]) == 0
    assert all(p.grad is g for p, g in zip(net.parameters(), own, strict=True))


@pytest.mark.parametrize(
    ("epoch", "steps", "loss"),
    [
        (faulty([2, 13]), "12 to 15", "[0-9.]+"),
        (faulty([13, 18]), "12 to 15", "[0-9.]+"),
        (faulty(targets=[7, 13]), "4 to 7", "nan"),
        (faulty([17], targets=[6]), "4 to 7", "nan"),
        (faulty([2], targets=[9, 13]), "8 to 11", "nan"),
        (faulty(inputs=[6]), "4 to 7", "nan"),
        (faulty([17, 25], targets=[29], inputs=[31]), "16 to 19", "[0-9.]+"),
    ],
    ids=[
        "gradients",
        "gradients of the last two segments, of which the last keeps its graph",
        "losses",
        "loss before gradient",
        "losses after gradient",
        "state from there on",
        "of the first update",
    ],
)
def test_chunk_named_is_the_first_with_such_a_loss_else_the_last_with_such_a_gradient(
    epoch: Chunk, steps: str, loss: str
) -> None:
    """A loss that is no number began the trouble.

    Else the gradient did, on its way back from the end.
    """
    net = tt.carry(remembering(Roots()))
    with pytest.raises(
        RunError,
        match=rf"in the chunk of steps {steps} of the epoch .*, whose part of the loss is {loss}\.",
    ):
        list(tt.updates(net, [epoch], nn.MSELoss(), gradient=tt.Exact(chunk=4)))
    assert all(p.grad is None for p in net.parameters())


class RootsBetween(nn.Module):
    """Its first and its last weight have a finite gradient where the inputs are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(FEATURES, HIDDEN)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(x, state)
        return self.head(y) + (self.scale * x).abs().sqrt().sum(2, keepdim=True), state


@every_policy
def test_every_weight_is_checked_and_gradients_are_as_before(policy: Policy) -> None:
    net = tt.carry(RootsBetween().double())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    own = [p.grad for p in net.parameters()]
    with pytest.raises(RunError, match="the gradient of 'scale' is not finite"):
        list(tt.updates(net, rootless(2), nn.MSELoss(), gradient=policy))
    for p, grad in zip(net.parameters(), own, strict=True):
        assert p.grad is grad
        assert grad is not None
        assert (grad == 1).all()


class Rooted(Tempered):
    """The root of a weight that is zero: the loss is finite, its gradient is not."""

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (y - t).square().mean() + (self.temperature - 1).sqrt()


@pytest.mark.parametrize(
    ("name", "steps"),
    [("exact", "24 to 27"), ("segments", "4 to 7"), ("truncated", "0 to 9")],
)
def test_weight_of_the_loss_is_named_as_such(name: str, steps: str) -> None:
    net, data, loss_fn = named("hides-layer").net(), PolicyData.draw(30, 2, 0), Rooted()
    with pytest.raises(
        RunError,
        match=(
            r"the gradient of 'loss_fn\.temperature' is not finite .* in the chunk of steps"
            rf" {steps} of"
        ),
    ):
        list(tt.updates(net, [data.chunk], loss_fn, gradient=POLICIES[name]))
    assert all(p.grad is None for p in (*net.parameters(), *loss_fn.parameters()))


def test_finite_segments_whose_sum_is_not_are_refused() -> None:
    net, x = (
        tt.carry(nn.Sequential(nn.RNN(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1))),
        torch.randn(8, 1, FEATURES),
    )
    chunk = Chunk.from_tensors(x, torch.zeros(8, 1))
    with pytest.raises(RunError, match=r"the gradient of .* is not finite"):
        list(
            tt.updates(
                net, [chunk], lambda y, _: y.mean() * 1e20 * 1e18 * 6, gradient=tt.Exact(chunk=4)
            )
        )
    assert all(p.grad is None for p in net.parameters())


ENDED = (
    r"these updates ended with an error in the middle of a step: .*tt\.updates\(\.\.\.\), or from a"
    r" saved position with load_state_dict"
)


def test_nobody_goes_on_from_a_state_that_stayed_behind() -> None:
    """After a refusal the stream has moved on, and the state has not."""
    net = tt.carry(remembering(Roots()))
    updates = tt.updates(net, rootless(7), nn.MSELoss(), gradient=tt.Exact(chunk=4, cut_every=10))
    with pytest.raises(RunError, match="in the chunk of steps 4 to 7"):
        next(updates)
    for _ in range(2):
        with pytest.raises(RunError, match=ENDED):
            next(updates)
    with pytest.raises(RunError, match="in the chunk of steps 4 to 7"):
        list(tt.updates(net, rootless(7), nn.MSELoss(), gradient=tt.Exact(chunk=4, cut_every=10)))


@every_policy
def test_saved_place_is_gone_on_from_after_an_error(policy: Policy) -> None:
    """As if there had been none; an error of the user's own is one as well."""
    failing = [False]

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        if failing[0]:
            raise ArithmeticError("the user's own")
        return nn.functional.mse_loss(y, t)

    def begun() -> tuple[Carried, Updates]:
        net = named("hides-layer").net()
        torch.manual_seed(3)
        return net, tt.updates(net, tt.Stream(recordings([31, 20]), 1, 8), loss_fn, gradient=policy)

    (net, updates), (through, undisturbed) = begun(), begun()
    next(updates)
    random = torch.get_rng_state()
    place = updates.state_dict()
    failing[0] = True
    with pytest.raises(ArithmeticError, match="the user's own"):
        next(updates)
    failing[0] = False
    with pytest.raises(RunError, match=ENDED):
        next(updates)
    updates.load_state_dict(place)
    torch.set_rng_state(random)
    rest = list(updates)
    torch.manual_seed(3)
    assert [u.loss.item() for u in rest] == [u.loss.item() for u in list(undisturbed)[1:]]
    assert apart(gradients(net), gradients(through)) == 0


@pytest.mark.parametrize("epoch", [rootless(7), [faulty(targets=[7])]], ids=["gradient", "loss"])
@pytest.mark.parametrize("policy", [tt.Exact(chunk=4), tt.Exact()], ids=["segments", "whole"])
def test_scaler_decides_itself_about_values_that_are_not_finite(epoch: Any, policy: Policy) -> None:
    net = tt.carry(remembering(Roots()))
    scaler, optimizer = (
        torch.amp.GradScaler("cpu", init_scale=2.0**7),
        torch.optim.SGD(net.parameters(), lr=0.1),
    )
    before, changed = weights(net), list[bool]()
    for _ in tt.updates(net, epoch, nn.MSELoss(), gradient=policy, scaler=scaler):
        scaler.step(optimizer)
        scaler.update()
        changed.append(apart(weights(net), before) > 0)
        optimizer.zero_grad()
    assert changed == [False, True]
    assert scaler.get_scale() == 2.0**6


def test_scaler_scales_the_gradient_and_not_the_loss() -> None:
    data, scaler = (
        PolicyData.draw(23, 2, 0, masked=0.3),
        torch.amp.GradScaler("cpu", init_scale=2.0**7),
    )
    usual, scaled = named("hides-layer").net(), named("hides-layer").net()
    (first,), (second,) = exact_updates(usual, data), exact_updates(scaled, data, scaler=scaler)
    assert torch.equal(first.loss, second.loss)
    assert (
        apart({name: g / 2.0**7 for name, g in gradients(scaled).items()}, gradients(usual)) < EXACT
    )
    assert apart(gradients(scaled), gradients(usual)) > 1e-3


NONFINITE_LOSS: dict[str, Callable[[], Policy]] = {
    **{name: lambda policy=policy: policy for name, policy in POLICIES.items()},
    "whole": tt.Exact,
    "adaptive": lambda: tt.Adaptive(0.5, min=5, max=10, probe=20),
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layer", [nn.GRU, tt.nn.GRU], ids=["graph", "fused"])
@pytest.mark.parametrize(
    ("name", "accumulate"),
    # the updates of Randomized are not means, and are not accumulated
    [(name, n) for name in NONFINITE_LOSS for n in (1, 2) if (name, n) != ("randomized", 2)],
)
def test_loss_that_is_not_finite_is_refused_before_the_step(
    name: str, layer: Any, dtype: torch.dtype, accumulate: int
) -> None:
    """The square of a huge target is infinite, its gradient is not."""
    data = recordings([40, 40], outputs=1)
    for recording in data:
        recording["inputs"], recording["targets"] = (
            torch.tensor(recording[key], dtype=dtype) for key in ("inputs", "targets")
        )
    data[1]["targets"][23] = torch.finfo(dtype).max ** 0.5 * 100
    net = tt.carry(nn.Sequential(layer(FEATURES, HIDDEN), nn.Linear(HIDDEN, 1)).to(dtype))
    optimizer, before = torch.optim.SGD(net.parameters(), 0.01), weights(net)
    updates = tt.updates(
        net,
        tt.Stream(data, 2, 8, seed=None),
        nn.MSELoss(),
        gradient=NONFINITE_LOSS[name](),
        accumulate=accumulate,
    )

    def train() -> None:
        for _ in updates:
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(RunError) as refusal:
        train()
    assert apart(weights(net), before) < 1  # no step of the huge gradient
    message = str(refusal.value)
    ((first, last, recording),) = re.findall(
        r"steps (\d+) to (\d+) .*\(recording ([\d, ]+)\)", message
    )
    assert message.startswith("the loss is not finite")
    assert "whose part of the loss is inf" in message
    assert int(first) <= 23 <= int(last)
    if next(net.parameters()).is_cpu:
        assert recording == "1"
    else:  # where the outputs of a segment are gone, all recordings of its steps are named
        assert "1" in recording.split(", ")
