"""Memory that stays flat, and graphs that go: exact gradients, rollouts and measurements.

Shapes: `T` steps, `B` lanes, `H` hidden.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples.policies.rtrl import RTRL
from torch import Tensor, nn

import throughtime as tt
from policy_data import allocated, big
from strategies import inputs, named, recordings
from test_updates import live_nodes
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.gradient import Policy


def taken(net: Carried, chunk: Chunk, policy: Policy) -> int:
    def update() -> None:
        list(tt.updates(net, [chunk], nn.MSELoss(), gradient=policy))

    update()  # gradients, and whatever torch sets up once
    return allocated(update).most


FLAT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.Sequential(nn.LSTM(3, 32), nn.Linear(32, 2)),
    "dropout": lambda: nn.Sequential(nn.GRU(3, 32), nn.Dropout(0.5), nn.Linear(32, 2)),
}

# bytes of the state of torch's generator, kept at every edge where numbers were drawn
GENERATOR = 5056


def growth(
    make: Callable[[], nn.Module], policy: Callable[[int], Policy], steps: int = 20
) -> tuple[int, int]:
    """Peak memory of `steps`, and what eight times as many add beyond the boundary states."""
    net, long = big(make, 8 * steps)
    few, many = (
        taken(net, long[0:steps], policy(steps)),
        taken(net, long, policy(8 * steps)),
    )
    edge = sum(leaf.nbytes for leaf in tt.state.tensors(net.initial_state(4, like=long.inputs)))
    return few, many - few - edge * 7 * steps // 10


@pytest.mark.parametrize("name", list(FLAT))
def test_peak_does_not_grow_with_the_recording_beyond_its_edges(name: str) -> None:
    few, more = growth(FLAT[name], lambda _: tt.Exact(chunk=10))
    assert more < 0.1 * few + GENERATOR * 14 * (name == "dropout")
    few, more = growth(FLAT[name], tt.Truncated)  # the mutant: plain autograd
    assert more > 3 * few


def test_peak_of_a_rollout_does_not_grow_beyond_its_outputs_and_edges() -> None:
    net, chunk = big(FLAT["lstm"], 800)

    def peak(steps: int, play: Callable[[Tensor], tuple[Tensor, Any]]) -> int:
        def run() -> None:
            y, _ = play(chunk.inputs[:steps])
            y.square().mean().backward()

        run()
        return allocated(run).most

    edges, outputs = 28 * 2 * 4 * 32 * 4, 700 * 4 * 2 * 4
    few, many = (peak(steps, lambda x: tt.rollout(net, x, chunk=25)) for steps in (100, 800))
    assert many - few - edges < 4 * outputs + 0.1 * few
    few, many = (peak(steps, lambda x: net(x, net.initial_state(4))) for steps in (100, 800))
    assert many - few - edges > 10 * outputs + few  # the mutant: the net itself


def test_steps_without_loss_take_no_more_memory() -> None:
    net, chunk = big(FLAT["lstm"], 400)
    usual = taken(net, chunk, tt.Exact(chunk=50))
    for steps in (slice(0, 1), slice(399, 400)):
        mask = torch.zeros_like(chunk.mask)
        mask[steps] = True
        masked = Chunk.from_tensors(chunk.inputs, chunk.targets, mask=mask)
        assert taken(net, masked, tt.Exact(chunk=50)) < 1.1 * usual


def short_stream() -> tt.Stream:
    return tt.Stream(recordings([40, 33]), lanes=2, chunk=8)


def rolled(net: Carried) -> object:
    y, state = tt.rollout(net, inputs(40, 2), chunk=7)
    y.square().mean().backward()
    return tt.state.detach(state)


RUNS: dict[str, Callable[[Carried], object]] = {
    "audit of windows that overlap": lambda net: tt.audit(
        net, short_stream(), nn.MSELoss(), (5, 10), stride=5, chunk=7
    ),
    "reach": lambda net: tt.reach(net, short_stream(), nn.MSELoss(), max_lag=20, anchors=4),
    "exact": lambda net: next(
        tt.updates(net, short_stream(), nn.MSELoss(), gradient=tt.Exact(chunk=7))
    ),
    "rtrl": lambda net: list(tt.updates(net, short_stream(), nn.MSELoss(), gradient=RTRL(7))),
    "rollout": rolled,
}


NAMES = ("hides-layer", "learnt-start")


def left(run: Callable[[Carried], object]) -> int:
    """Autograd nodes that are there when the results are all that is held.

    Those from before are not looked at.
    """
    gc.collect()
    gc.freeze()
    held = [run(named(name).net()) for name in NAMES]
    nodes = live_nodes()
    del held
    return nodes


@pytest.mark.parametrize("name", list(RUNS))
def test_nothing_of_a_graph_stays_alive(name: str) -> None:
    assert left(RUNS[name]) == 0
    kept = list[Any]()

    def leaking(net: Carried) -> object:
        net.module.register_forward_hook(lambda *call: kept.append(call[-1]))
        return RUNS[name](net)

    assert left(leaking) > 0  # the mutant: something holds the outputs of every call
