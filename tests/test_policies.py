"""The laws of every policy, those that a user writes included: uncut, the gradient is that of plain
autograd over the whole sequence.

Shapes: `T` steps, `B` lanes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import throughtime as tt
from policy_data import (
    PolicyData,
    UpdateGrads,
    data_for,
    deviation,
    plain,
    policy_gradients,
    summed,
)
from quick import examples
from strategies import (
    Row,
    apart,
    gradients,
    named,
    recordings,
    seeds,
    some_nets,
    start,
    states_apart,
    weights,
)
from test_updates import RESUMED, run_and_resume, same_bits
from throughtime.carry import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError, DataError, ModelError, RunError
from throughtime.gradient import (
    Objective,
    Policy,
    Probe,
    Progress,
    Update,
    UpdatePolicy,
    Window,
    executor,
)

EXACT = 1e-10
STEPS = 24  # at most; whatever the policies are set to is at least as long
LONG = 32
some_rows = some_nets("lstm", "hides-cell", "dict-state")


@dataclass(frozen=True)
class Setting:
    """A policy that cuts nothing within `LONG` steps.

    `scale` is what its weighted sum must be multiplied by.
    """

    name: str
    make: Callable[[], Policy]
    scale: Callable[[PolicyData], float] = lambda _: 1.0
    reads_again: bool = False


SETTINGS = (
    Setting("truncated-overlapping", lambda: tt.Truncated(5, LONG)),
    Setting("truncated-jitter-refresh", lambda: tt.Truncated(5, LONG, jitter=True, burn_in=3)),
    Setting("exact-in-chunks", lambda: tt.Exact(chunk=7), reads_again=True),
    Setting("exact-segment", lambda: tt.Exact(chunk=7, cut_every=LONG), reads_again=True),
    Setting(
        "randomized-no-cut",
        lambda: tt.Randomized(LONG, grain=LONG),
        lambda data: LONG * data.mask.shape[1] / int(data.mask.sum()),
    ),
    Setting(
        "adaptive-fixed-stride",
        lambda: tt.Adaptive(0.1, LONG, LONG, stride=5, every=2),
        reads_again=True,
    ),
)
every_policy = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)


@pytest.mark.covering
@examples(3)
@given(
    steps=st.sampled_from([1, 2, 11, STEPS]),
    lanes=st.sampled_from([1, 2]),
    seed=seeds,
    resets=st.sampled_from([0.0, 0.2]),
    masked=st.sampled_from([0.0, 0.4]),
)
@every_policy
@some_rows
def test_uncut_updates_sum_to_plain_autograd_over_the_whole_sequence(
    row: Row, setting: Setting, steps: int, lanes: int, seed: int, resets: float, masked: float
) -> None:
    net = row.net()
    data = data_for(net, steps, lanes, seed, resets, masked)
    together = data.resets.all(dim=1, keepdim=True)
    together[0] = False
    data = PolicyData(
        data.x, data.targets, data.resets & ~together, data.mask
    )  # Exact makes an update where all lanes start
    assume(bool(data.mask.any()))
    ((_, _, expected),) = plain(net, data)
    results = summed(policy_gradients(net, [data.chunk], setting.make()))
    assert apart({n: setting.scale(data) * g for n, g in results.items()}, expected) < EXACT


CUTTING = (
    Setting("short-truncated", lambda: tt.Truncated(5, 11)),
    Setting("short-exact-segment", lambda: tt.Exact(cut_every=11)),
    Setting("short-randomized", lambda: tt.Randomized(3, grain=3)),
    Setting("short-adaptive", lambda: tt.Adaptive(0.1, 4, 11)),
)


def stream(lengths: list[int], lanes: int, chunk: int, outputs: int) -> tt.Stream:
    return tt.Stream(
        recordings(lengths, outputs=outputs), min(lanes, sum(lengths)), chunk, warm_up=1
    )


OTHERS = (
    *CUTTING,
    Setting("exact-in-short-chunks", lambda: tt.Exact(chunk=4)),
    Setting("randomized", lambda: tt.Randomized(4, grain=2)),
)
every_setting = pytest.mark.parametrize(
    "setting", [*SETTINGS, *OTHERS], ids=lambda setting: setting.name
)


@examples(4)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    chunks=st.lists(st.sampled_from([1, 3, 7, 500]), min_size=2, max_size=2, unique=True),
    lanes=st.sampled_from([1, 2]),
    seed=seeds,
)
@pytest.mark.parametrize("setting", OTHERS, ids=lambda setting: setting.name)
@some_nets("hides-layer", "tensor-state")
def test_chunk_length_of_the_stream_changes_no_gradient(
    row: Row, setting: Setting, lengths: list[int], chunks: list[int], lanes: int, seed: int
) -> None:
    """A stream of chunks of any length, and a list of such chunks."""
    results: list[UpdateGrads] = []
    for chunk, kept in zip(chunks, (10, 10_000), strict=True):  # steps before are read again
        for source in (stream(lengths, lanes, chunk, 2), list(stream(lengths, lanes, chunk, 2))):
            torch.manual_seed(seed)
            with mock.patch.object(executor, "KEPT_LANE_STEPS", kept):
                results.append(policy_gradients(row.net(), source, setting.make()))
    assert all(deviation(other, results[0]) < 1e-12 for other in results[1:])


@pytest.mark.covering
@every_setting
@some_rows
def test_gradient_is_zero_across_a_reset(row: Row, setting: Setting) -> None:
    """What came before it is changed, and no gradient changes; without the reset all do."""
    net = row.net()
    data = data_for(net, STEPS, 2)
    mask = data.mask.clone()
    mask[:13] = False
    after_reset, before = data.resets.clone(), data.x.clone()
    after_reset[13] = True
    before[:13] += 1.0

    def results(x: Any, resets: Any) -> UpdateGrads:
        torch.manual_seed(4)
        return policy_gradients(
            net, [PolicyData(x, data.targets, resets, mask).chunk], setting.make()
        )

    assert deviation(results(before, after_reset), results(data.x, after_reset)) == 0
    assert deviation(results(before, data.resets), results(data.x, data.resets)) > 1e-6


@every_setting
def test_carried_state_after_the_epoch_is_that_of_one_long_forward(setting: Setting) -> None:
    net, data = named("hides-cell").net(), PolicyData.draw(STEPS, 2, 0, resets=0.1)
    run = tt.updates(net, [data.chunk], nn.MSELoss(), gradient=setting.make())
    valid = 0
    for update in run:
        assert not any(leaf.requires_grad for leaf in tt.state.tensors(update.state))
        assert not update.loss.requires_grad
        assert not update.outputs.requires_grad
        valid += update.steps
    _, end = net(data.x, start(net, data.x), data.resets)
    assert states_apart(run.state, end) < EXACT
    assert valid == data.mask.sum()


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "a loss of every row": (ModelError, {"loss_fn": nn.MSELoss(reduction="none")}),
    "a sum": (ModelError, {"loss_fn": nn.MSELoss(reduction="sum")}),
    "no tensor": (ModelError, {"loss_fn": lambda y, t: (y - t).square().mean().item()}),
    "a loss that detaches": (
        ModelError,
        {"loss_fn": lambda y, t: (y.detach() - t).square().mean()},
    ),
    "no targets": (DataError, {"chunk": Chunk.from_tensors(torch.zeros(STEPS, 2, 3))}),
    "a bare module": (ModelError, {"net": nn.LSTM(3, 2)}),
}


@pytest.mark.covering
@pytest.mark.parametrize("case", REFUSED)
@every_policy
def test_what_cannot_be_trained_is_refused_and_leaves_no_gradient(
    setting: Setting, case: str
) -> None:
    kind, own = REFUSED[case]
    net, chunk = named("hides-layer").net(), PolicyData.draw(STEPS, 2, 0).chunk
    given: dict[str, Any] = {"net": net, "chunk": chunk, "loss_fn": nn.MSELoss()} | own
    with pytest.raises(kind):
        list(tt.updates(given["net"], [given["chunk"]], given["loss_fn"], gradient=setting.make()))
    assert all(weight.grad is None for weight in given["net"].parameters())


WRONG: list[Callable[[], Policy]] = [
    lambda: tt.Truncated(0),
    lambda: tt.Truncated(100, 50),
    lambda: tt.Truncated(5, burn_in=-1),
    lambda: tt.Exact(chunk=0),
    lambda: tt.Exact(cut_every=0),
    lambda: tt.Exact(clip_adjoint=0.0, chunk=5),
    lambda: tt.Exact(clip_adjoint=math.nan, chunk=5),
    lambda: tt.Exact(clip_adjoint=1.0),  # without the length of its segments
    lambda: tt.Adaptive(0.1, 0, 40),
    lambda: tt.Adaptive(0.1, 5, 4),
    lambda: tt.Adaptive(0.0, 5, 40),
    lambda: tt.Adaptive(1.0, 5, 40),
    lambda: tt.Adaptive(0.1, 5, 40, stride=6),
    lambda: tt.Adaptive(0.1, 5, 40, every=0),
    lambda: tt.Adaptive(0.1, 5, 40, patience=0),
    lambda: tt.Adaptive(0.1, 5, 40, probe=9),
    lambda: tt.Randomized(0),
    lambda: tt.Randomized(100, alpha=1.0),
    lambda: tt.Randomized(100, alpha=math.inf),
    lambda: tt.Randomized(100, grain=0),
    lambda: tt.Randomized(100, grain=101),
]


def test_settings_that_no_plan_can_serve_are_refused() -> None:
    for make in WRONG:
        with pytest.raises(ConfigError):
            make()


@every_policy
def test_gradient_that_is_not_finite_is_refused_and_no_weight_touched(setting: Setting) -> None:
    net, data = named("hides-layer").net(), PolicyData.draw(STEPS, 2, 0)
    data.targets[13] = torch.nan
    before = weights(net)
    with pytest.raises(RunError, match="is not finite"):
        list(tt.updates(net, [data.chunk], nn.MSELoss(), gradient=setting.make()))
    assert apart(weights(net), before) == 0


@every_policy
def test_iterator_of_chunks_is_taken_or_refused_with_what_to_give_instead(setting: Setting) -> None:
    chunks = list(stream([3 * LONG, 3 * LONG], 2, 5, 2))
    once: Any = iter(chunks)
    if setting.reads_again:
        with pytest.raises(DataError):
            policy_gradients(named("hides-layer").net(), once, setting.make())
        return
    torch.manual_seed(1)
    results = policy_gradients(named("hides-layer").net(), once, setting.make())
    torch.manual_seed(1)
    assert (
        deviation(results, policy_gradients(named("hides-layer").net(), chunks, setting.make()))
        == 0
    )


@every_setting
def test_gradients_add_up_until_they_are_zeroed(setting: Setting) -> None:
    """One whole gradient per update: what is in `.grad` is never gone through again."""
    net, data = named("hides-cell").net(), PolicyData.draw(STEPS, 2, 0)
    torch.manual_seed(1)
    results = policy_gradients(net, [data.chunk], setting.make())
    torch.manual_seed(1)
    for _ in tt.updates(net, [data.chunk], nn.MSELoss(), gradient=setting.make()):
        pass
    added = {name: torch.stack([g[name] for *_, g in results]).sum(0) for name in gradients(net)}
    assert apart(gradients(net), added) < EXACT


planned = given(
    steps=st.integers(1, 200),
    stride=st.integers(1, 40),
    further=st.integers(0, 60),
    burn_in=st.integers(0, 30),
    jitter=st.booleans(),
    seed=seeds,
)


def plans(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> list[Window]:
    """The windows of an epoch, planned without data."""
    torch.manual_seed(seed)
    policy = tt.Truncated(stride, stride + further, jitter, burn_in)
    at, results, unused = Progress(), list[Window](), cast("Any", None)
    while True:
        source: Any = SimpleNamespace(remaining=lambda n, at=at: min(n, steps - at.step))
        window, _ = policy.plan(source, at, unused)
        if window is None:
            return results
        results.append(window)
        at = Progress(window.stop, lead=window.keep)


@planned
def test_every_step_is_counted_once_and_every_window_reaches_back_the_horizon(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> None:
    results = plans(steps, stride, further, burn_in, jitter, seed)
    assert [step for w in results for step in range(w.counted, w.stop)] == list(range(steps))
    for w in results:
        assert w.start == (max(0, w.stop - stride - further) if further else w.counted)
        assert w.lead == max(0, w.start - burn_in)


@planned
def test_the_next_window_leads_in_where_a_state_was_kept(
    steps: int, stride: int, further: int, burn_in: int, jitter: bool, seed: int
) -> None:
    results = plans(steps, stride, further, burn_in, jitter, seed)
    assert all(now.keep == later.lead for now, later in pairwise(results))
    assert all(w.lead <= w.keep <= w.stop for w in results)


def test_first_stride_takes_every_length_from_one_to_the_stride_alike() -> None:
    firsts = [plans(30, 5, 0, 0, True, seed)[0].stop for seed in range(250)]
    counts = [firsts.count(length) for length in range(1, 6)]
    assert sum(counts) == 250
    # chi squared, 4 degrees of freedom: one in a thousand
    assert sum((count - 50) ** 2 / 50 for count in counts) < 18.5


@dataclass(frozen=True)
class EveryStride:
    """Truncation after every stride, written as a user would write it."""

    stride: int

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        steps = source.remaining(self.stride)
        stop = at.step + steps
        return Window(at.step, at.step, at.step, stop, stop) if steps else None, at.memory


@dataclass(frozen=True)
class Growing:
    """A stride that grows by one step with every update, from epoch to epoch."""

    first: int

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        updates = at.memory or 0
        window, _ = EveryStride(self.first + updates).plan(source, at, probe)
        return window, updates + (window is not None)


@dataclass(frozen=True)
class Clipped:
    """The exact gradient of windows of 20 steps, the credit clipped to a norm and noted."""

    most: float
    norms: list[Tensor] = field(default_factory=list[Tensor], repr=False)

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        window, memory = EveryStride(20).plan(source, at, probe)
        return window and window._replace(chunk=5, gate=self.gate), memory

    def gate(self, step: int, credit: list[Tensor | None]) -> list[Tensor | None]:
        parts = [part.flatten(1) for part in credit if part is not None]
        norms = torch.cat(parts, dim=1).norm(dim=1)
        self.norms.append(norms)
        factors = (self.most / norms).clamp(max=1)
        return [None if c is None else c * factors.view(-1, *[1] * (c.dim() - 1)) for c in credit]


@dataclass(frozen=True)
class ByHand:
    """`EveryStride` as a policy that no window describes; counts its updates."""

    stride: int

    def update(
        self, net: Carried, source: Source, objective: Objective, at: Progress
    ) -> tuple[Update | None, Progress]:
        chunk = source.take(self.stride)
        if chunk is None:
            return None, at
        before = at.carried
        if before is None:
            before = net.initial_state(chunk.lanes, like=chunk.inputs)
        outputs, after = net(chunk.inputs, before, chunk.resets)
        loss, weight = objective(outputs, chunk)
        loss.backward()
        after, stop = tt.state.detach(after), at.step + chunk.steps
        update = Update(loss.detach(), chunk.valid_steps, after, outputs.detach(), chunk, weight)
        return update, Progress(stop, after, stop, after, (at.memory or 0) + 1)


POLICIES: dict[str, Policy | UpdatePolicy] = {
    "stride": EveryStride(5),
    "growing": Growing(3),
    "clipped": Clipped(1e-3),
    "by hand": ByHand(5),
}


@pytest.mark.parametrize("policy", list(POLICIES.values()), ids=list(POLICIES))
def test_own_policy_resumes_to_the_bit(policy: Policy | UpdatePolicy) -> None:
    through, resumed = run_and_resume(RESUMED["rotation"], policy, 3)
    assert same_bits(through, resumed)


def some_stream() -> tt.Stream:
    return tt.Stream(recordings([40, 31, 17]), 2, 8)


@pytest.mark.parametrize("policy", [EveryStride(5), ByHand(5)], ids=["plan", "update"])
def test_own_policy_equals_the_truncation_that_it_repeats(policy: Policy | UpdatePolicy) -> None:
    net = named("hides-layer").net()
    results = policy_gradients(net, some_stream(), policy)
    assert deviation(results, policy_gradients(net, some_stream(), tt.Truncated(5))) == 0


def test_own_gate_gets_the_credit_of_every_boundary_and_changes_it() -> None:
    """Norms that are only noted change nothing; clipped ones do as much as those of `tt.Exact`."""
    net, noted = named("hides-layer").net(), Clipped(math.inf)
    exact = policy_gradients(net, some_stream(), tt.Exact(chunk=5, cut_every=20))
    assert deviation(policy_gradients(net, some_stream(), noted), exact) == 0
    assert len(noted.norms) >= 6
    assert all((norms > 0).any() for norms in noted.norms)
    limit = tt.Exact(chunk=5, cut_every=20, clip_adjoint=1e-3)
    clipped = policy_gradients(net, some_stream(), Clipped(1e-3))
    assert deviation(clipped, policy_gradients(net, some_stream(), limit)) < 1e-9
    assert deviation(clipped, exact) > 1e-6


def test_own_policy_is_accumulated() -> None:
    net, stream = named("hides-layer").net(), tt.Stream(recordings([40, 40]), 2, 8)
    run = tt.updates(net, stream, nn.MSELoss(), gradient=Growing(3), accumulate=2)
    assert next(run).steps == 2 * (3 + 4)
    assert run.policy_state == 2
