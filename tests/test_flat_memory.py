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
from policy_data import allocated
from strategies import inputs, named, recordings
from test_updates import live_nodes
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.gradient import Policy


def big(make: Callable[[], nn.Module], steps: int, lanes: int = 4) -> tuple[Carried, Chunk]:
    """A net whose activations outweigh what Python and torch need, in float32."""
    net, x = tt.carry(make()), inputs(steps, lanes).float()
    with torch.no_grad():
        y, _ = net(x, net.initial_state(lanes, like=x))
    return net, Chunk.from_tensors(x, torch.zeros_like(y))


def taken(net: Carried, chunk: Chunk, policy: Policy) -> int:
    def update() -> None:
        list(tt.updates(net, [chunk], nn.MSELoss(), gradient=policy))

    update()  # gradients, and whatever torch sets up once
    return allocated(update).most


FLAT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.Sequential(nn.LSTM(3, 32), nn.Linear(32, 2)),
    "dropout": lambda: nn.Sequential(nn.GRU(3, 32), nn.Dropout(0.5), nn.Linear(32, 2)),
    "cell": lambda: nn.Sequential(nn.LSTMCell(3, 32), nn.Linear(32, 2)),
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


def masked(steps: slice, chunk: Chunk) -> Chunk:
    mask = torch.zeros_like(chunk.mask)
    mask[steps] = True
    return Chunk.from_tensors(chunk.inputs, chunk.targets, mask=mask)


def test_steps_without_loss_take_no_more_memory() -> None:
    net, chunk = big(FLAT["lstm"], 400)
    usual = taken(net, chunk, tt.Exact(chunk=50))
    for steps in (slice(0, 200), slice(0, 1), slice(399, 400)):
        assert taken(net, masked(steps, chunk), tt.Exact(chunk=50)) < 1.1 * usual


def short_stream() -> tt.Stream:
    return tt.Stream(recordings([40, 33]), lanes=2, chunk=8)


def rolled(net: Carried, *, back: bool) -> object:
    y, state = tt.rollout(net, inputs(40, 2), chunk=7)
    if back:
        y.square().mean().backward()
    return tt.state.detach(state)


RUNS: dict[str, Callable[[Carried], object]] = {
    "audit": lambda net: tt.audit(net, short_stream(), nn.MSELoss(), (5, 10), chunk=7),
    "audit of windows that overlap": lambda net: tt.audit(
        net, short_stream(), nn.MSELoss(), (5, 10), stride=5, chunk=7
    ),
    "reach": lambda net: tt.reach(net, short_stream(), nn.MSELoss(), max_lag=20, anchors=4),
    "exact": lambda net: next(
        tt.updates(net, short_stream(), nn.MSELoss(), gradient=tt.Exact(chunk=7))
    ),
    "segment": lambda net: next(
        tt.updates(net, short_stream(), nn.MSELoss(), gradient=tt.Exact(chunk=7, cut_every=15))
    ),
    "rtrl": lambda net: list(tt.updates(net, short_stream(), nn.MSELoss(), gradient=RTRL(7))),
    "rollout": lambda net: rolled(net, back=True),
    "rollout without a way back": lambda net: rolled(net, back=False),
}


NAMES = ("tensor-state", "hides-layer", "learnt-start")


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


def test_graph_of_a_rollout_grows_with_its_segments_only() -> None:
    plays: dict[str, Callable[[Carried, Tensor], object]] = {
        "rollout": lambda net, x: tt.rollout(net, x, chunk=10),
        "net": lambda net, x: net(x, net.initial_state(2, like=x)),  # the mutant
    }
    few, many = 2, 20  # segments
    for name, play in plays.items():
        nodes = [
            left(lambda net, n=n, play=play: play(net, inputs(10 * n, 2))) for n in (few, many)
        ]
        growth = (nodes[1] - nodes[0]) / (len(NAMES) * (many - few))
        assert (growth <= 3) == (name == "rollout")  # a segment, and its part of the outputs
