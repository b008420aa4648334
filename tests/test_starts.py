"""The examples of windows that start from carried states, or from noise like them.

Shapes: `T` steps, `B` lanes.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from examples.policies.starts import CarriedStart, NoiseStart, preceding
from torch import Tensor, nn

import throughtime as tt
from throughtime.carry import Carried
from throughtime.gradient import Policy, Update

WIDE = torch.float64
LENGTHS = (23, 10, 8, 31)  # windows of 5 leave shorter ones, so lanes reset within chunks
Loss = nn.MSELoss


def recordings(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "inputs": torch.randn(n, 2, dtype=WIDE, generator=generator),
            "targets": torch.randn(n, 1, dtype=WIDE, generator=generator),
        }
        for n in lengths
    ]


def make_net(*, fused: bool = False) -> Carried:
    torch.manual_seed(3)
    net = tt.carry(nn.Sequential(nn.LSTM(2, 6), nn.Linear(6, 1)).to(WIDE), fused=fused)
    with torch.no_grad():
        net.get_parameter("module.0.bias_ih_l0")[6:12] += 3.0  # the state lasts
    return net


def make_stream(lanes: int, window: int = 5, lengths: tuple[int, ...] = LENGTHS) -> tt.Stream:
    return tt.Stream(tt.windows(recordings(lengths), window), lanes=lanes, chunk=window, seed=1)


def train(
    net: Carried, stream: tt.Stream, policy: Policy, epochs: int = 3
) -> Iterator[tuple[float, Tensor]]:
    """The loss and the outputs of every update; the weights move after each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = None
    for _ in range(epochs):
        epoch = tt.updates(net, stream, Loss(), gradient=policy, policy_state=state)
        for update in epoch:
            optimizer.step()
            optimizer.zero_grad()
            yield float(update.loss), update.outputs
        state = epoch.policy_state


class Oracle:
    """The same by hand: each lane by itself, step by step, and a list of final states.

    A window has ended when its lane starts another one, or with the epoch.
    """

    def __init__(self, net: Carried, stream: tt.Stream) -> None:
        self.net, self.stream = net, stream
        self.before = preceding(stream.recordings)
        self.ended: list[tuple[int, Any]] = []

    def initial(self, recording: int) -> Any:
        """The state that enters a window."""
        ends = [state for r, state in self.ended if r == self.before[recording]]
        return ends[-1] if ends else self.net.initial_state(1)

    def epoch(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[float, Tensor]]:
        chunks = list(self.stream)
        lanes = chunks[0].lanes
        states: list[Any] = [None] * lanes
        playing = [-1] * lanes
        now = playing
        for chunk in chunks:
            rows: list[list[Tensor]] = [[] for _ in range(lanes)]
            for t in range(chunk.steps):
                now, starts = chunk.recording[t].tolist(), chunk.resets[t].tolist()
                starting = [lane for lane in range(lanes) if starts[lane]]
                for lane in starting:
                    if playing[lane] >= 0:
                        self.ended.append((playing[lane], tt.state.detach(states[lane])))
                for lane in starting:
                    states[lane], playing[lane] = self.initial(now[lane]), now[lane]
                for lane in range(lanes):
                    y = torch.zeros(1, 1, 1, dtype=WIDE)
                    if now[lane] >= 0:
                        x = chunk.inputs[t : t + 1, lane : lane + 1]
                        y, states[lane] = self.net(x, states[lane])
                    rows[lane].append(y[0])
            states = [tt.state.detach(state) for state in states]
            columns = [torch.stack(r) for r in rows]
            outputs = torch.cat(columns, dim=1)
            assert chunk.targets is not None
            loss = (outputs - chunk.targets)[chunk.mask].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach()), outputs.detach() * chunk.mask.unsqueeze(2)
        self.ended += [(r, states[k]) for k, r in enumerate(playing) if now[k] == r >= 0]

    def run(self, epochs: int = 3) -> Iterator[tuple[float, Tensor]]:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for _ in range(epochs):
            yield from self.epoch(optimizer)


class NoiseOracle(Oracle):
    """Noise with the mean and deviation of all states in which windows have ended."""

    def initial(self, recording: int) -> Any:
        del recording
        fresh = self.net.initial_state(1)
        if not self.ended:
            return fresh
        rows = zip(*(tt.state.tensors(state) for _, state in self.ended), strict=True)
        drawn = [self.drawn(torch.cat(leaves)) for leaves in rows]
        return tt.state.map_leaves(lambda _: drawn.pop(0).unsqueeze(0), fresh)

    @staticmethod
    def drawn(rows: Tensor) -> Tensor:
        return rows.mean(0) + rows.std(0, correction=0) * torch.randn_like(rows[0])


ORACLES: dict[str, tuple[Policy, type[Oracle]]] = {
    "carried": (CarriedStart(5), Oracle),
    "noise": (NoiseStart(5), NoiseOracle),
}


@pytest.mark.covering
@pytest.mark.parametrize(("policy", "oracle"), list(ORACLES.values()), ids=list(ORACLES))
@pytest.mark.parametrize(("lanes", "fused"), [(1, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("lengths", [LENGTHS, (20, 10, 30)], ids=["uneven", "even"])
def test_windows_start_from_the_states_of_the_definition(
    policy: Policy, oracle: type[Oracle], lanes: int, lengths: tuple[int, ...], *, fused: bool
) -> None:
    stream = make_stream(lanes, lengths=lengths)
    torch.manual_seed(0)
    own = list(train(make_net(fused=fused), stream, policy))
    torch.manual_seed(0)
    expected = list(oracle(make_net(), make_stream(lanes, lengths=lengths)).run())
    assert len(own) == len(expected) == 3 * len(stream)
    for (loss, outputs), (other, rows) in zip(own, expected, strict=True):
        assert loss == pytest.approx(other, rel=1e-9)
        mask = rows != 0
        assert torch.allclose(outputs[mask], rows[mask], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", [CarriedStart(5), NoiseStart(5)], ids=["carried", "noise"])
@pytest.mark.parametrize("at", [1, 4, 7, 9])
def test_a_saved_training_resumes_to_the_bit(policy: Policy, at: int) -> None:
    net, stream = make_net(), make_stream(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved: dict[str, Any] = {}

    def step(update: Update) -> float:
        optimizer.step()
        optimizer.zero_grad()
        return float(update.loss)

    torch.manual_seed(5)
    losses: list[float] = []
    state = None
    for _ in range(2):
        epoch = tt.updates(net, stream, Loss(), gradient=policy, policy_state=state)
        for update in epoch:
            losses.append(step(update))
            if len(losses) == at:
                saved = copy.deepcopy(
                    {
                        "updates": epoch.state_dict(),
                        "net": net.state_dict(),
                        "random": torch.get_rng_state(),
                    }
                )
        state = epoch.policy_state
    net.load_state_dict(saved["net"])
    torch.set_rng_state(saved["random"])
    resumed: list[float] = []
    other = make_stream(3)
    epoch = tt.updates(net, other, Loss(), gradient=policy)
    epoch.load_state_dict(saved["updates"])
    while at + len(resumed) < len(losses):
        resumed += [step(update) for update in epoch]
        epoch = tt.updates(net, other, Loss(), gradient=policy, policy_state=epoch.policy_state)
    assert resumed == losses[at:]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_update_that_is_made_again_starts_from_the_same_states(accumulate: int) -> None:
    policy, net, other = CarriedStart(5), make_net(), make_net()
    several: dict[str, Any] = {"gradient": policy, "accumulate": accumulate}
    optimizer, state = torch.optim.SGD(net.parameters(), lr=0.1), None
    stream = make_stream(3)
    for _ in range(4):
        epoch = tt.updates(net, stream, Loss(), policy_state=state, **several)
        for update in epoch:
            other.load_state_dict(net.state_dict())
            again = tt.updates(other, make_stream(3), Loss(), **several)
            again.load_state_dict(copy.deepcopy(epoch.state_dict(after_step=False)))
            repeated = next(again)
            assert torch.equal(repeated.outputs, update.outputs)
            assert torch.equal(repeated.loss, update.loss)
            optimizer.step()
            optimizer.zero_grad()
        state = epoch.policy_state


def test_noise_starts_all_windows_of_an_epoch_but_the_first_ones() -> None:
    net, stream = make_net(), make_stream(2, lengths=(20, 10, 30))
    torch.manual_seed(0)
    for i, update in enumerate(tt.updates(net, stream, Loss(), gradient=NoiseStart(5))):
        zero, _ = net(update.chunk.inputs, net.initial_state(2))
        same = torch.allclose(update.outputs, zero)
        assert same == (i == 0)
        assert bool(update.chunk.resets[0].all())  # the chunk is that of the stream
