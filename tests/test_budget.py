"""Memory: what is measured, what is planned with it, and what a sweep then takes.

Shapes: `T` steps, `B` lanes, `H` hidden.
"""

import gc
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import Allocated, PolicyData, allocated, deviation, plain, policy_gradients
from strategies import Rotation, inputs, named, recordings
from test_updates import live_nodes
from throughtime.errors import ConfigError
from throughtime.gradient import Objective, Policy, _backward, _memory
from throughtime.gradient._segments import Segment
from throughtime.gradient.schedule import FASTEST_GRAPH, GraphSize, best_chunk, bytes_in, in_bytes

sizes = st.builds(
    GraphSize, step=st.integers(1, 5000), fixed=st.integers(0, 5000), edge=st.integers(0, 5000)
)
lengths = st.integers(1, 300)


def fitting(steps: int, size: GraphSize, room: float, *, stored: bool) -> list[int]:
    return [
        chunk for chunk in range(1, steps + 1) if size.total(steps, chunk, stored=stored) <= room
    ]


@given(steps=lengths, size=sizes, room=st.integers(1, 100_000), stored=st.booleans())
def test_chunk_found_fits(steps: int, size: GraphSize, room: int, stored: bool) -> None:
    try:
        chunk = best_chunk(steps, size, room, stored=stored)
    except ConfigError:
        return
    assert chunk in fitting(steps, size, room, stored=stored)


@given(steps=lengths, size=sizes, room=st.integers(1, 100_000), stored=st.booleans())
@example(steps=51, size=GraphSize(2, 0, 100), room=210, stored=True)
@example(steps=93, size=GraphSize(3242, 0, 37), room=7_000, stored=True)
def test_memory_is_refused_only_if_no_chunk_fits(
    steps: int, size: GraphSize, room: int, stored: bool
) -> None:
    if fitting(steps, size, room, stored=stored):
        best_chunk(steps, size, room, stored=stored)
    else:
        with pytest.raises(ConfigError, match="too small for"):
            best_chunk(steps, size, room, stored=stored)


@given(steps=lengths, size=sizes, room=st.integers(1, 1000), stored=st.booleans())
def test_memory_that_the_refusal_asks_for_is_enough(
    steps: int, size: GraphSize, room: int, stored: bool
) -> None:
    try:
        best_chunk(steps, size, room, stored=stored)
    except ConfigError as refusal:
        (advice,) = re.findall(r"Give memory='(\w+)'", str(refusal))
        assert best_chunk(steps, size, bytes_in(advice), stored=stored) <= steps
        (least,) = re.findall(r"at least ([0-9.]+ \w+) are needed", str(refusal))
        assert (
            best_chunk(steps, size, bytes_in(least) * 1.01, stored=stored) <= steps
        )  # three digits are said


@given(steps=st.integers(1, 100_000), size=sizes)
def test_chunk_of_ample_memory_is_the_fastest_made_even(steps: int, size: GraphSize) -> None:
    """As many segments as with the fastest length; the last is hardly shorter than the others."""
    pieces = math.ceil(steps / min(steps, FASTEST_GRAPH // int(size.step)))
    chunk = best_chunk(steps, size, 1e12)
    assert chunk == math.ceil(steps / pieces)
    assert chunk - (steps - (pieces - 1) * chunk) < pieces


@given(steps=lengths, size=sizes, room=st.integers(1, 100_000), stored=st.booleans())
def test_pieces_are_even(steps: int, size: GraphSize, room: int, stored: bool) -> None:
    """No shorter chunk makes as few of them."""
    try:
        chunk = best_chunk(steps, size, room, stored=stored)
    except ConfigError:
        return
    assert chunk == 1 or math.ceil(steps / (chunk - 1)) > math.ceil(steps / chunk)


@given(
    steps=lengths,
    step=st.integers(100_000, 5_000_000),
    edge=st.integers(0, 5_000_000),
    room=st.integers(10_000_000, 10**9),
)
def test_more_memory_is_never_further_from_the_fastest(
    steps: int, step: int, edge: int, room: int
) -> None:
    size, ideal = GraphSize(step, 0, edge), best_chunk(steps, GraphSize(step, 0, edge), 1e12)
    if not fitting(steps, size, room / 1.5, stored=True):
        return
    little, more = (abs(best_chunk(steps, size, amount) - ideal) for amount in (room, 2 * room))
    assert more <= little


def test_edges_kept_elsewhere_need_no_memory() -> None:
    size = GraphSize(step=100, fixed=0, edge=10_000)
    with pytest.raises(
        ConfigError,
        match=(
            r"the states at the chunks' edges 10 kB each.*offload='cpu' or offload=FOLDER .*, or"
            r" cut_every=STEPS"
        ),
    ):
        best_chunk(10_000, size, 150_000)
    assert (
        best_chunk(10_000, size, 150_000, stored=False) == 1250
    )  # 1400 would fit, as eight pieces too
    with pytest.raises(
        ConfigError,
        match=(
            r"the graph of a single step takes 100 bytes; at least 10\.1 kB are needed, with chunks"
            r" of 1\..*or fewer lanes"
        ),
    ):
        best_chunk(10_000, size, 5_000, stored=False)


AMOUNTS: dict[Any, float] = {
    "512MB": 512e6,
    "2GiB": 2**31,
    "2 GB": 2e9,
    " 1.5 kib ": 1536,
    "3TB": 3e12,
    "1e3": 1000,
    "100": 100,
    "7b": 7,
    "7 B": 7,
    "1 byte": 1,
    "900 bytes": 900,
    "2PB": 2e15,
    512: 512,
    0.5: 0.5,
    2e9: 2e9,
}


@pytest.mark.parametrize(("said", "amount"), list(AMOUNTS.items()), ids=str)
def test_amounts_of_memory_are_read(said: str | float, amount: float) -> None:
    assert bytes_in(said) == amount


@pytest.mark.parametrize(
    "said",
    [
        "",
        "MB",
        "much",
        "-5MB",
        "0",
        0,
        -1.0,
        float("nan"),
        float("inf"),
        "inf MB",
        "5MBMB",
        "5 M B",
        "5m",
        "12xb",
        None,
        True,
        [5],
    ],
    ids=repr,
)
def test_what_is_no_amount_of_memory_is_refused(said: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=re.escape(
            f"memory={said!r}: expected an amount like '512MB', '2GiB', or a number of bytes"
        ),
    ):
        bytes_in(said)


@given(st.floats(1, 9.9e17))
@example(1e15)
def test_amounts_are_said_so_that_they_can_be_read(amount: float) -> None:
    assert bytes_in(in_bytes(amount)) == pytest.approx(
        amount, rel=0.006 if amount >= 1000 else 0.51 / amount
    )


@given(st.floats(1, 9.9e17))
@example(999_900.0)
def test_amounts_are_said_without_exponents(amount: float) -> None:
    assert re.fullmatch(r"1 byte|[0-9.]+ (bytes|kB|MB|GB|TB|PB)", in_bytes(amount))
    assert in_bytes(amount) != "1 bytes"


LSTM = 15  # floats for each lane and hidden unit that the graph of an LSTM's step holds


def big(make: Callable[[], nn.Module], steps: int, lanes: int = 4) -> tuple[tt.Carried, tt.Chunk]:
    """A net whose activations outweigh what Python and torch need, in float32."""
    net, x = tt.carry(make()), inputs(steps, lanes).float()
    with torch.no_grad():
        y, _ = net(x, net.initial_state(lanes, like=x))
    return net, tt.Chunk.from_tensors(x, torch.zeros_like(y))


class Turning(Rotation):
    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.play(x, self.zeros(x) if state is None else state)


MEASURED: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 32),
    "lstm of two layers": lambda: nn.LSTM(3, 32, num_layers=2),
    "gru": lambda: nn.GRU(3, 32),
    "cell": lambda: nn.LSTMCell(3, 32),
    "chain": lambda: nn.Sequential(
        nn.LSTM(3, 32), nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 5)
    ),
    "rotation": Turning,
}


def measured(net: tt.Carried, chunk: tt.Chunk) -> GraphSize:
    return _memory.measure_graph(
        net,
        lambda steps: chunk[0:steps],
        net.initial_state(chunk.lanes, like=chunk.inputs),
        Objective(nn.MSELoss()),
    )


def held(net: tt.Carried, chunk: tt.Chunk) -> Allocated:
    """What a graph takes that is alive."""

    def forward() -> object:
        y, state = net(chunk.inputs, net.initial_state(chunk.lanes, like=chunk.inputs))
        assert chunk.targets is not None
        return nn.functional.mse_loss(y, chunk.targets), y, state

    return allocated(forward)


def tensor_bytes(size: GraphSize) -> float:
    """Those of a step, besides the objects of its nodes and what the allocator keeps."""
    return (size.step - size.nodes * _memory.NODE_BYTES) / _memory.RESIDENT


@pytest.mark.parametrize("make", list(MEASURED.values()), ids=list(MEASURED))
def test_bytes_measured_are_those_that_a_graph_grows_by(make: Callable[[], nn.Module]) -> None:
    net, chunk = big(make, 400)
    size = measured(net, chunk)
    growth = (held(net, chunk).kept - held(net, chunk[0:200]).kept) / 200
    assert growth / 2 < tensor_bytes(size) < growth * 2
    state = net.initial_state(4, like=chunk.inputs)
    bytes_of_state = sum(leaf.nbytes for leaf in tt.state.tensors(state))
    random = GENERATOR if make is MEASURED["chain"] else 0  # dropout
    assert size.edge == bytes_of_state + random + _memory.BOUNDARY_BYTES


def test_bytes_of_an_lstm_are_known() -> None:
    for hidden, lanes in ((16, 1), (64, 4), (32, 16)):
        net, chunk = big(lambda hidden=hidden: nn.LSTM(3, hidden), 60, lanes)
        size = measured(net, chunk)
        assert not size.nodes
        assert tensor_bytes(size) == pytest.approx(LSTM * 4 * hidden * lanes, rel=0.5)


def test_measuring_is_done_once_for_each_kind_of_chunk() -> None:
    net, chunk = big(lambda: nn.LSTM(3, 32), 100)
    calls = list[int]()
    net.module.register_forward_hook(lambda _, given, __: calls.append(len(given[0])))
    first = measured(net, chunk)
    assert calls == [16, 48]
    assert measured(net, chunk) is first
    assert calls == [16, 48]
    other = tt.Chunk.from_tensors(chunk.inputs[:, :2], torch.zeros(100, 2, 32))
    assert measured(net, other).step == pytest.approx(first.step / 2, rel=0.2)
    assert calls == [16, 48, 16, 48]


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_memory_that_is_too_small_is_refused_and_what_is_asked_for_is_enough(offload: Any) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(97, 2, 0)
    with pytest.raises(
        ConfigError,
        match=(
            r"a memory of 500 bytes is too small for 97 steps: the graph of a single step takes"
            r" [0-9.]+ kB"
        ),
    ) as refusal:
        policy_gradients(net, [data.chunk], tt.Exact(memory=500, offload=offload))
    assert all(p.grad is None for p in net.parameters())
    (least,) = re.findall(r"at least ([0-9.]+ \w+) are needed", str(refusal.value))
    results = policy_gradients(
        net, [data.chunk], tt.Exact(memory=bytes_in(least) * 1.01, offload=offload)
    )
    assert deviation(results, plain(net, data)) < 1e-10


def test_offload_helps_where_edges_are_too_many(tmp_path: Path) -> None:
    """Two hundred kilobytes for a long recording of a net with a large state."""
    net, chunk = big(lambda: nn.Sequential(nn.RNN(3, 200), nn.Linear(200, 2)), 1000, 1)
    with pytest.raises(ConfigError, match="too small for 1,000 steps"):
        next(tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Exact(memory="60kB")))
    for offload in ("cpu", tmp_path):
        (update,) = tt.updates(
            net, [chunk], nn.MSELoss(), gradient=tt.Exact(memory="60kB", offload=offload)
        )
        assert update.adjoint_stats is not None
        assert update.adjoint_stats.chunk > 1


def taken(net: tt.Carried, chunk: tt.Chunk, policy: Policy) -> int:
    def update() -> None:
        list(tt.updates(net, [chunk], nn.MSELoss(), gradient=policy))

    update()  # gradients, and whatever torch sets up once
    return allocated(update).most


FLAT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.Sequential(nn.LSTM(3, 32), nn.Linear(32, 2)),
    "dropout": lambda: nn.Sequential(nn.GRU(3, 32), nn.Dropout(0.5), nn.Linear(32, 2)),
    "cell": lambda: nn.Sequential(nn.LSTMCell(3, 32), nn.Linear(32, 2)),
}


GENERATOR = (
    5056  # bytes of the state of torch's generator, kept at every edge where numbers were drawn
)


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


def test_peak_does_not_grow_with_edges_in_a_file(tmp_path: Path) -> None:
    few, more = growth(FLAT["lstm"], lambda _: tt.Exact(chunk=1, offload=tmp_path), 10)
    assert more < 0.1 * few
    _, kept = growth(FLAT["lstm"], lambda _: tt.Exact(chunk=1), 10)
    assert kept > 0.5 * few  # the mutant: as many edges as steps


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


def masked(steps: slice, chunk: tt.Chunk) -> tt.Chunk:
    mask = torch.zeros_like(chunk.mask)
    mask[steps] = True
    return tt.Chunk.from_tensors(chunk.inputs, chunk.targets, mask=mask)


def test_steps_without_loss_take_no_more_memory() -> None:
    net, chunk = big(FLAT["lstm"], 400)
    usual = taken(net, chunk, tt.Exact(chunk=50))
    for steps in (slice(0, 200), slice(0, 1), slice(399, 400)):
        assert taken(net, masked(steps, chunk), tt.Exact(chunk=50)) < 1.1 * usual


@pytest.mark.parametrize("outputs", [2, 500])
@pytest.mark.parametrize("memory", [1e6, 4e6])
def test_peak_stays_near_the_memory_given(outputs: int, memory: float) -> None:
    net, chunk = big(lambda: nn.Sequential(nn.LSTM(3, 32), nn.Linear(32, outputs)), 1000)
    policy = tt.Exact(memory=memory)
    (update,) = tt.updates(net, [chunk], nn.MSELoss(), gradient=policy)
    assert update.adjoint_stats is not None
    assert update.adjoint_stats.chunk < 1000
    del update
    resident = _memory.RESIDENT * taken(net, chunk, policy)
    assert memory / 2 < resident < 1.5 * memory


def short_stream() -> tt.Stream:
    return tt.Stream(recordings([40, 33]), lanes=2, chunk=8)


def rolled(net: tt.Carried, *, back: bool) -> object:
    y, state = tt.rollout(net, inputs(40, 2), chunk=7)
    if back:
        y.square().mean().backward()
    return tt.state.detach(state)


RUNS: dict[str, Callable[[tt.Carried], object]] = {
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
    "rtrl": lambda net: list(tt.updates(net, short_stream(), nn.MSELoss(), gradient=tt.RTRL(7))),
    "rollout": lambda net: rolled(net, back=True),
    "rollout without a way back": lambda net: rolled(net, back=False),
}


NAMES = ("tensor-state", "hides-layer", "learnt-start")


def left(run: Callable[[tt.Carried], object]) -> int:
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
def test_nothing_of_a_graph_stays_alive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert left(RUNS[name]) == 0
    segments, product = list[Segment](), _backward.vjp

    def keeping(segment: Segment, *given: Any, **options: Any) -> Any:
        segments.append(segment)
        return product(segment, *given, **options)

    monkeypatch.setattr(_backward, "vjp", keeping)
    assert (left(RUNS[name]) > 0) == (
        name != "rollout without a way back"
    )  # the mutant: something holds the segments


def test_graph_of_a_rollout_does_not_grow_with_its_steps() -> None:
    plays: dict[str, Callable[[tt.Carried, Tensor], object]] = {
        "rollout": lambda net, x: tt.rollout(net, x, chunk=7),
        "net": lambda net, x: net(x, net.initial_state(2, like=x)),  # the mutant
    }
    results = {
        name: [left(lambda net, n=n, play=play: play(net, inputs(n, 2))) for n in (20, 200)]
        for name, play in plays.items()
    }
    assert 0 < results["rollout"][0] == results["rollout"][1]
    assert results["net"][1] > 5 * results["net"][0]
