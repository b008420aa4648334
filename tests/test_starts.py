"""Training on windows that start from carried states, or from noise like them.

Shapes: `T` steps, `B` lanes.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import throughtime as tt
from throughtime.errors import ConfigError
from throughtime.gradient._starts import StateMoments, StoredStates
from throughtime.gradient.truncated import TruncatedState
from throughtime.stream.recording import preceding

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


def make_net(*, fused: bool = False) -> tt.Carried:
    torch.manual_seed(3)
    net = tt.carry(nn.Sequential(nn.LSTM(2, 6), nn.Linear(6, 1)).to(WIDE), fused=fused)
    with torch.no_grad():
        net.get_parameter("module.0.bias_ih_l0")[6:12] += 3.0  # the state lasts
    return net


def make_stream(lanes: int, window: int = 5, lengths: tuple[int, ...] = LENGTHS) -> tt.Stream:
    return tt.Stream(tt.windows(recordings(lengths), window), lanes=lanes, chunk=window, seed=1)


def train(
    net: tt.Carried, stream: tt.Stream, policy: tt.Truncated, epochs: int = 3
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
    """The same by hand: each lane by itself, step by step, and a dict of final states."""

    def __init__(self, net: tt.Carried, stream: tt.Stream) -> None:
        self.net, self.stream, self.table = net, stream, dict[int, Any]()
        self.before = preceding(stream.recordings)

    def initial(self, recording: int) -> Any:
        return self.table.get(self.before[recording]) or self.net.initial_state(1)

    def epoch(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[float, Tensor]]:
        chunks = list(self.stream)
        lanes = chunks[0].lanes
        states: list[Any] = [None] * lanes
        playing = [-1] * lanes
        for chunk in chunks:
            rows: list[list[Tensor]] = [[] for _ in range(lanes)]
            for t in range(chunk.steps):
                now, starts = chunk.recording[t].tolist(), chunk.resets[t].tolist()
                for lane in range(lanes):
                    if playing[lane] >= 0 and (starts[lane] or now[lane] != playing[lane]):
                        self.table[playing[lane]] = tt.state.detach(states[lane])
                for lane in range(lanes):
                    if starts[lane]:
                        states[lane] = self.initial(now[lane])
                    y = torch.zeros(1, 1, 1, dtype=WIDE)
                    if now[lane] >= 0:
                        x = chunk.inputs[t : t + 1, lane : lane + 1]
                        y, states[lane] = self.net(x, states[lane])
                    rows[lane].append(y[0])
                playing = now
            states = [tt.state.detach(state) for state in states]
            columns = [torch.stack(r) for r in rows]
            outputs = torch.cat(columns, dim=1)
            assert chunk.targets is not None
            loss = (outputs - chunk.targets)[chunk.mask].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield float(loss.detach()), outputs.detach() * chunk.mask.unsqueeze(2)
        for lane, recording in enumerate(playing):
            if recording >= 0:
                self.table[recording] = states[lane]

    def run(self, epochs: int = 3) -> Iterator[tuple[float, Tensor]]:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for _ in range(epochs):
            yield from self.epoch(optimizer)


@pytest.fixture(params=[1, 5, 64], ids="table every {}".format)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are moved to the table at once, now and then, or not in so few updates."""
    monkeypatch.setattr("throughtime.gradient._starts._LATEST", request.param)


@pytest.mark.covering
@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("lanes", "fused"), [(1, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize("lengths", [LENGTHS, (20, 10, 30)], ids=["uneven", "even"])
def test_carried_starts_are_the_states_in_which_the_windows_before_ended(
    lanes: int, lengths: tuple[int, ...], *, fused: bool
) -> None:
    net, stream = make_net(fused=fused), make_stream(lanes, lengths=lengths)
    policy = tt.Truncated(5, start="carried")
    count = 0
    for got, expected in zip(
        train(net, stream, policy),
        Oracle(make_net(), make_stream(lanes, lengths=lengths)).run(),
        strict=True,
    ):
        assert got[0] == pytest.approx(expected[0], rel=1e-9)
        mask = expected[1] != 0
        assert torch.allclose(got[1][mask], expected[1][mask], rtol=1e-9, atol=1e-12)
        count += 1
    assert count == 3 * len(stream)


def test_the_starts_matter_and_zero_is_the_default() -> None:
    losses = {
        start: [loss for loss, _ in train(make_net(), make_stream(2), tt.Truncated(5, start=start))]
        for start in ("zero", "carried", "noise")
    }
    plain = [loss for loss, _ in train(make_net(), make_stream(2), tt.Truncated(5))]
    assert losses["zero"] == plain
    assert losses["carried"][:1] == losses["noise"][:1] == plain[:1]
    assert losses["carried"][-1] != losses["noise"][-1] != plain[-1]


@pytest.mark.parametrize("lanes", [1, 3])
def test_windows_in_order_from_carried_states_are_the_stream(lanes: int) -> None:
    data = recordings((40,) * lanes)
    windows = [w for parts in zip(*(tt.windows(r, 5) for r in data), strict=True) for w in parts]
    ordered = tt.Stream(windows, lanes=lanes, chunk=5, seed=None)
    whole = tt.Stream(data, lanes=lanes, chunk=5, seed=None)
    assert ordered.read(0, 40).recording[::5].tolist() == [
        list(range(lanes * k, lanes * k + lanes)) for k in range(8)
    ]
    carried = train(make_net(), ordered, tt.Truncated(5, start="carried"), 1)
    for got, expected in zip(carried, train(make_net(), whole, tt.Truncated(5), 1), strict=True):
        assert got[0] == expected[0]
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("start", ["zero", "carried", "noise"])
@pytest.mark.parametrize("at", [1, 4, 7, 9])
def test_a_saved_training_resumes_to_the_bit(start: Any, at: int) -> None:
    policy = tt.Truncated(5, start=start)
    net, stream = make_net(), make_stream(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    saved: dict[str, Any] = {}

    def step(update: tt.Update) -> float:
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


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_update_that_is_made_again_starts_from_the_same_states(accumulate: int) -> None:
    policy, net, other = tt.Truncated(5, start="carried"), make_net(), make_net()
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


@pytest.mark.usefixtures("table")
def test_what_was_saved_stays_as_it_is_while_training_goes_on() -> None:
    policy = tt.Truncated(5, start="carried")

    def losses(epoch: Any) -> list[float]:
        return [float(update.loss) for update in epoch]

    first = tt.updates(make_net(), make_stream(3), Loss(), gradient=policy)
    losses(first)
    known = first.policy_state
    net, runs = make_net(), list[list[float]]()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2)  # whose windows end in other states
    for _ in range(2):
        epoch = tt.updates(net, make_stream(2), Loss(), gradient=policy, policy_state=known)
        runs.append(losses(epoch))
    assert runs[1] == runs[0]

    epoch = tt.updates(net, make_stream(2), Loss(), gradient=policy, policy_state=known)
    next(epoch)
    saved = epoch.state_dict()
    rest = losses(epoch)
    for _ in range(2):
        epoch.load_state_dict(saved)
        assert losses(epoch) == rest


def test_windows_of_an_epoch_that_was_left_have_not_ended() -> None:
    policy, net, stream = tt.Truncated(3, start="carried"), make_net(), make_stream(2)
    epoch = tt.updates(net, stream, Loss(), gradient=policy)
    next(epoch)
    again = tt.updates(net, stream, Loss(), gradient=policy, policy_state=epoch.policy_state)
    next(again)
    assert again.policy_state.starts is not None
    store = again.policy_state.starts.store
    assert isinstance(store, StoredStates)
    assert store.ended is None
    assert not store.known.any()


def test_noise_has_the_moments_of_the_states_in_which_windows_ended() -> None:
    generator = torch.Generator().manual_seed(0)
    ended = torch.randn(50, 16, 2, dtype=WIDE, generator=generator) * 3 + torch.tensor([1.0, -4.0])
    moments = StateMoments()
    for rows in ended:
        moments = moments.learn(torch.zeros(16), (rows,))
    assert torch.allclose(moments.mean[0], ended.mean((0, 1)))
    torch.manual_seed(0)
    drawn = moments.draw(torch.zeros(20_000), torch.zeros(20_000, 2, dtype=WIDE))
    assert torch.allclose(drawn.mean(0), ended.mean((0, 1)), atol=0.1)
    assert torch.allclose(drawn.std(0), ended.flatten(0, 1).std(0), rtol=0.03)
    assert abs(float(torch.corrcoef(drawn.T)[0, 1])) < 0.03


def test_the_moments_follow_states_that_change() -> None:
    moments = StateMoments()
    for value in (0.0,) * 300 + (1.0,) * 300:
        moments = moments.learn(torch.zeros(2), (torch.full((2, 1), value),))
    assert moments.count == 1200
    assert float(moments.mean[0]) == pytest.approx(1 - 0.6 * 0.998**100)
    nothing = moments.learn(torch.zeros(0), (torch.zeros(0, 1),))
    assert nothing is moments


def test_noise_starts_all_windows_of_an_epoch_but_the_first_ones() -> None:
    net, stream = make_net(), make_stream(2, lengths=(20, 10, 30))
    torch.manual_seed(0)
    policy = tt.Truncated(5, start="noise")
    for i, update in enumerate(tt.updates(net, stream, Loss(), gradient=policy)):
        zero, _ = net(update.chunk.inputs, net.initial_state(2))
        same = torch.allclose(update.outputs, zero)
        assert same == (i == 0)
        assert bool(update.chunk.resets[0].all())  # the chunk is as the stream gave it


def test_counters_of_a_state_are_no_noise() -> None:
    moments = StateMoments().learn(torch.zeros(2), (torch.tensor([[3], [4]]), torch.ones(2, 1)))
    counter, leaf = moments.draw(torch.zeros(1), (torch.zeros(1, 1).long(), torch.zeros(1, 1)))
    assert int(counter) == 0
    assert float(leaf) == 1.0


def test_accumulated_updates_carry_the_starts() -> None:
    policy, net = tt.Truncated(5, start="carried"), make_net()
    epoch = tt.updates(net, make_stream(2), Loss(), gradient=policy, accumulate=2)
    assert len(list(epoch)) == math.ceil(len(make_stream(2)) / 2)
    assert isinstance(epoch.policy_state, TruncatedState)
    assert epoch.policy_state.starts is not None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"start": "warm"}, "expected 'zero', 'carried' or 'noise'"),
        ({"start": "carried", "horizon": 10}, "credit ends with it"),
        ({"start": "noise", "burn_in": 5}, "credit ends with it"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        tt.Truncated(5, **policy)


def test_whole_recordings_continue_nothing() -> None:
    stream = tt.Stream(recordings(), lanes=2, chunk=5)
    with pytest.raises(ConfigError, match=r"tt\.windows\(recordings, 100\)"):
        next(tt.updates(make_net(), stream, Loss(), gradient=tt.Truncated(5, start="carried")))
    noise = tt.updates(make_net(), stream, Loss(), gradient=tt.Truncated(5, start="noise"))
    assert len(list(noise)) == len(stream)


def test_the_policy_says_where_windows_start() -> None:
    assert tt.Truncated(5, start="noise").describe().endswith(", windows start from noise states")
