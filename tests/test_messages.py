"""Mistakes that many make first: each is a sentence of ours with the line to write.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient import Policy

STEPS = 40


class Tagger(nn.Module):
    """As a user writes it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.front = nn.Linear(features, features)
        self.rnn = nn.LSTM(features, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        y, state = self.rnn(self.front(x), state)
        return self.head(y), state


class Lit(lightning.LightningModule):
    """Of whose properties some raise without a trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 8)
        self.head = nn.Linear(8, 2)

    def init_hidden(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 8)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


def play(module: nn.Module, policy: Policy, targets: Tensor, loss_fn: nn.Module) -> None:
    torch.manual_seed(0)
    stream = tt.Stream({"inputs": torch.randn(STEPS, 3), "targets": targets}, 2, 10)
    list(tt.updates(tt.carry(module), stream, loss_fn, gradient=policy))


def test_a_lightning_module_is_carried() -> None:
    with pytest.raises(RuntimeError, match="Trainer"):
        _ = Lit().trainer
    module = Lit()
    net, x = tt.carry(module), torch.randn(5, 2, 3)
    y, _ = net(x, net.initial_state(2, like=x))
    hidden, expected = module.init_hidden(2), list[Tensor]()
    for row in x:
        out, hidden = module(row, hidden)
        expected.append(out)
    torch.testing.assert_close(y, torch.stack(expected))


@pytest.mark.parametrize("wrong", [lambda x: x, nn.GRU, None], ids=["function", "class", "none"])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_no_module_is_not_carried(wrong: Any, fused: bool) -> None:
    with pytest.raises(ModelError, match=r"expected a torch.nn.Module.*tt\.carry\(Net\(\)\)"):
        tt.carry(wrong, fused=fused)


WIDTHS: dict[str, Callable[[], nn.Module]] = {
    "cell": lambda: nn.GRUCell(5, 4),
    "own, a linear map": lambda: Tagger(5),
}


@pytest.mark.parametrize("make", list(WIDTHS.values()), ids=list(WIDTHS))
def test_inputs_of_another_width_are_named_with_that_of_the_net(
    make: Callable[[], nn.Module],
) -> None:
    with pytest.raises((DataError, ModelError)) as error:
        play(make(), tt.Truncated(10), torch.arange(STEPS) % 4, nn.CrossEntropyLoss())
    text = str(error.value) + str(getattr(error.value, "__notes__", ""))
    assert "have 3 features in each step, the net expects 5" in text


def test_a_layer_inside_that_does_not_fit_is_not_blamed_on_the_inputs() -> None:
    """Its outputs are as wide as the inputs of the net."""
    net = nn.Sequential(nn.GRU(3, 3), nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        play(net, tt.Truncated(10), torch.arange(STEPS) % 4, nn.CrossEntropyLoss())


@pytest.mark.filterwarnings("ignore:Using a target size")  # of torch, before the error
@pytest.mark.parametrize("policy", [tt.Truncated(10), tt.Exact(chunk=8)], ids=str)
def test_outputs_that_do_not_fit_the_targets_are_named(policy: Policy) -> None:
    net = nn.Sequential(nn.GRU(3, 8), nn.Linear(8, 2))
    with pytest.raises(ModelError, match=r"net has 2 outputs .* need 4, one for each class"):
        play(net, policy, torch.full((STEPS,), 3), nn.CrossEntropyLoss())
    with pytest.raises(ModelError, match=r"net has 2 outputs .* need 3, one for each .*column"):
        play(net, policy, torch.randn(STEPS, 3), nn.MSELoss())


WHOLE: list[tuple[str, Callable[[Any], Any]]] = [
    ("lanes", lambda n: tt.Stream(np.ones(60), n, 8)),
    ("chunk", lambda n: tt.Stream(np.ones(60), 1, n)),
    ("stride", tt.Truncated),
    ("horizon", lambda n: tt.Truncated(5, n)),
    ("burn_in", lambda n: tt.Truncated(5, burn_in=n)),
    ("cut_every", lambda n: tt.Exact(chunk=n, cut_every=n)),
    ("mean_horizon", tt.Randomized),
    ("grain", lambda n: tt.Randomized(100, grain=n)),
    ("min", lambda n: tt.Adaptive(0.5, n, 40)),
    ("max", lambda n: tt.Adaptive(0.5, 4, n)),
]


@pytest.mark.parametrize(("name", "make"), WHOLE)
def test_a_setting_is_a_whole_number_of_any_library(name: str, make: Callable[[Any], Any]) -> None:
    for number in (20, np.int64(20), np.uint8(20), torch.tensor(20)):
        value = getattr(make(number), name)
        assert (type(value), value) == (int, 20)
    for wrong in (20.0, np.float64(20), True, np.True_, "20"):
        with pytest.raises((ConfigError, DataError), match=r"=.*expected a whole number"):
            make(wrong)


def test_k1_and_k2_are_named_as_here() -> None:
    wrong: Any = tt.Truncated
    line = r"k1 is the stride, k2 the horizon: write tt.Truncated\(stride=20, horizon=40\)"
    with pytest.raises(ConfigError, match=line):
        wrong(k1=20, k2=40)
    with pytest.raises(TypeError, match="unexpected keyword argument 'k3'"):
        wrong(20, k3=40)
    policy = tt.Truncated(20, 40)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert replace(policy, stride=10) == tt.Truncated(10, 40)
