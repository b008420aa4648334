"""The loop: resumed to the bit, equal to the loop written by hand, counted, accumulated, and its
states handed on.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import gc
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import throughtime as tt
from quick import examples
from strategies import (
    HidesLayer,
    LearntStart,
    TensorState,
    draw_lanes,
    inputs,
    named,
    recordings,
    start,
    states_apart,
    weights,
)
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Policy, UpdatePolicy
from throughtime.updates import Updates

RESUMABLE = (
    tt.Truncated(6),
    tt.Truncated(6, 15, jitter=True, burn_in=3),
    tt.Exact(chunk=4),
    tt.Exact(cut_every=9),
    tt.Randomized(6, grain=2),
    tt.Adaptive(0.01, 4, 16, stride=3, every=2),
)
LENGTHS = [31, 7, 20, 3, 11]


def stream() -> tt.Stream:
    return tt.Stream(recordings(LENGTHS), lanes=3, chunk=8, warm_up=1)


@dataclass
class Training:
    """Everything that a training consists of."""

    net: Carried
    stream: tt.Stream
    optimizer: torch.optim.Optimizer
    updates: Updates

    @classmethod
    def begin(cls, net: Carried, policy: Policy | UpdatePolicy) -> "Training":
        source = stream()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        return cls(net, source, optimizer, tt.updates(net, source, nn.MSELoss(), gradient=policy))

    def run(self, updates: int, policy: Policy | UpdatePolicy) -> int:
        """Makes so many updates, or what is left of two epochs; returns how many."""
        done = 0
        while done < updates and self.stream.epoch < 2:
            for _ in self.updates:
                self.optimizer.step()
                self.optimizer.zero_grad()
                done += 1
                if done == updates:
                    return done
            if self.stream.epoch < 2:
                self.updates = tt.updates(
                    self.net,
                    self.stream,
                    nn.MSELoss(),
                    gradient=policy,
                    policy_state=self.updates.policy_state,
                )
        return done

    def saved(self) -> bytes:
        """A checkpoint as users write it; read back without running pickled code."""
        file = io.BytesIO()
        place = {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates.state_dict(),
        }
        torch.save(place | {"random": torch.get_rng_state()}, file)
        return file.getvalue()

    def restore(
        self,
        checkpoint: bytes,
        change: Callable[[dict[str, Any]], dict[str, Any]] = lambda place: place,
    ) -> None:
        found = torch.load(io.BytesIO(checkpoint), weights_only=True)
        self.net.load_state_dict(found["net"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.updates.load_state_dict(change(found["updates"]))
        torch.set_rng_state(found["random"])


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def dropping_out() -> Carried:
    return tt.carry(HidesLayer(dropout=0.4).double())


RESUMED: dict[str, Callable[[], Carried]] = {
    "lstm-with-dropout": dropping_out,
    "rotation": lambda: tt.carry(TensorState().double()),
    "hidden-cell": named("hides-cell").net,
}


@pytest.mark.covering
@pytest.mark.parametrize("make", list(RESUMED.values()), ids=list(RESUMED))
@pytest.mark.parametrize("policy", RESUMABLE, ids=str)
def test_resume_after_any_update_gives_the_same_weights_to_the_bit(
    make: Callable[[], Carried], policy: Policy
) -> None:
    torch.manual_seed(1)
    through, checkpoints = Training.begin(make(), policy), list[bytes]()
    while through.run(1, policy):
        checkpoints.append(through.saved())
    assert len(checkpoints) > 1
    for checkpoint in checkpoints[: -1 : len(checkpoints) // 6 + 1]:
        assert same_bits(resumed_from(checkpoint, make, policy), weights(through.net))


def resumed_from(
    checkpoint: bytes,
    make: Callable[[], Carried],
    policy: Policy | UpdatePolicy,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda place: place,
) -> dict[str, Tensor]:
    """The weights after the rest of two epochs."""
    torch.manual_seed(99)
    resumed = Training.begin(make(), policy)
    resumed.restore(checkpoint, change)
    assert resumed.run(10_000, policy) > 0
    return weights(resumed.net)


def run_and_resume(
    make: Callable[[], Carried],
    policy: Policy | UpdatePolicy,
    stop: int,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda place: place,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after two epochs: uninterrupted, and stopped after `stop` updates and resumed."""
    torch.manual_seed(1)
    through = Training.begin(make(), policy)
    assert through.run(stop, policy) == stop
    checkpoint = through.saved()
    assert through.run(10_000, policy) > 0
    return weights(through.net), resumed_from(checkpoint, make, policy, change)


def test_a_call_that_is_refused_leaves_the_saved_place_as_it_was() -> None:
    """A call after an error, or on a stream that another loop has moved, makes no update."""

    def loss_fn(rows: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError(f"enough of {len(rows)} and {len(targets)}")

    failed = tt.updates(named("hides-layer").net(), stream(), loss_fn, gradient=tt.Truncated(6))
    with pytest.raises(RuntimeError, match="enough"):
        next(failed)
    for _ in range(2):
        assert failed.state_dict()["stream"]["position"] == 0
        with pytest.raises(RunError, match="in the middle of a step"):
            next(failed)
    moved = stream()
    run = tt.updates(named("hides-layer").net(), moved, nn.MSELoss(), gradient=tt.Truncated(6))
    next(run)
    next(run)
    next(iter(moved))
    with pytest.raises(DataError, match="started again or moved"):
        next(run)
    assert run.state_dict(after_step=False)["stream"]["position"] == 6


def live_nodes() -> int:
    """How many autograd nodes can be reached from any tensor that is alive."""
    gc.collect()
    waiting: list[Any] = [
        t.grad_fn for t in gc.get_objects() if issubclass(type(t), Tensor) and t.grad_fn is not None
    ]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return len(seen)


Played = dict[tuple[int, int], Tensor]  # outputs by recording and first step of a part


def play(net: Carried, stream: tt.Stream, policy: Policy) -> Played:
    """The outputs of an epoch at fixed weights, part by part."""
    rows: dict[tuple[int, int], list[Tensor]] = {}
    at: dict[int, tuple[int, int]] = {}
    for update in tt.updates(net, stream, nn.MSELoss(), gradient=policy):
        for lane in range(stream.lanes):
            real = update.chunk.recording[:, lane] >= 0
            if real.any():
                first = (int(update.chunk.recording[0, lane]), int(update.chunk.position[0, lane]))
                rows.setdefault(at.setdefault(lane, first), []).append(update.outputs[real, lane])
    net.zero_grad()
    return {part: torch.cat(outputs) for part, outputs in rows.items()}


def unbroken(net: Carried, source: dict[str, Any]) -> Tensor:
    """The outputs of the whole recording, run at once."""
    x = torch.from_numpy(source["inputs"]).unsqueeze(1)
    with torch.no_grad():
        return net(x, start(net, x))[0][:, 0]


def by_hand(net: Carried, source: dict[str, Any], length: int, epochs: int) -> list[list[Tensor]]:
    """Outputs by epoch and part: each part starts where the one before ended an epoch ago."""
    parts = torch.from_numpy(source["inputs"]).unsqueeze(1).split(length)
    ends: list[Any] = [start(net, parts[0])] * len(parts)
    epoch_outputs: list[list[Tensor]] = []
    with torch.no_grad():
        for epoch in range(epochs):
            entering = [
                start(net, part) if i == 0 or epoch == 0 else ends[i - 1]
                for i, part in enumerate(parts)
            ]
            results = [net(part, state) for part, state in zip(parts, entering, strict=True)]
            ends = [state for _, state in results]
            epoch_outputs.append([outputs[:, 0] for outputs, _ in results])
    return epoch_outputs


def check_hand_off(
    net: Carried, lengths: list[int], lanes: int, epochs: int, policy: Policy
) -> None:
    """Every epoch as by hand.

    And as many epochs as a recording has parts give the outputs of one unbroken run.
    """
    sources = recordings(lengths)
    stream = tt.Stream(sources, lanes, 50, hand_off=True)
    length = stream.steps
    oracle = [by_hand(net, source, length, epochs) for source in sources]
    for epoch in range(epochs):
        results = play(net, stream, policy)
        for i, source in enumerate(sources):
            parts = [results[i, at] for at in range(0, lengths[i], length)]
            assert (
                max(
                    float((p - q).abs().max()) for p, q in zip(parts, oracle[i][epoch], strict=True)
                )
                < 1e-12
            )
            if epoch >= len(parts) - 1:
                assert float((torch.cat(parts) - unbroken(net, source)).abs().max()) < 1e-12


@examples(20)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    wish=st.integers(2, 7),
    policy=st.sampled_from([tt.Truncated(7), tt.Truncated(6, 15)]),
)
def test_epochs_with_hand_off_equal_the_recording_run_by_hand(
    lengths: list[int], wish: int, policy: Policy
) -> None:
    lanes = max(draw_lanes(lengths, wish), len(lengths) + 1) if sum(lengths) > len(lengths) else 1
    if lanes > 1:
        check_hand_off(named("hides-layer").net(), lengths, lanes, lanes + 1, policy)


@pytest.mark.parametrize(
    "policy", [tt.Exact(chunk=10), tt.Exact(cut_every=9, chunk=4), tt.Randomized(8)], ids=str
)
def test_every_policy_hands_on_the_states_in_which_lanes_ended(policy: Policy) -> None:
    net, sources = named("tensor-state").net(), recordings([59])
    stream = tt.Stream(sources, 4, 50, hand_off=True)
    x = torch.from_numpy(sources[0]["inputs"]).unsqueeze(1)
    for _ in range(4):
        run = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
        for _ in run:
            net.zero_grad()
    for lane in (1, 2, 3):
        with torch.no_grad():
            _, end = net(x[: 15 * lane], start(net, x))
        got = tt.state.select(stream._entering_state(net), [lane])
        assert states_apart(got, end) < 1e-12


@pytest.mark.filterwarnings("ignore:lanes=4 for 1 recording")  # its parts are what is tested
def test_evaluation_with_a_handing_stream_starts_cold() -> None:
    net, stream = named("tensor-state").net(), tt.Stream(recordings([59]), 4, 50, hand_off=True)
    cold = tt.evaluate(net, stream, nn.MSELoss()).loss
    list(tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(6)))
    assert tt.evaluate(net, stream, nn.MSELoss()).loss == cold


PLACES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no state": lambda place: place | {"policy": place["policy"] | {"carried": None, "edge": None}},
    "another policy": lambda place: place | {"gradient": repr(tt.Truncated(6, 12))},
}


@pytest.mark.parametrize("change", list(PLACES.values()), ids=list(PLACES))
def test_a_place_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    with pytest.raises(DataError, match=r"no state came with it|belongs to gradient"):
        run_and_resume(RESUMED["rotation"], tt.Truncated(6, 15), 3, change)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 0},
        {"accumulate": 2.0},
        {"accumulate": 2, "gradient": tt.Randomized(10)},
        {"finite": "later"},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    options = {"gradient": tt.Truncated(6)} | options
    with pytest.raises(ConfigError):
        next(tt.updates(RESUMED["rotation"](), stream(), nn.MSELoss(), **options))


def trained_with_a_failure(
    fails_at: int, *, between: bool, accumulate: int
) -> tuple[dict[str, Tensor], int]:
    """Weights after an epoch, and how often it failed.

    An update that failed, or whose optimizer step did not come, is made again from the place then
    saved.
    """
    net, calls, failures = named("hides-layer").net(), [0], 0
    net.prepare(inputs(3, 3))

    def count(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == fails_at:
            raise RuntimeError("enough")

    def begin() -> Updates:
        policy = tt.Truncated(6, 15)
        return tt.updates(net, stream(), nn.MSELoss(), gradient=policy, accumulate=accumulate)

    if not between:
        net.module.register_forward_hook(count)
    optimizer, run = torch.optim.SGD(net.parameters(), 0.1), begin()
    while True:
        try:
            if next(run, None) is None:
                return weights(net), failures
            if between:
                count()
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError:
            failures += 1
            assert between or all(weight.grad is None for weight in net.parameters())
            place = run.state_dict(after_step=False)
            optimizer.zero_grad()
            run = begin() if between else run
            run.load_state_dict(place)


@pytest.mark.parametrize(("between", "accumulate"), [(False, 1), (False, 2), (True, 1)])
def test_an_update_that_came_to_nothing_is_made_again_from_the_place_before_it(
    between: bool, accumulate: int
) -> None:
    whole, _ = trained_with_a_failure(0, between=between, accumulate=accumulate)
    for at in (1, 2) if between else (1, 4, 9):
        result, failures = trained_with_a_failure(at, between=between, accumulate=accumulate)
        assert failures == 1
        assert same_bits(result, whole)


class Tools:
    """What users put around the loop: an optimizer, clipping, a schedule and a scaler."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.optimizer = net, torch.optim.AdamW(net.parameters(), lr=0.02)
        self.scheduler = LinearLR(self.optimizer, 1.0, 0.1, total_iters=10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float64, False), (torch.float64, True), (torch.float32, True)]
)
def test_loop_equals_the_hand_written_one_to_the_bit(dtype: torch.dtype, autocast: bool) -> None:
    """The loop that this library replaces: forward and loss under autocast, as torch has it."""
    x, targets = inputs(70, 4).to(dtype), inputs(70, 4, seed=1, features=2).to(dtype)
    loss_fn, casting = nn.MSELoss(), torch.autocast("cpu", torch.bfloat16, enabled=autocast)

    def make() -> HidesLayer:
        torch.manual_seed(5)
        return HidesLayer().to(dtype)

    def hand_written(kept: float) -> dict[str, Tensor]:
        tools = Tools(module := make())
        h = c = torch.zeros(1, 4, 4, dtype=dtype)
        for part, wanted in zip(x.split(9), targets.split(9), strict=True):
            with casting:
                hidden, (h, c) = module.lstm(part, (h, c))
                loss = loss_fn(module.head(hidden).flatten(0, 1), wanted.flatten(0, 1))
            tools.scaler.scale(loss).backward()
            tools.step()
            h, c = kept * h.detach().to(dtype), kept * c.detach().to(dtype)
        return weights(module)

    tools = Tools(net := tt.carry(module := make()))
    chunks, policy = [Chunk.from_tensors(x, targets)], tt.Truncated(9)
    with casting:
        for _ in tt.updates(net, chunks, loss_fn, gradient=policy, scaler=tools.scaler):
            tools.step()
    assert same_bits(weights(module), hand_written(1.0))
    assert not same_bits(weights(module), hand_written(0.0))  # the mutant: state forgotten


@pytest.mark.parametrize(
    "module",
    [LearntStart(), nn.Sequential(nn.GRUCell(3, 4), nn.Linear(4, 2))],
    ids=["start", "cell"],
)
def test_autocast_keeps_the_state_in_the_type_of_the_weights(module: nn.Module) -> None:
    net, chunk = tt.carry(module), Chunk.from_tensors(inputs(40, 1).float(), torch.zeros(40, 1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for update in tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Truncated(9, 20)):
            assert {leaf.dtype for leaf in tt.state.tensors(update.state)} == {torch.float32}
            assert update.outputs.dtype == torch.bfloat16
            assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}


class Encoded(nn.Module):
    """A layer before the recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.layer = nn.GRU(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.encoder(x))[0]


def replace_parent(net: Encoded) -> None:
    net.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())


def unfreeze(net: Encoded) -> None:
    net.encoder.requires_grad_(True)


@pytest.mark.parametrize("change", [replace_parent, unfreeze])
def test_gradient_of_a_part_that_changed_between_updates_is_checked(
    change: Callable[[Encoded], None],
) -> None:
    """The old part may keep a finite gradient."""
    net = tt.carry(module := Encoded()).double()
    module.encoder.requires_grad_(change is not unfreeze)
    updates = tt.updates(net, stream(), nn.MSELoss(), gradient=tt.Truncated(6))
    next(updates)
    change(module)
    net.double().zero_grad()
    next(net.parameters()).register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(RunError, match=r"the gradient of 'encoder\.0\.weight' is not finite"):
        next(updates)


COUNTED = (
    tt.Truncated(5, 12),
    tt.Truncated(7, 9, burn_in=3),
    tt.Truncated(1000),
    tt.Exact(chunk=4),
    tt.Exact(cut_every=8),
)
DATA: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "handed on": ([41], 3, {"hand_off": True}),
    "ragged ends": (LENGTHS, 3, {}),
    "in order": ([6, 6, 12, 5], 1, {"seed": None}),
    "common ends": ([8, 8, 8, 8], 2, {}),
}


def updates_of(stream: Any, policy: Any, accumulate: int = 1) -> Updates:
    net = tt.carry(nn.GRU(3, 2).double())
    return tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate)


@pytest.mark.covering
@pytest.mark.parametrize(("lengths", "lanes", "options"), list(DATA.values()), ids=list(DATA))
@pytest.mark.parametrize("policy", COUNTED, ids=str)
def test_length_is_the_number_of_updates_to_come(
    policy: Policy, lengths: list[int], lanes: int, options: dict[str, Any]
) -> None:
    """Also in a second epoch, and after a resume."""

    def make() -> tt.Stream:
        return tt.Stream(recordings(lengths), lanes, 8, **options)

    for accumulate in (1, 3):
        stream = make()
        for _ in range(2):
            updates = updates_of(stream, policy, accumulate)
            left = len(updates)
            assert left > 0
            for _update in updates:
                left -= 1
                resumed = updates_of(make(), policy, accumulate)
                resumed.load_state_dict(updates.state_dict())
                assert len(updates) == len(resumed) == left
            assert (left, len(updates), bool(updates)) == (0, 0, True)


def test_a_number_that_is_not_known_is_an_error_and_the_loop_goes_on() -> None:
    sources: list[tuple[Any, Any]] = [
        (tt.Stream(recordings([31]), 1, 8), tt.Truncated(6, jitter=True)),
        (stream(), tt.Truncated(6)),  # of a warm-up
        (iter(stream()), tt.Truncated(6)),
    ]
    for source, policy in sources:
        updates = updates_of(source, policy)
        with pytest.raises(TypeError):
            len(updates)
        assert list(updates)  # which asks for the length, and does without


def test_loop_of_many_updates_holds_no_growing_graph() -> None:
    """Neither nodes of a graph nor tensors."""
    gc.collect()
    net, before, alive = named("tensor-state").net(), live_nodes(), list[tuple[int, int]]()
    chunk = Chunk.from_tensors(inputs(100, 1), inputs(100, 1, features=2))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for i, _ in enumerate(tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Truncated(1, 3))):
        optimizer.step()
        optimizer.zero_grad()
        if i in (10, 40, 90):
            nodes = live_nodes() - before  # this collects what is no more used
            alive.append((nodes, sum(issubclass(type(t), Tensor) for t in gc.get_objects())))
    assert alive == [(0, alive[0][1])] * 3
