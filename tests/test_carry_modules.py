"""Modules as their authors write them are carried as their authors call them, or refused.

Every module of the corpus in `modules` has an oracle in plain torch. Shapes: `T` steps, `B` lanes.
"""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from modules import CASES
from modules.case import Case
from modules.check import build, error, errors, gradients, lengths_of, restarted

EXACT, FUSED = 1e-12, 1e-6
# Two sequences through one layer: the text of the refusal is tested below.
TWO_SEQUENCES = "shared_layer_twice"
CARRIED = [c for c in CASES if c.verdict != "refuse" and c.name != TWO_SEQUENCES]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def rows(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in cases])


def with_features(x: Tensor) -> Tensor:
    """Numbers `(T, B)` as a stream delivers them, `(T, B, 1)`."""
    return x.unsqueeze(-1) if x.dim() == 2 and x.is_floating_point() else x


def carry(case: Case, module: nn.Module, x: Tensor, **options: Any) -> tt.Carried:
    """Carry a module in training mode, as a training loop does, then evaluate."""
    net = tt.carry(module.train(), **case.keywords, **options)
    net.prepare(with_features(x))
    module.eval()
    return net


@cache
def carried(case: Case) -> tuple[tt.Carried, nn.Module, Tensor]:
    """The carried module, the same module by itself, and a stream."""
    module, x = build(case)
    return carry(case, module, x), build(case)[0], x


def play(net: tt.Carried, x: Tensor, lengths: list[int], resets: Tensor | None = None) -> Tensor:
    """The outputs `(T, B, C)` in chunks, with the state carried."""
    x = with_features(x)
    state, outputs = net.initial_state(x.shape[1], like=x), list[Tensor]()
    starts = [None] * len(lengths) if resets is None else resets.split(lengths)
    for part, flags in zip(x.split(lengths), starts, strict=True):
        y, state = net(part, state, flags)
        outputs.append(y)
    return torch.cat(outputs)


def flat(y: Tensor) -> Tensor:
    return y.reshape(*y.shape[:2], -1)


class Expected:
    """The outputs of an oracle and their gradients."""

    def __init__(self, module: nn.Module, y: Tensor) -> None:
        self.y = flat(y)
        self.grads = gradients(self.y, module)

    def deviation(self, net: tt.Carried, y: Tensor) -> float:
        """The largest difference of outputs and gradients."""
        y = flat(y)
        if y.shape != self.y.shape:
            return float("inf")
        return max(error(y, self.y), errors(gradients(y, net.module), self.grads))


@rows(CARRIED)
def test_a_module_computes_what_its_author_computes(case: Case) -> None:
    net, alone, x = carried(case)
    expected = Expected(alone, case.oracle(alone, x, [len(x)]))
    for lengths in lengths_of(len(x)):
        assert expected.deviation(net, play(net, x, lengths)) <= EXACT, lengths


@rows(CARRIED)
def test_resets_give_separate_recordings(case: Case) -> None:
    net, alone, x = carried(case)
    resets = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(3)) < 0.3
    expected = Expected(alone, restarted(case, alone, x, resets))
    for lengths in lengths_of(len(x)):
        assert expected.deviation(net, play(net, x, lengths, resets)) <= EXACT, lengths


@rows([case for case in CARRIED if case.done is not None])
def test_resets_reach_the_module_as_its_author_passes_them(case: Case) -> None:
    assert case.done is not None
    net, alone, x = carried(case)
    resets = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(4)) < 0.3
    expected = Expected(alone, case.done(alone, x, resets))
    for lengths in lengths_of(len(x)):
        assert expected.deviation(net, play(net, x, lengths, resets)) <= EXACT, lengths


@rows([case for case in CARRIED if any(isinstance(m, nn.RNNBase) for m in case.make().modules())])
def test_a_fused_module_computes_the_same_in_float32(case: Case) -> None:
    """Deviations are relative to the largest number, from the oracle in float64."""
    module, x = build(case)
    alone = build(case)[0]
    expected = Expected(alone, case.oracle(alone, x, [len(x)]))
    torch.set_default_dtype(torch.float32)
    x = x.float() if x.is_floating_point() else x
    net = carry(case, module.float(), x, fused=True)
    assert expected.deviation(net, play(net, x, lengths_of(len(x))[1])) <= FUSED


def attributes_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """All that the parts of a module hold, but for hooks that are registered."""
    return {
        name: {key: value for key, value in vars(part).items() if "hook" not in key}
        | {f"_buffers.{key}": value for key, value in part._buffers.items()}
        for name, part in module.named_modules()
    }


@rows(CARRIED)
def test_the_module_of_a_carried_net_is_unchanged(case: Case) -> None:
    module, x = build(case)
    module.train()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    before, modes = attributes_of(module), [part.training for part in module.modules()]
    torch_draws, draws = torch.get_rng_state(), random.getstate()
    net = tt.carry(module, with_features(x), **case.keywords)
    net.initial_state(x.shape[1])
    assert torch.equal(torch.get_rng_state(), torch_draws)
    assert random.getstate() == draws
    assert [part.training for part in module.modules()] == modes
    for name, values in attributes_of(module).items():
        assert values.keys() == before[name].keys(), name
        for key, value in values.items():
            old = before[name][key]
            assert value is old or value == old, f"{name}.{key}"
    module.eval()
    play(net, x, lengths_of(len(x))[1])
    assert module.state_dict().keys() == weights.keys()
    assert all(torch.equal(v, weights[name]) for name, v in module.state_dict().items())


@rows(CARRIED)
def test_the_module_of_a_carried_net_works_by_itself(case: Case) -> None:
    net, alone, x = carried(case)
    play(net, x, lengths_of(len(x))[1])
    expected = Expected(alone, case.oracle(alone, x, [len(x)]))
    assert expected.deviation(net, case.oracle(net.module, x, [len(x)])) <= EXACT
