"""Wrong shapes never reach the fused kernel, which checks none: torch raises its own error."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from test_fused_update import calls, epoch, make, recordings
from throughtime.carry import Carried
from throughtime.errors import ModelError, StateError

pytestmark = needs_kernels
__all__ = ["calls"]  # a fixture


def other_inputs(net: Carried) -> None:
    layer = next(net.module.children())
    layer.weight_ih_l0 = nn.Parameter(torch.randn(36, 7, dtype=torch.float64))


def other_classes(net: Carried) -> None:
    list(net.module.children())[-1].weight = nn.Parameter(torch.randn(3, 9, dtype=torch.float64))


def other_units(net: Carried) -> None:
    next(net.module.children()).weight_hh_l0.data = torch.randn(20, 5, dtype=torch.float64)


@pytest.mark.parametrize("change", [other_inputs, other_classes, other_units])
def test_sizes_that_do_not_fit_never_reach_the_kernel(
    change: Callable[[Carried], None], calls: list[int]
) -> None:
    net = make("lstm")
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    before = len(calls)
    change(net)
    with pytest.raises((RuntimeError, ValueError)):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert len(calls) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 10), ("num_layers", 2), ("batch_first", True), ("mode", "GRU")],
)
def test_a_layer_that_says_it_is_another_never_reaches_the_kernel(
    name: str, value: Any, calls: list[int]
) -> None:
    net = make("lstm")
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    before = len(calls)
    setattr(next(net.module.children()), name, value)
    with contextlib.suppress(RuntimeError, ValueError, IndexError):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert len(calls) == before


@pytest.mark.parametrize("child", [0, 1])
def test_a_child_that_was_replaced_is_refused_and_not_the_one_before_trained(
    child: int, calls: list[int]
) -> None:
    net = make("lstm")
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    before = len(calls)
    children = cast(nn.Sequential, net.module)
    children[child] = copy.deepcopy(children[child])
    with pytest.raises(ModelError, match="was replaced after"):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    with pytest.raises(ModelError, match="was replaced after"):
        tt.predict(net, torch.randn(5, 5, dtype=torch.float64))
    assert len(calls) == before


class EverySecond(nn.Module):
    """Prepares the inputs, and drops half of them."""

    def __init__(self, of: int) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return x[::2] if self.of == 0 else x[:, ::2]


@pytest.mark.parametrize("of", [0, 1])
def test_inputs_that_lose_steps_or_lanes_never_reach_the_kernel(of: int, calls: list[int]) -> None:
    net = tt.carry(nn.Sequential(EverySecond(of), tt.nn.GRU(5, 9), nn.Linear(9, 4)).double())
    with pytest.raises((ModelError, StateError, RuntimeError)):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert not calls


def test_a_gradient_of_another_size_never_reaches_the_kernel(calls: list[int]) -> None:
    net = make("lstm")
    epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12), zero=False)
    small = torch.as_tensor(next(net.parameters()).grad).resize_(3)
    before = small.clone()
    with pytest.raises(RuntimeError, match="must match the size"):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert calls
    assert torch.equal(small, before)


@pytest.mark.parametrize("widths", [(5, 9, 8), (4, 9, 9), (5, 8, 9)])
def test_layers_that_do_not_fit_each_other_never_reach_the_kernel(
    widths: tuple[int, int, int], calls: list[int]
) -> None:
    inputs, hidden, read = widths
    net = tt.carry(
        nn.Sequential(tt.nn.GRU(inputs, 9), tt.nn.GRU(hidden, 9), nn.Linear(read, 4))
    ).double()
    with pytest.raises((RuntimeError, ValueError)):
        epoch(net, nn.CrossEntropyLoss(), tt.Truncated(12))
    assert not calls


def states(net: Carried) -> dict[str, Any]:
    h, c = net.initial_state(lanes=3)["0"]
    return {
        "lanes": (h[:2], c[:2]),
        "units": (h[..., :4], c[..., :4]),
        "alone": h,
        "layers": (h.repeat(1, 3, 1), c.repeat(1, 3, 1)),
    }


@pytest.mark.parametrize("which", ["lanes", "units", "alone", "layers"])
def test_a_state_that_does_not_fit_never_reaches_the_kernel(which: str, calls: list[int]) -> None:
    net = make("lstm")
    stream = tt.Stream(
        recordings(torch.float64, 4, regress=False), lanes=3, chunk=16, dtype=torch.float64
    )
    stream._start()
    updates = tt.updates(
        net,
        stream,
        nn.CrossEntropyLoss(),
        gradient=tt.Truncated(12),
        state={"0": states(net)[which], "1": ()},
    )
    with pytest.raises((RuntimeError, ValueError, AttributeError)):
        next(updates)
    assert not calls
