"""The loop: resumed to the bit, equal to the loop written by hand, counted, accumulated, and its
states handed on.

Shapes: `T` steps, `B` lanes, `C` outputs.
"""

import contextlib
import gc
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler

import throughtime as tt
from quick import examples
from strategies import (
    HidesLayer,
    LearntStart,
    Row,
    TensorState,
    apart,
    draw_lanes,
    inputs,
    named,
    recordings,
    some_nets,
    start,
    states_apart,
    weights,
)
from throughtime import state as trees
from throughtime.carry import Carried
from throughtime.chunk import Chunk
from throughtime.errors import ConfigError, DataError, RunError
from throughtime.gradient import Policy, UpdatePolicy
from throughtime.updates import Updates

RESUMABLE = (
    tt.Truncated(6),
    tt.Truncated(6, 15),
    tt.Truncated(6, 15, jitter=True, burn_in=3),
    tt.Exact(chunk=4),
    tt.Exact(),
    tt.Exact(cut_every=9),
    tt.Randomized(6, grain=2),
    tt.Adaptive(0.01, 2, 16, every=3),
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
    "learnt-start": lambda: tt.carry(LearntStart().double()),
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
    for checkpoint in checkpoints[:-1]:
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


def _changed(place: dict[str, Any], **values: Any) -> dict[str, Any]:
    """A saved position with other values in the state of the policy."""
    return place | {"policy": place["policy"] | values}


def test_a_place_without_its_state_is_refused() -> None:
    with pytest.raises(DataError, match="no state came with it"):
        run_and_resume(
            RESUMED["rotation"],
            tt.Truncated(6, 15),
            3,
            lambda place: _changed(place, carried=None, edge=None),
        )


def test_a_place_of_another_policy_is_refused() -> None:
    with pytest.raises(
        DataError,
        match=(
            r"belongs to gradient=Truncated\(stride=6, horizon=12,.*these updates to"
            r" gradient=Truncated\(stride=6, horizon=15,"
        ),
    ):
        run_and_resume(
            RESUMED["rotation"],
            tt.Truncated(6, 15),
            3,
            lambda place: place | {"gradient": repr(tt.Truncated(6, 12))},
        )


def test_a_stream_that_somebody_else_starts_is_noticed() -> None:
    net, shared = named("hides-layer").net(), stream()
    run = tt.updates(net, shared, nn.MSELoss(), gradient=tt.Truncated(6))
    next(run)
    tt.evaluate(net, shared)
    with pytest.raises(DataError, match="started again or moved"):
        next(run)


def trained_with_a_failure(fails_at: int | None, *, between: bool) -> dict[str, Any]:
    """Weights after an epoch.

    An update that failed, or whose optimizer step did not come, is made again from the place then
    saved.
    """
    net, calls = named("hides-layer").net(), [0]

    def loss_fn(rows: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == fails_at and not between:
            raise RuntimeError("enough")
        return nn.functional.mse_loss(rows, targets)

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = tt.updates(net, stream(), loss_fn, gradient=tt.Truncated(6, 15))
    while True:
        try:
            if next(run, None) is None:
                return weights(net)
            if between and calls[0] == fails_at:
                calls[0] += 1
                raise RuntimeError("enough")
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError:
            place = run.state_dict(after_step=False)
            optimizer.zero_grad()
            run = tt.updates(net, stream(), loss_fn, gradient=tt.Truncated(6, 15))
            run.load_state_dict(place)


@pytest.mark.parametrize("between", [False, True], ids=["in-the-update", "before-the-step"])
def test_an_update_that_came_to_nothing_is_made_again_from_the_place_before_it(
    between: bool,
) -> None:
    whole = trained_with_a_failure(None, between=between)
    for at in (1, 2, 5):
        assert same_bits(trained_with_a_failure(at, between=between), whole)


def test_updates_that_failed_go_no_further() -> None:
    def loss_fn(rows: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError(f"enough of {len(rows)} and {len(targets)}")

    run = tt.updates(named("hides-layer").net(), stream(), loss_fn, gradient=tt.Truncated(6))
    with pytest.raises(RuntimeError, match="enough"):
        next(run)
    with pytest.raises(RunError, match="in the middle of a step"):
        next(run)


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


def test_a_place_read_to_another_device_goes_to_that_of_the_net() -> None:
    net = named("hides-layer").net()
    run = tt.updates(net, stream(), nn.MSELoss(), gradient=tt.Truncated(6, 15))
    next(run)
    place = run.state_dict()
    again = tt.updates(
        named("hides-layer").net().to("meta"), stream(), nn.MSELoss(), gradient=tt.Truncated(6, 15)
    )
    again.load_state_dict(place)
    assert {leaf.device.type for _, leaf in tt.state.leaves(again.state)} == {"meta"}


def test_place_needs_a_stream() -> None:
    run = tt.updates(
        named("hides-layer").net(), list(stream()), nn.MSELoss(), gradient=tt.Truncated(6)
    )
    next(run)
    for call in (run.state_dict, lambda: run.load_state_dict({})):
        with pytest.raises(DataError, match=r"only a tt\.Stream can return to a saved position"):
            call()


def test_exhausted_updates_stay_exhausted_and_a_new_call_plays_the_next_epoch() -> None:
    net, source = named("hides-layer").net(), stream()
    run = tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(6))
    first = [update.chunk.recording for update in run]
    assert list(run) == []
    assert source.epoch == 1
    second = [
        update.chunk.recording
        for update in tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(6))
    ]
    assert source.epoch == 2
    assert len(first) != len(second) or not all(map(torch.equal, first, second))


def test_given_state_goes_on_from_where_the_stream_stands() -> None:
    net, source = named("tensor-state").net(), stream()
    run = tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(6))
    next(run)
    on = next(tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(6), state=run.state))
    assert on.chunk.position[0, 0] == 6
    expected = next(run_again := tt.updates(net, stream(), nn.MSELoss(), gradient=tt.Truncated(6)))
    assert expected.chunk.position[0, 0] == 0
    assert states_apart(on.state, next(run_again).state) == 0


@dataclass(frozen=True)
class Setting:
    """What users put around the loop."""

    dtype: torch.dtype = torch.float32
    lanes: int = 1
    clip: bool = False
    schedule: bool = False
    scale: bool = False
    autocast: bool = False

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        return (
            torch.autocast("cpu", dtype=torch.bfloat16)
            if self.autocast
            else contextlib.nullcontext()
        )


@dataclass
class Tools:
    """An optimizer and its company, the same for both loops."""

    net: nn.Module
    setting: Setting
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    scaler: torch.amp.GradScaler

    @classmethod
    def of(cls, net: nn.Module, setting: Setting) -> "Tools":
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=10)
        return cls(
            net,
            setting,
            optimizer,
            scheduler,
            torch.amp.GradScaler("cpu", init_scale=2.0**7, enabled=setting.scale),
        )

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.setting.clip:
            nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.setting.schedule:
            self.scheduler.step()
        self.optimizer.zero_grad()


def module_of(setting: Setting) -> HidesLayer:
    torch.manual_seed(5)
    return HidesLayer().to(setting.dtype)


def data_of(setting: Setting, steps: int = 70) -> tuple[Tensor, Tensor]:
    x, targets = inputs(steps, setting.lanes), inputs(steps, setting.lanes, seed=1, features=2)
    return x.to(setting.dtype), targets.to(setting.dtype)


def hand_written(
    setting: Setting, stride: int = 9, *, detach_in_autocast: bool = True
) -> dict[str, Tensor]:
    """The loop that this library replaces.

    `autocast` around forward and loss, as torch's documentation has it.
    """
    module, (x, targets) = module_of(setting), data_of(setting)
    tools, loss_fn = Tools.of(module, setting), nn.MSELoss()
    h = c = torch.zeros(1, setting.lanes, 4, dtype=setting.dtype)
    for begin in range(0, len(x), stride):
        part, wanted = x[begin : begin + stride], targets[begin : begin + stride]
        with setting.casting():
            hidden, (h, c) = module.lstm(part, (h, c))
            y = module.head(hidden)
            loss = loss_fn(y.flatten(0, 1), wanted.flatten(0, 1))
        tools.scaler.scale(loss).backward()
        tools.step()
        h, c = h.detach().to(setting.dtype), c.detach().to(setting.dtype)
        if not detach_in_autocast:
            h, c = torch.zeros_like(h), torch.zeros_like(c)
    return weights(module)


def with_updates(setting: Setting, stride: int = 9) -> dict[str, Tensor]:
    module, (x, targets) = module_of(setting), data_of(setting)
    net = tt.carry(module)
    tools, chunk = Tools.of(net, setting), Chunk.from_tensors(x, targets)
    with setting.casting():
        for _ in tt.updates(
            net, [chunk], nn.MSELoss(), gradient=tt.Truncated(stride), scaler=tools.scaler
        ):
            tools.step()
    return weights(module)


SETTINGS = {
    "plain": Setting(),
    "float64": Setting(dtype=torch.float64),
    "batch-of-4": Setting(lanes=4),
    "clip": Setting(clip=True),
    "scheduler": Setting(schedule=True),
    "scaler": Setting(scale=True),
    "autocast": Setting(autocast=True),
    "autocast-batch-of-4": Setting(autocast=True, lanes=4),
    "all": Setting(clip=True, schedule=True, scale=True, autocast=True),
    "all-float64": Setting(dtype=torch.float64, clip=True, schedule=True, scale=True, lanes=4),
}


@pytest.mark.parametrize("setting", list(SETTINGS.values()), ids=list(SETTINGS))
def test_loop_equals_the_hand_written_one_to_the_bit(setting: Setting) -> None:
    found = with_updates(setting)
    assert same_bits(found, hand_written(setting))
    assert not same_bits(found, weights(module_of(setting)))
    assert not same_bits(
        found, hand_written(setting, detach_in_autocast=False)
    )  # the mutant: state forgotten


@pytest.mark.parametrize(
    "make",
    [LearntStart, HidesLayer, lambda: nn.Sequential(nn.GRUCell(3, 4), nn.Linear(4, 2))],
    ids=["learnt-start", "hides-layer", "cell"],
)
def test_autocast_keeps_the_state_in_the_type_of_the_weights(make: Callable[[], nn.Module]) -> None:
    x, targets = data_of(Setting())
    net = tt.carry(make())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for update in tt.updates(
            net, [Chunk.from_tensors(x, targets)], nn.MSELoss(), gradient=tt.Truncated(9, 20)
        ):
            assert {leaf.dtype for leaf in tt.state.tensors(update.state)} == {torch.float32}
            assert update.outputs.dtype == torch.bfloat16
            assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float32}


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


class Encoded(nn.Module):
    """A layer before the recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.layer, self.readout = nn.GRU(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.layer(self.encoder(x))[0])


def first_weight(net: Carried) -> nn.Parameter:
    return next(net.parameters())


def replace_layer(net: Carried) -> None:
    net.module.get_submodule("encoder").add_module("0", nn.Linear(3, 4))


def replace_parent(net: Carried) -> None:
    net.module.add_module("encoder", nn.Sequential(nn.Linear(3, 4), nn.Tanh()))


def replace_weight(net: Carried) -> None:
    layer = net.module.get_submodule("encoder.0")
    layer.register_parameter("weight", nn.Parameter(torch.zeros(4, 3)))


def unfreeze(net: Carried) -> None:
    net.module.get_submodule("encoder").requires_grad_(True)


@pytest.mark.parametrize("change", [replace_layer, replace_parent, replace_weight, unfreeze])
def test_gradient_of_a_part_that_changed_between_updates_is_checked(
    change: Callable[[Carried], None],
) -> None:
    """The old part may keep a finite gradient."""
    net = tt.carry(Encoded()).double()
    if change is unfreeze:
        net.module.get_submodule("encoder").requires_grad_(False)
    updates = tt.updates(net, stream(), nn.MSELoss(), gradient=tt.Truncated(6))
    next(updates)
    change(net)
    net.double()
    net.zero_grad()
    first_weight(net).register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(RunError, match=r"the gradient of 'encoder\.0\.weight' is not finite"):
        next(updates)


@pytest.mark.parametrize("finite", ["next", "now"])
def test_a_gradient_that_is_not_finite_ends_the_loop_on_the_cpu_at_once(finite: Any) -> None:
    targets = torch.zeros(30, 1)
    targets[15] = torch.inf
    stream = tt.Stream({"inputs": torch.ones(30, 2), "targets": targets}, lanes=1, chunk=10)
    net = tt.carry(nn.Sequential(nn.GRU(2, 3), nn.Linear(3, 1)))
    policy = tt.Truncated(10)
    updates = tt.updates(net, stream, nn.MSELoss(), gradient=policy, finite=finite)
    next(updates)
    with pytest.raises(RunError, match=r"steps 10 to 19 .*`\.grad` and the weights are unchanged"):
        next(updates)
    with pytest.raises(ConfigError, match="finite='later': expected 'next' or 'now'"):
        tt.updates(net, stream, nn.MSELoss(), gradient=policy, finite="later")  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_a_loss_that_fails_says_what_it_got(loss_fn: nn.Module) -> None:
    """Classes for a loss over numbers."""
    net = tt.carry(nn.Sequential(nn.GRU(2, 4), nn.Linear(4, 3)))
    stream = tt.Stream((torch.randn(50, 2), torch.randint(3, (50,))), lanes=1, chunk=25)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        next(tt.updates(net, stream, loss_fn, gradient=tt.Truncated(25)))
    (note,) = caught.value.__notes__
    kind = "of torch.float32 on cpu"
    assert f"outputs (25, 3) {kind} and targets (25,) {kind}" in note


COUNTED: dict[str, Policy] = {
    "horizon is stride": tt.Truncated(6),
    "horizon beyond stride": tt.Truncated(5, 12),
    "burn-in": tt.Truncated(7, 9, burn_in=3),
    "one step": tt.Truncated(1),
    "longer than the epoch": tt.Truncated(1000),
    "exact": tt.Exact(),
    "exact in segments": tt.Exact(chunk=4),
    "exact with cuts": tt.Exact(cut_every=8),
}
DATA: dict[str, tuple[list[int], int, dict[str, Any]]] = {
    "one": ([31], 1, {}),
    "parts of one": ([41], 3, {}),
    "handed on": ([41], 3, {"hand_off": True}),
    "ragged ends": ([31, 7, 20, 3, 11], 3, {}),
    "in order": ([6, 6, 12, 5], 1, {"seed": None}),
    "common ends": ([8, 8, 8, 8], 2, {}),
    "offset": ([31, 17], 2, {"offset": 9}),
}
UNKNOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "jitter": (tt.Truncated(6, jitter=True), {}),
    "warm-up of the stream": (tt.Truncated(6), {"warm_up": 2}),
    "random": (tt.Randomized(6), {}),
    "measured": (tt.Adaptive(0.5, 4, 16), {}),
}


def updates_of(stream: Any, policy: Any, accumulate: int = 1) -> Updates:
    torch.manual_seed(0)
    net = tt.carry(nn.GRU(3, 2).double())
    return tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate)


@pytest.mark.parametrize("data", list(DATA.values()), ids=list(DATA))
@pytest.mark.parametrize("policy", list(COUNTED.values()), ids=list(COUNTED))
def test_length_is_the_number_of_updates_to_come(
    policy: Policy, data: tuple[list[int], int, dict[str, Any]]
) -> None:
    lengths, lanes, options = data
    stream = tt.Stream(recordings(lengths), lanes, 8, **options)
    for accumulate, _ in product((1, 2, 3), range(2)):
        updates = updates_of(stream, policy, accumulate)
        total, yielded = len(updates), 0
        for _update in updates:
            yielded += 1
            assert len(updates) == total - yielded
        assert yielded == total > 0
        assert (len(updates), bool(updates)) == (0, True)


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("policy", [tt.Truncated(5, 12), tt.Exact()], ids=["truncated", "exact"])
def test_length_after_a_resume_is_that_of_the_rest(policy: Policy, taken: int) -> None:
    def stream() -> tt.Stream:
        return tt.Stream(recordings([8, 8, 13, 5]), 1, 8)

    updates = updates_of(stream(), policy)
    total = len(updates)
    for _ in range(taken):
        next(updates)
    resumed = updates_of(stream(), policy)
    resumed.load_state_dict(updates.state_dict())
    assert len(resumed) == total - taken == len(list(resumed))


@pytest.mark.parametrize(("policy", "options"), list(UNKNOWN.values()), ids=list(UNKNOWN))
def test_a_number_that_is_not_known_is_an_error_and_the_loop_goes_on(
    policy: Any, options: dict[str, Any]
) -> None:
    updates = updates_of(tt.Stream(recordings([31, 20]), 2, 8, **options), policy)
    with pytest.raises(TypeError, match=re.escape("not known beforehand: a policy other than")):
        len(updates)
    assert updates
    assert list(updates)  # which asks for the length, and does without


def test_chunks_of_an_iterable_have_no_number() -> None:
    updates = updates_of(iter(tt.Stream(recordings([31]), 1, 8)), tt.Truncated(6))
    with pytest.raises(TypeError, match="an iterable of chunks"):
        len(updates)
    assert len(list(updates)) == 6


def test_strides_without_a_target_are_counted_and_yield_nothing() -> None:
    data = recordings([24])
    data[0]["targets"][6:12] = float("nan")
    updates = updates_of(tt.Stream(data, 1, 8), tt.Truncated(6))
    assert (len(updates), len(list(updates))) == (4, 3)


REMEMBERING = some_nets("tensor-state", "hides-layer", "learnt-start", "hides-cell", "dict-state")
Played = dict[tuple[int, int], Tensor]  # outputs by recording and first step of a part


def play(net: Carried, stream: tt.Stream, stride: int = 7) -> Played:
    """The outputs of an epoch at fixed weights, part by part."""
    rows: dict[tuple[int, int], list[Tensor]] = {}
    at: dict[int, tuple[int, int]] = {}
    for update in tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(stride)):
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


def check_hand_off(net: Carried, lengths: list[int], lanes: int, epochs: int) -> None:
    """Every epoch as by hand.

    And as many epochs as a recording has parts give the outputs of one unbroken run.
    """
    sources = recordings(lengths)
    stream = tt.Stream(sources, lanes, 50, hand_off=True)
    length = stream.steps
    oracle = [by_hand(net, source, length, epochs) for source in sources]
    for epoch in range(epochs):
        results = play(net, stream)
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


@REMEMBERING
def test_as_many_epochs_as_lanes_play_the_recording_unbroken(row: Any) -> None:
    check_hand_off(row.net(), [103], 4, 5)
    net = row.net()
    stream = tt.Stream(recordings([103]), 4, 50, hand_off=True)
    cold = torch.cat([results for _, results in sorted(play(net, stream).items())])
    assert (
        float((cold - unbroken(net, recordings([103])[0])).abs().max()) > 1e-3
    )  # the mutant: a single, cold epoch


@examples(15)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3), wish=st.integers(2, 7))
def test_epochs_with_hand_off_equal_the_recording_run_by_hand(
    lengths: list[int], wish: int
) -> None:
    lanes = max(draw_lanes(lengths, wish), len(lengths) + 1) if sum(lengths) > len(lengths) else 1
    if lanes > 1:
        check_hand_off(named("hides-layer").net(), lengths, lanes, lanes + 1)


HANDING_ON: dict[str, Policy] = {
    "horizon": tt.Truncated(6, 15),
    "exact": tt.Exact(chunk=10),
    "segment": tt.Exact(cut_every=9, chunk=4),
    "randomized": tt.Randomized(8),
}


@pytest.mark.parametrize("policy", list(HANDING_ON.values()), ids=list(HANDING_ON))
def test_every_policy_hands_on_the_states_in_which_lanes_ended(
    policy: Policy,
) -> None:
    net, sources = named("tensor-state").net(), recordings([59])
    stream = tt.Stream(sources, 4, 50, hand_off=True)
    x = torch.from_numpy(sources[0]["inputs"]).unsqueeze(1)
    for _ in range(4):
        run = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
        for _ in run:
            net.zero_grad()
    with torch.no_grad():
        ends = [net(x[: 15 * lanes], start(net, x))[1] for lanes in (1, 2, 3)]
    for lane, end in enumerate(ends, 1):
        got = trees.select(stream._entering_state(net), [lane])
        assert apart(dict(trees.leaves(got)), dict(trees.leaves(end))) < 1e-12


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"warm_up": 3}, tt.Truncated(6)),
        ({"warm_up": 3}, tt.Truncated(6, 9)),
    ],
)
def test_warm_up_counts_where_a_state_is_cold_only(options: dict[str, Any], policy: Policy) -> None:
    net = named("tensor-state").net()
    stream = tt.Stream(recordings([50]), 4, 50, hand_off=True, **options)
    counted = [
        sum(update.steps for update in tt.updates(net, stream, nn.MSELoss(), gradient=policy))
        for _ in range(3)
    ]
    assert counted == [50 - 4 * 3, 50 - 3, 50 - 3]


@pytest.mark.filterwarnings("ignore:lanes=4 for 1 recording")  # its parts are what is tested
def test_evaluation_with_a_handing_stream_starts_cold() -> None:
    net, source = named("tensor-state").net(), recordings([59])
    stream = tt.Stream(source, 4, 50, hand_off=True)
    cold = tt.evaluate(net, tt.Stream(source, 4, 50, hand_off=True), nn.MSELoss()).loss
    list(tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(6)))
    assert tt.evaluate(net, stream, nn.MSELoss()).loss == cold
    assert math.isfinite(cold)


STRIDE = 7


def data(length: int = 75) -> dict[str, Any]:
    """Targets with gaps: some strides have few, some none."""
    one = recordings([length], outputs=1)[0]
    one["targets"][np.arange(length) % 23 > 9] = np.nan
    one["targets"][STRIDE : 2 * STRIDE] = np.nan
    return one


def net_of(outputs: int = 1) -> Carried:
    torch.manual_seed(1)
    return tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, outputs))).double()


def found(
    policy: Policy, accumulate: int, source: dict[str, Any] | None = None
) -> list[tuple[Tensor, float, int]]:
    """Gradient, loss and steps of every update, at fixed weights."""
    net = net_of()
    told: list[tuple[Tensor, float, int]] = []
    stream = tt.Stream(data() if source is None else source, 1, 10)
    for update in tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate):
        told.append((flat(net), update.loss.item(), update.steps))
        net.zero_grad()
    return told


def flat(net: nn.Module) -> Tensor:
    return torch.cat(
        [
            torch.zeros(p.numel()).double() if p.grad is None else p.grad.flatten()
            for p in net.parameters()
        ]
    )


def strides(policy: Policy) -> list[tuple[Tensor, float, int]]:
    """Sum the losses stride by stride; a stride without targets gets one more, subtracted again."""
    told = dict(zip(_counted(), found(policy, 1), strict=True))
    nothing = (torch.zeros_like(flat(net_of())), 0.0, 0)
    return [told.get(at, nothing) for at in range(0, 75, STRIDE)]


def _counted() -> list[int]:
    valid = ~np.isnan(data()["targets"]).reshape(75)
    return [at for at in range(0, 75, STRIDE) if valid[at : at + STRIDE].any()]


def test_what_grad_held_before_is_added_to() -> None:
    net = net_of()
    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    next(
        tt.updates(
            net, tt.Stream(data(), 1, 10), nn.MSELoss(), gradient=tt.Truncated(STRIDE), accumulate=3
        )
    )
    assert torch.allclose(flat(net) - 1, found(tt.Truncated(STRIDE), 3)[0][0], atol=1e-14)


def test_failure_in_the_middle_leaves_grad_as_it_was() -> None:
    net, calls = net_of(), [0]

    def loss_fn(rows: Tensor, targets: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 4:
            raise RuntimeError("enough")
        return nn.functional.mse_loss(rows, targets)

    for weight in net.parameters():
        weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="enough"):
        next(
            tt.updates(
                net,
                tt.Stream(data(), 1, 10),
                loss_fn,
                gradient=tt.Truncated(STRIDE),
                accumulate=100,
            )
        )
    assert torch.equal(flat(net), torch.ones_like(flat(net)))


def test_resume_between_accumulated_updates_gives_the_same_bits() -> None:
    def train(stop: int | None) -> Tensor:
        net, stream = net_of(), tt.Stream(data(), 1, 10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        going = tt.updates(
            net, stream, nn.MSELoss(), gradient=tt.Truncated(STRIDE, 16), accumulate=2
        )
        for i, _ in enumerate(going):
            optimizer.step()
            optimizer.zero_grad()
            if i == stop:
                place, stream = going.state_dict(), tt.Stream(data(), 1, 10)
                going = tt.updates(
                    net, stream, nn.MSELoss(), gradient=tt.Truncated(STRIDE, 16), accumulate=2
                )
                going.load_state_dict(place)
                for _ in going:
                    optimizer.step()
                    optimizer.zero_grad()
                break
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    whole = train(None)
    assert all(torch.equal(train(stop), whole) for stop in (0, 1, 3))


def test_epoch_after_an_accumulated_one_begins_at_its_start() -> None:
    net, stream = net_of(), tt.Stream(data(), 1, 10)
    for epoch in range(3):
        assert stream.epoch == epoch
        assert (
            sum(
                u.steps
                for u in tt.updates(
                    net, stream, nn.MSELoss(), gradient=tt.Truncated(STRIDE), accumulate=4
                )
            )
            == 33
        )
        net.zero_grad()


@pytest.mark.parametrize("wrong", [0, -1, 2.0])
def test_a_number_of_updates_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"accumulate=.*expected a whole number of at least 1"):
        tt.updates(
            net_of(),
            tt.Stream(data(), 1, 10),
            nn.MSELoss(),
            gradient=tt.Truncated(STRIDE),
            accumulate=wrong,
        )


def test_randomized_truncation_is_refused_with_the_way_out() -> None:
    source, policy = tt.Stream(data(), 1, 10), tt.Randomized(10)
    run = tt.updates(net_of(), source, nn.MSELoss(), gradient=policy, accumulate=2)
    with pytest.raises(ConfigError, match=r"Randomized\(.*unbiased as they are.*zero_grad"):
        next(run)


def test_chunks_of_an_iterator_are_accumulated_too() -> None:
    make: Callable[[], Carried] = net_of
    a, b = make(), make()
    chunks = list(tt.Stream(data(), 1, STRIDE))
    for net, source in ((a, iter(chunks)), (b, tt.Stream(data(), 1, 10))):
        for _ in tt.updates(net, source, nn.MSELoss(), gradient=tt.Truncated(STRIDE), accumulate=3):
            pass
    assert torch.equal(flat(a), flat(b))


POLICIES = pytest.mark.parametrize(
    "policy",
    [tt.Truncated(6), tt.Truncated(6, 15)],
    ids=["horizon-is-stride", "horizon-beyond-stride"],
)


def live_tensors() -> int:
    return sum(issubclass(type(t), Tensor) for t in gc.get_objects())


def counts(
    net: Carried, updates: int, samples: Sequence[int], stride: int, horizon: int
) -> list[tuple[int, int]]:
    """New live graph nodes, and live tensors, after some of many updates."""
    gc.collect()
    before = live_nodes()
    chunk = Chunk.from_tensors(inputs(updates * stride, 1), inputs(updates * stride, 1, features=2))
    found: list[tuple[int, int]] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for i, update in enumerate(
        tt.updates(net, [chunk], nn.MSELoss(), gradient=tt.Truncated(stride, horizon))
    ):
        optimizer.step()
        optimizer.zero_grad()
        assert all(leaf.grad_fn is None for leaf in tt.state.tensors(update.state))
        assert update.loss.grad_fn is None
        assert update.outputs.grad_fn is None
        if i in samples:
            found.append((live_nodes() - before, live_tensors()))
    return found


@pytest.mark.covering
@some_nets("tensor-state", "lstm", "hides-layer")
@POLICIES
def test_loop_of_many_updates_holds_no_growing_graph(row: Row, policy: tt.Truncated) -> None:
    module = (
        row.module()
        if row.name != "lstm"
        else nn.Sequential(row.module(), nn.Linear(4, 2).double())
    )
    horizon = 1 if policy.horizon is None else 3
    samples = (10, 100, 290)
    found = counts(tt.carry(module), 300, samples, 1, horizon)
    assert len(found) == len(samples)
    assert len(set(found)) == 1
    if row.name != "hides-layer":
        assert found[0][0] == 0
