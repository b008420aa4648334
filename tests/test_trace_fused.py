"""The trace of fused layers, against plain autograd over an unrolled loop.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden.
"""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from recurrences import needs_kernels
from strategies import inputs
from test_trace import EXACT, LANES, STEPS, called, every_kind, layer, states_for
from throughtime.diagnose.trace import trace
from throughtime.kernels.dispatch import Backend
from throughtime.nn import layers

pytestmark = needs_kernels


def fused(net: nn.RNNBase) -> nn.RNNBase:
    return tt.fuse(copy.deepcopy(net))


def reset_at(often: float = 0.25) -> Tensor:
    """Some lanes begin anew in the midst, one with the first step."""
    resets = torch.rand(STEPS, LANES, generator=torch.Generator().manual_seed(1)) < often
    resets[0] = torch.tensor([True, False, False])
    resets[1:, 2] = False
    return resets


@pytest.mark.covering
@every_kind
@pytest.mark.parametrize("runs", ["fused", "torch.nn"])
def test_no_gradient_crosses_a_reset(kind: str, runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each stretch between resets had been played alone, by torch's layer."""
    if runs == "torch.nn":  # as in half precision, or where the kernels are missing
        monkeypatch.setattr(layers, "choose", lambda *_: Backend("torch.nn", "for this test"))
    plain = layer(kind)
    net, x, states, resets = fused(plain), inputs(STEPS, LANES), states_for(plain), reset_at()

    def loss(y: Tensor, after: Any) -> Tensor:
        ends = after if isinstance(after, tuple) else (after,)
        return (y**3).sum() + sum((leaf * leaf).sum() for leaf in ends)

    with trace(net) as results:
        loss(*net(x, states if kind == "lstm" else states[0], resets)).backward()
    edge = torch.as_tensor(states[0].grad).norm(dim=-1)[0]
    torch.testing.assert_close(results.last.edges["layer0.h"], edge, rtol=1e-12, atol=0)
    for lane in range(LANES):
        starts = [0, *[t for t in range(1, STEPS) if resets[t, lane]], STEPS]
        for start, stop in pairwise(starts):
            fresh = start > 0 or bool(resets[0, lane])
            own = tuple(s[:, lane : lane + 1].detach() * (not fresh) for s in states)
            with trace(plain) as alone:
                y, after = called(plain, x[start:stop, lane : lane + 1], own)
                loss(y, after if stop == STEPS else ()).backward()
            assert alone.names == results.names
            for name in alone.names:
                apart = results[name][start:stop, lane] - alone[name][:, 0]
                assert apart.abs().max() < EXACT
