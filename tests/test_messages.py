"""Mistakes that many make first: each is a sentence of ours with the line to write.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import ConfigError, DataError, ModelError
from throughtime.gradient import Policy

STEPS = 40


def play(module: nn.Module, policy: Policy, targets: Tensor, loss_fn: nn.Module) -> None:
    torch.manual_seed(0)
    stream = tt.Stream({"inputs": torch.randn(STEPS, 3), "targets": targets}, 2, 10)
    list(tt.updates(tt.carry(module), stream, loss_fn, gradient=policy))


@pytest.mark.parametrize("wrong", [lambda x: x, nn.GRU, None], ids=["function", "class", "none"])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_no_module_is_not_carried(wrong: Any, fused: bool) -> None:
    with pytest.raises(ModelError, match=r"expected a torch.nn.Module.*tt\.carry\(Net\(\)\)"):
        tt.carry(wrong, fused=fused)


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
    ("cut_every", lambda n: tt.Exact(chunk=n, cut_every=n)),
    ("mean_horizon", tt.Randomized),
    ("min", lambda n: tt.Adaptive(0.5, n, 40)),
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
