"""The loop: resumed to the bit, equal to the loop written by hand, counted, accumulated, and its
states handed on.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import gc
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import throughtime as tt
from strategies import (
    HidesLayer,
    TensorState,
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
    tt.Adaptive(0.01, 4, 16, stride=3, every=5),
)
LENGTHS = [31, 7, 20, 3, 11]


def stream() -> tt.Stream:
    return tt.Stream(recordings(LENGTHS), lanes=3, chunk=8, warm_up=1)


def training(
    net: Carried, policy: Policy | UpdatePolicy, checkpoint: bytes | None = None
) -> Iterator[Callable[[], bytes]]:
    """Two epochs, or the rest of them.

    After each update comes what gives a checkpoint as users write it; it is read back without
    running pickled code.
    """
    source, optimizer = stream(), torch.optim.Adam(net.parameters(), lr=0.02)
    run, parts = tt.updates(net, source, nn.MSELoss(), gradient=policy), dict[str, Any]()

    def saved() -> bytes:
        file = io.BytesIO()
        place = {name: part.state_dict() for name, part in parts.items()}
        torch.save(place | {"random": torch.get_rng_state()}, file)
        return file.getvalue()

    parts |= {"net": net, "optimizer": optimizer, "updates": run}
    if checkpoint:
        found = torch.load(io.BytesIO(checkpoint), weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(found[name])
        torch.set_rng_state(found["random"])
    while source.epoch < 2:
        for _ in run:
            optimizer.step()
            optimizer.zero_grad()
            yield saved
        options: Any = {"gradient": policy, "policy_state": run.policy_state}
        parts["updates"] = run = tt.updates(net, source, nn.MSELoss(), **options)


def trained(
    net: Carried, policy: Policy | UpdatePolicy, checkpoint: bytes | None = None
) -> dict[str, Tensor]:
    """The weights at the end."""
    assert list(training(net, policy, checkpoint))
    return weights(net)


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
    checkpoints, whole = run_and_save(make, policy)
    assert len(checkpoints) > 1
    for checkpoint in checkpoints[: -1 : len(checkpoints) // 4 + 1]:
        torch.manual_seed(99)
        assert same_bits(trained(make(), policy, checkpoint), whole)


def run_and_save(
    make: Callable[[], Carried], policy: Policy | UpdatePolicy
) -> tuple[list[bytes], dict[str, Tensor]]:
    """A checkpoint after each update, and the weights at the end."""
    torch.manual_seed(1)
    net = make()
    return [saved() for saved in training(net, policy)], weights(net)


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


@pytest.mark.parametrize(
    "policy",
    [tt.Truncated(7), tt.Truncated(6, 15), tt.Exact(cut_every=9, chunk=4), tt.Randomized(8)],
    ids=str,
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


def test_places_and_options_that_do_not_fit_are_refused() -> None:
    net, policy = RESUMED["rotation"](), tt.Truncated(6, 15)
    run = tt.updates(net, stream(), nn.MSELoss(), gradient=policy)
    next(run)
    next(run)
    place = run.state_dict()
    changes = {
        "no state came with it": {"policy": place["policy"] | {"carried": None, "edge": None}},
        "belongs to gradient": {"gradient": repr(tt.Truncated(6, 12))},
    }

    def resume(change: dict[str, Any]) -> None:
        again = tt.updates(net, stream(), nn.MSELoss(), gradient=policy)
        again.load_state_dict(place | change)
        next(again)

    for message, change in changes.items():
        with pytest.raises(DataError, match=message):
            resume(change)
    wrongs: list[dict[str, Any]] = [
        {"gradient": policy, "accumulate": 0},
        {"gradient": policy, "finite": "later"},
        {"gradient": tt.Randomized(10), "accumulate": 2},
    ]
    for options in wrongs:
        with pytest.raises(ConfigError):
            next(tt.updates(net, stream(), nn.MSELoss(), **options))


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


def test_trainings_in_threads_give_the_bits_of_those_alone() -> None:
    policies = tt.Exact(cut_every=9, chunk=4), tt.Truncated(6, 15)
    first, second = ([RESUMED["hidden-cell"]() for _ in policies] for _ in range(2))
    alone = list(map(trained, first, policies))
    with ThreadPoolExecutor(2) as pool:
        assert all(map(same_bits, pool.map(trained, second, policies), alone))


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


@pytest.mark.parametrize("autocast", [False, True])
def test_loop_equals_the_hand_written_one_to_the_bit(autocast: bool) -> None:
    """The loop that this library replaces: forward and loss under autocast, as torch has it."""
    x, targets = inputs(70, 4).float(), inputs(70, 4, seed=1, features=2).float()
    loss_fn, casting = nn.MSELoss(), torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    module, other = HidesLayer(), HidesLayer()
    other.load_state_dict(module.state_dict())
    tools, h, c = Tools(module), torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    for part, wanted in zip(x.split(9), targets.split(9), strict=True):
        with casting:
            hidden, (h, c) = module.lstm(part, (h, c))
            loss = loss_fn(module.head(hidden).flatten(0, 1), wanted.flatten(0, 1))
        tools.scaler.scale(loss).backward()
        tools.step()
        h, c = h.detach().float(), c.detach().float()
    tools, chunks = Tools(other), [Chunk.from_tensors(x, targets)]
    options: Any = {"gradient": tt.Truncated(9), "scaler": tools.scaler}
    with casting:
        for _ in tt.updates(tt.carry(other), chunks, loss_fn, **options):
            tools.step()
    assert same_bits(weights(other), weights(module))


def test_gradient_of_a_part_that_changed_between_updates_is_checked() -> None:
    net = tt.carry(module := nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.GRU(4, 2))).double()
    module[0].requires_grad_(False)
    updates = tt.updates(net, stream(), nn.MSELoss(), gradient=tt.Truncated(6))
    next(updates)
    module[0].requires_grad_(True)
    net.double().zero_grad()
    next(net.parameters()).register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(RunError, match=r"the gradient of '0\.0\.weight' is not finite"):
        next(updates)


def updates_of(stream: Any, policy: Any, accumulate: int = 1) -> Updates:
    net = tt.carry(nn.GRU(3, 2).double())
    return tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate)


@pytest.mark.parametrize(
    "policy", [tt.Truncated(5, 12), tt.Truncated(7, 9, burn_in=3), tt.Exact(cut_every=8)], ids=str
)
def test_length_is_the_number_of_updates_to_come(policy: Policy) -> None:
    """Also in a second epoch, and after a resume."""

    def make() -> tt.Stream:
        return tt.Stream(recordings([41]), 3, 8, hand_off=True)

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
    for source in (stream(), iter(stream())):  # of a warm-up
        updates = updates_of(source, tt.Truncated(6))
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
