"""The trace around whole loops: every policy of `tt.updates`.

Shapes: `T` steps, `B` lanes.
"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from policy_data import PolicyData
from strategies import (
    HIDDEN,
    TensorState,
    apart,
    gradients,
    inputs,
    named,
    recordings,
    some_nets,
    start,
)
from throughtime.carry import Carried
from throughtime.diagnose.trace import Trace, trace
from throughtime.gradient import Policy

EXACT = 1e-12
STRIDE, LANES = 10, 2
POLICIES: dict[str, Policy] = {
    "truncated": tt.Truncated(STRIDE),
    "horizon": tt.Truncated(STRIDE, horizon=25),
    "exact": tt.Exact(chunk=7),
    "adaptive": tt.Adaptive(tolerance=0.1, min=STRIDE, max=40),
    "randomized": tt.Randomized(mean_horizon=STRIDE, alpha=4),
}
CARRIED = some_nets("hides-layer", "hides-cell")


def stream(*lengths: int) -> tt.Stream:
    return tt.Stream(recordings(lengths), lanes=LANES, chunk=STRIDE, dtype=torch.float64)


def trained(net: Carried, policy: Policy) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of an epoch, and the weights after it."""
    torch.manual_seed(3)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.01), list[Tensor]()
    for update in tt.updates(net, stream(63, 41), nn.MSELoss(), gradient=policy):
        losses.append(update.loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: weight.detach().clone() for name, weight in net.named_parameters()}


@pytest.mark.covering
@CARRIED
@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_the_same_traced(row: Any, policy: str) -> None:
    nets = row.net(), row.net()
    nets[1].load_state_dict(nets[0].state_dict())
    losses, weights = trained(nets[0], POLICIES[policy])
    with trace(nets[1]) as results:
        traced, after = trained(nets[1], POLICIES[policy])
    assert len(losses) == len(traced) > 0
    assert torch.equal(losses[0], traced[0])
    assert max((a - b).abs().item() for a, b in zip(losses, traced, strict=True)) < EXACT
    assert apart(after, weights) < EXACT
    assert all(results[name].isfinite().all() for name in results.names)


def expected(
    net: Carried, data: PolicyData, counted: int, stop: int, state: Any = None
) -> dict[str, Tensor]:
    """Norms of one plain graph over the first steps of `data`; mean loss from `counted` on."""
    with trace(net) as results:
        y, _ = net(
            data.x[:stop], start(net, data.x) if state is None else state, data.resets[:stop]
        )
        nn.MSELoss()(y[counted:].flatten(0, 1), data.targets[counted:stop].flatten(0, 1)).backward()
    net.zero_grad()
    return {name: results[name] for name in results.names}


def furthest(results: Trace, wanted: dict[str, Tensor]) -> float:
    assert set(results.names) == set(wanted)
    return max((results[name] - norms).abs().max().item() for name, norms in wanted.items())


@CARRIED
def test_a_window_of_several_strides_is_one_pass(row: Any) -> None:
    net, data = row.net(), PolicyData.draw(30, LANES, 0, resets=0.1)
    with trace(net, keep=3) as results:
        for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(10, horizon=30)):
            net.zero_grad()
    assert len(results.passes) == results.count == 3
    assert furthest(results, expected(net, data, 20, 30)) < EXACT


@CARRIED
def test_the_pieces_of_a_sweep_are_one_pass(row: Any) -> None:
    """`tt.Exact` runs backward passes within one, the last piece first: all are that one."""
    net, data = row.net(), PolicyData.draw(45, LANES, 0, resets=0.03)
    with trace(net, keep=9) as results:
        for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=7)):
            net.zero_grad()
    wanted = expected(net, data, 0, 45)
    assert len(results.passes) == 1
    assert furthest(results, wanted) < EXACT


class Turning(nn.Module):
    """Calls a cell of its own once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = TensorState().double()

    def initial_state(self, lanes: int) -> Tensor:
        return self.cell.turn.new_zeros(lanes, HIDDEN)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs: list[Tensor] = []
        for step in x.split(1):
            y, state = self.cell(step, state)
            outputs.append(y)
        return torch.cat(outputs), state


def test_the_pieces_of_a_cell_of_ones_own_are_one_pass() -> None:
    module, data = Turning(), PolicyData.draw(30, LANES, 0)
    net, cell = tt.carry(module), module.cell
    with trace(net, names={"cell": ("_", "h")}) as results:
        for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Exact(chunk=7)):
            net.zero_grad()
    hidden, h = list[Tensor](), module.initial_state(LANES)
    for step in data.x:
        h = h @ cell.turn + step @ cell.into
        hidden.append(h)
    loss = nn.MSELoss()(cell.read(torch.stack(hidden)).flatten(0, 1), data.targets.flatten(0, 1))
    norms = torch.stack(torch.autograd.grad(loss, hidden)).norm(dim=2)
    assert (results["cell.h"] - norms).abs().max() < EXACT


def test_strides_that_follow_one_another_are_passes_of_their_own() -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(40, LANES, 0)
    with trace(net, keep=9) as results:
        for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=tt.Truncated(10)):
            net.zero_grad()
    assert [len(one.norms["lstm.layer0.h"]) for one in results.passes] == [10, 10, 10, 10]


def test_a_state_that_stands_still_does_not_join_what_was_cut() -> None:
    """Every chunk ends in its first state, so states alone suggest that each follows the next."""
    net, data = nn.RNN(3, HIDDEN).double(), PolicyData.draw(40, LANES, 0)
    for name, weight in net.named_parameters():
        nn.init.constant_(weight, 0.3 if name == "bias_ih_l0" else 0.0)
    carried = tt.carry(net)
    with trace(net, keep=9) as results:
        for _ in tt.updates(
            carried,
            [data.chunk],
            lambda y, t: (y[:, :2] - t).square().mean(),
            gradient=tt.Truncated(10),
        ):
            carried.zero_grad()
    assert [len(one.norms["layer0.h"]) for one in results.passes] == [10, 10, 10, 10]


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@CARRIED
def test_many_updates_hold_no_more_than_a_few(row: Any) -> None:
    net, x, alive = row.net(), inputs(12, LANES), list[int]()
    with trace(net, keep=2):
        for round_ in range(30):
            y, _ = net(x, start(net, x))
            y.square().mean().backward()
            net.zero_grad()
            del y
            alive += [tensors_alive()] if round_ in (5, 29) else []
    assert (
        alive[1] <= alive[0]
    )  # what other tests left behind may go meanwhile; a tensor for each round would be 24 more


def test_a_checkpointed_net_is_seen_as_it_is() -> None:
    from torch.utils.checkpoint import checkpoint

    lstm, x = nn.LSTM(3, HIDDEN).double(), inputs(20, LANES)

    def run(recomputed: bool) -> dict[str, Tensor]:
        lstm.zero_grad()
        with trace(lstm) as results:
            outputs, state = (
                list[Tensor](),
                (torch.zeros(1, LANES, HIDDEN, dtype=torch.float64),) * 2,
            )
            for part in x.split(5):
                y, state = (
                    checkpoint(lstm, part, state, use_reentrant=False)
                    if recomputed
                    else lstm(part, state)
                )
                outputs.append(y)
            torch.cat(outputs).square().mean().backward()
        return {name: results[name] for name in results.names} | gradients(lstm)

    plain, recomputed = run(False), run(True)
    assert apart(recomputed, plain) < EXACT
