"""Fused updates of a net with modules before its layers equal updates with a graph.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from strategies import lawless
from test_fused_update import Seen, assert_same, by_graph, calls
from throughtime.carry import Carried
from throughtime.errors import ModelError

pytestmark = needs_kernels
__all__ = ["calls"]  # a fixture

WORDS, WIDTH, CLASSES = 11, 6, 4
POLICIES = [tt.Truncated(12), tt.Truncated(7, horizon=20)]


def embedding(**options: Any) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.Embedding(WORDS, WIDTH, **options)]


def half_frozen() -> list[nn.Module]:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.weight.requires_grad_(False)
    return [nn.Embedding(WORDS, WIDTH), linear]


def frozen() -> list[nn.Module]:
    return [nn.Embedding(WORDS, WIDTH).requires_grad_(False)]


def hooked() -> list[nn.Module]:
    table = nn.Embedding(WORDS, WIDTH)
    table.weight.register_hook(lambda gradient: 2 * gradient)
    return [table]


FRONTS: dict[str, Callable[[], list[nn.Module]]] = {
    "words": embedding(),
    "padded": embedding(padding_idx=3),
    "by frequency": embedding(scale_grad_by_freq=True),
    "renormed": embedding(max_norm=1.0),
    "sparse": embedding(sparse=True),
    "dropped": lambda: [nn.Embedding(WORDS, WIDTH), nn.Dropout(0.4)],
    "deep": lambda: [
        nn.Embedding(WORDS, WIDTH),
        nn.Linear(WIDTH, 8),
        nn.Tanh(),
        nn.LayerNorm(8),
        nn.Linear(8, WIDTH),
    ],
    "batch": lambda: [
        nn.Sequential(
            nn.Embedding(WORDS, WIDTH),
            nn.Flatten(0, 1),
            nn.BatchNorm1d(WIDTH),
            nn.Unflatten(0, (-1, 3)),
        )
    ],
    "half frozen": half_frozen,
    "frozen": frozen,
    "hooked": hooked,
}


def make(front: Callable[[], list[nn.Module]], *, tied: bool = False) -> Carried:
    torch.manual_seed(3)
    layers = [tt.nn.LSTM(WIDTH, 9), tt.nn.GRU(9, WIDTH)]
    net = nn.Sequential(*front(), *layers, nn.Linear(WIDTH, WORDS if tied else CLASSES)).double()
    if tied:
        net[0].weight = net[-1].weight
    carried = tt.carry(net)
    is_batch = any(isinstance(part, nn.BatchNorm1d) for part in net.modules())
    return lawless(carried, torch.randint(WORDS, (5, 3))) if is_batch else carried


def epoch(net: Carried, gradient: Any, *, zero: bool = True) -> Seen:
    torch.manual_seed(4)
    data = [
        {"inputs": torch.randint(WORDS, (n,)), "targets": torch.randint(CLASSES, (n,))}
        for n in (57, 23, 31, 40)
    ]
    seen = Seen([], [], [], [])
    for update in tt.updates(
        net, tt.Stream(data, lanes=3, chunk=16), nn.CrossEntropyLoss(), gradient=gradient
    ):
        seen.losses.append(update.loss)
        seen.outputs.append(update.outputs)
        seen.states.extend(leaf.clone() for leaf in tt.state.tensors(update.state))
        seen.gradients.extend(
            weight.grad.to_dense().clone() for weight in net.parameters() if weight.grad is not None
        )
        with torch.no_grad():
            for weight in net.parameters():
                if weight.grad is not None:
                    weight.sub_(0.05 * weight.grad.to_dense())
        if zero:
            net.zero_grad()
    return seen


@pytest.mark.covering
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("front", FRONTS)
def test_a_front_learns_what_the_graph_would_teach_it(
    front: str, policy: Any, zero: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = epoch(make(FRONTS[front]), policy, zero=zero)
    assert len(calls) == len(found.losses)
    by_graph(monkeypatch)
    assert_same(found, epoch(make(FRONTS[front]), policy, zero=zero), 1e-12)


@pytest.mark.parametrize("zero", [True, False])
def test_a_front_may_share_its_weights_with_the_readout(
    zero: bool, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = epoch(make(embedding(), tied=True), tt.Truncated(12), zero=zero)
    assert len(calls) == len(found.losses)
    by_graph(monkeypatch)
    assert_same(found, epoch(make(embedding(), tied=True), tt.Truncated(12), zero=zero), 1e-12)


class Own(nn.Module):
    """A module that is none of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_front_of_the_user_s_own_is_run_with_a_graph(calls: list[int]) -> None:
    epoch(make(lambda: [nn.Embedding(WORDS, WIDTH), Own()]), tt.Truncated(12))
    assert not calls


def test_words_that_are_not_there_are_refused_by_torch_and_nothing_is_written(
    calls: list[int],
) -> None:
    net = make(lambda: [nn.Embedding(WORDS - 4, WIDTH)])
    with pytest.raises(IndexError, match="index out of range"):
        epoch(net, tt.Truncated(12))
    assert not calls
    assert all(weight.grad is None for weight in net.parameters())


def test_a_front_that_gives_other_steps_on_its_way_is_refused_as_by_the_graph(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def front() -> list[nn.Module]:
        return [nn.Embedding(WORDS, WIDTH), nn.Flatten(0, 1), nn.Unflatten(0, (-1, 3))]

    with pytest.raises(ModelError, match=r"of this nn\.Sequential"):
        epoch(make(front), tt.Truncated(12))
    by_graph(monkeypatch)
    with pytest.raises(ModelError, match=r"of this nn\.Sequential"):
        epoch(make(front), tt.Truncated(12))
    assert not calls
