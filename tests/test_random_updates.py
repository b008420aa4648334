"""Updates of random configurations against brute force, in float64."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import brute_force
import throughtime as tt
from brute_force import Steps, Task
from step_nets import FEATURES, KINDS, build

TOLERANCE = 1e-12
LOSSES = ("mse", "ce", "weighted", "ignored", "weighted ignored", "smooth")
IGNORED, CLASS_WEIGHTS = 1, (0.5, 2.0, 1.25)


Case = SimpleNamespace  # one configuration; recordings and weights are drawn from its seed


def draw(kind: str, seed: int) -> Case:
    """The case of a seed: about half of all options are at their default."""
    r = random.Random(f"{kind} {seed}")

    def maybe(low: int, high: int, default: int = 0) -> int:
        return r.choice((default, default, r.randint(low, high)))

    lengths = [r.choice((1, r.randint(1, 12), r.randint(10, 40))) for _ in range(r.randint(0, 4))]
    lengths.append(r.randint(10, 40))
    if far := kind == "rotation" and r.random() < 0.4:
        lengths.append(r.randint(100, 160))
    if r.random() < 0.25:  # lanes that start recordings together
        lengths = [r.randint(1, 25)] * r.choice((2, 4, 6))
    lanes = min(r.randint(1, 4), sum(lengths))
    shortest = (sum(lengths) // lanes + max(lengths)) // 16  # stride: brute force takes its time
    stride = max(shortest, r.choice((1, 2, r.randint(1, 9), r.randint(5, 30))))
    over = r.choice((0, 1, r.randint(0, 10), r.randint(0, 40), 120 if far else 0))
    policy = r.choice(("truncated", "truncated", "exact", "cut", "randomized"))
    segment, loss = r.choice((None, r.randint(1, 15))), r.choice(LOSSES)
    variant = r.randrange(3)
    return Case(
        kind=kind,
        seed=seed,
        variant=variant,
        fused=kind == "fused" or (kind == "lstm" and variant == 2),
        lengths=tuple(lengths),
        lanes=lanes,
        chunk=r.choice((1, r.randint(1, 12), r.randint(5, 60))),
        warm_up=maybe(1, 5),
        missing=r.choice((0.0, 0.0, 0.3, 0.9)),
        missing_inputs=r.random() < 0.15,
        as_list=r.random() < 0.15,
        loss=loss,
        columns=r.choice((1, 3)) if loss == "mse" else 3,
        epochs=maybe(2, 2, default=1),
        accumulate=1 if policy == "randomized" else maybe(2, 4, default=1),
        frozen=r.random() < 0.1,
        added=r.random() < 0.1,
        policy=policy,
        stride=stride,
        horizon=stride + over,
        jitter=r.random() < 0.3,
        burn_in=maybe(1, 15),
        segment=segment,
        limit=r.choice((None, 10 ** r.uniform(-3, -1))) if segment else None,
        grain=r.randint(1, stride),
        alpha=r.uniform(2.0, 8.0),
    )


class Data(NamedTuple):
    """Recordings in which numbers are missing; the inputs and targets to count with."""

    recordings: list[dict[str, Tensor]]
    inputs: list[Tensor]
    targets: list[Tensor]
    valid: list[Tensor]


def record(case: Case) -> Data:
    torch.manual_seed(case.seed)
    data = Data([], [], [], [])
    for length in case.lengths:
        x = torch.randn(length, FEATURES).double()
        y, absent = torch.randn(length, case.columns).double(), float("nan")
        if case.loss != "mse":
            y, absent = torch.randint(case.columns, (length,)), -100
        valid = torch.rand(length) >= case.missing
        lost = torch.rand(length) < (0.1 if case.missing_inputs else 0.0)
        y_given, x_given = y.clone(), x.clone()
        y_given[~valid] = absent
        if case.missing_inputs:
            x_given[lost, 0], x[lost, 0] = float("nan"), 0.0
        series = {
            "inputs": x_given,
            "targets": y_given.squeeze(-1) if case.columns == 1 else y_given,
        }
        data.recordings.append(series)
        data.inputs.append(x)
        data.targets.append(y)
        data.valid.append(valid & ~lost)
    return data


def lay_out(case: Case, data: Data, recording: Tensor, position: Tensor) -> Steps:
    """An epoch `(T, B)` from the index of its recordings; -1 is a lane with nothing left."""
    steps, lanes = recording.shape
    inputs, targets = (
        torch.zeros(steps, lanes, *parts[0].shape[1:], dtype=parts[0].dtype)
        for parts in (data.inputs, data.targets)
    )
    valid, resets = torch.zeros(steps, lanes).bool(), torch.ones(steps, lanes).bool()
    for lane in range(lanes):
        age, before = 0, (-1, 0)
        for step in range(steps):
            index, row = int(recording[step, lane]), int(position[step, lane])
            if index < 0:
                continue  # a reset, which changes nothing any more
            age = age + 1 if before == (index, row - 1) else 0
            before = index, row
            resets[step, lane] = age == 0
            inputs[step, lane], targets[step, lane] = (
                data.inputs[index][row],
                data.targets[index][row],
            )
            valid[step, lane] = data.valid[index][row] and age >= case.warm_up
    return Steps(inputs, targets, resets, valid)


def loss_of(case: Case) -> tuple[nn.Module, Callable[[Tensor], float]]:
    """The loss, and the weight of targets in a mean of its means."""
    if case.loss == "mse":
        return nn.MSELoss(), len
    weights = torch.tensor(CLASS_WEIGHTS if "weighted" in case.loss else (1.0, 1.0, 1.0)).double()
    ignored = IGNORED if "ignored" in case.loss else -100
    loss = nn.CrossEntropyLoss(
        weights.clone() if "weighted" in case.loss else None,
        ignore_index=ignored,
        label_smoothing=0.1 if case.loss == "smooth" else 0.0,
    )
    return loss, lambda targets: float(weights[targets][targets != ignored].sum())


def policy_of(case: Case) -> Any:
    match case.policy:
        case "truncated":
            return tt.Truncated(
                case.stride,
                case.horizon,
                jitter=case.jitter,
                burn_in=case.burn_in,
            )
        case "randomized":
            return tt.Randomized(case.stride, case.alpha, case.grain)
        case _:
            options: dict[str, Any] = {"chunk": case.segment} if case.segment else {}
            cut = case.stride if case.policy == "cut" else None
            return tt.Exact(**options, cut_every=cut, clip_adjoint=case.limit)


@cache
def probe_net() -> Any:
    return tt.carry(nn.Sequential(nn.GRU(1, 1), nn.Linear(1, 1)))


def random_stops(policy: Any, steps: int) -> list[int]:
    """The ends of strides that the next draws of torch's generator give."""
    net, state = probe_net(), torch.get_rng_state()
    stream = tt.Stream({"inputs": torch.zeros(steps, 1), "targets": torch.zeros(steps)}, 1, 7)
    updates = tt.updates(net, stream, nn.MSELoss(), gradient=policy)
    stops = [stream.position or steps for _ in updates]
    torch.set_rng_state(state)
    return stops


def task_of(case: Case, policy: Any, steps: Steps) -> Task:
    """The epoch with the updates that the documentation of the policy promises."""
    loss_fn, weigh = loss_of(case)
    task = Task(steps, (), loss_fn, weigh, case.accumulate)
    count, stride = len(steps.inputs), case.stride
    if case.policy == "truncated":
        first = stride
        if case.jitter:
            first = random_stops(tt.Truncated(stride, jitter=True), 2 * stride)[0]
            assert 1 <= first <= stride
        stops = brute_force.every(count, stride, first)
        return task._replace(spans=brute_force.truncated(stops, stride, case.horizon, case.burn_in))
    if case.policy == "randomized":
        spans = brute_force.whole(random_stops(policy, count))

        def gate(age: int, grads: Sequence[Tensor]) -> list[Tensor]:
            weight = policy.inflation(age) / policy.inflation(age - case.grain)
            return [grad * weight for grad in grads]

        per = float(stride * steps.resets.shape[1])
        return task._replace(spans=spans, gate=gate, gate_every=case.grain, per=per)
    if case.policy == "cut":
        stops = brute_force.every(count, stride)
    else:
        stops = [*steps.resets.all(1).nonzero().flatten().tolist()[1:], count]
    task = task._replace(spans=brute_force.whole(stops))
    if case.limit is None or case.segment is None:
        return task
    return task._replace(gate=brute_force.clipped(case.limit), gate_every=case.segment)


class Nets(NamedTuple):
    """The carried net, and the one of brute force."""

    ours: Any
    plain: Any


@cache
def prepared(kind: str, classes: int, variant: int, *, fused: bool) -> Nets:
    """Both nets; the ways of calling a module are tried once for all cases."""
    torch.manual_seed(0)
    module, plain = build(kind, classes, variant)
    return Nets(tt.carry(module.double(), fused=fused), plain.double())


def start(case: Case) -> Nets:
    """Both nets with the same random weights, and no gradient."""
    nets = prepared(case.kind, case.columns, case.variant, fused=case.fused)
    torch.manual_seed(case.seed)
    with torch.no_grad():
        for weight in nets.plain.parameters():
            weight.normal_(0, 0.5)
    if case.kind == "rotation":
        nn.init.orthogonal_(nets.plain.turn.weight)
    nets.ours.load_state_dict(nets.plain.state_dict())
    for net in nets:
        net.zero_grad()
        for number, weight in enumerate(net.parameters()):
            weight.requires_grad_(not (case.frozen and number == 1))
    return nets


def difference(actual: Iterable[Tensor | None], expected: Iterable[Tensor | None]) -> float:
    """The largest relative to its tensor, or to a thousandth of the largest of all tensors."""
    pairs = [
        tuple(torch.zeros(()) if value is None else value.detach() for value in pair)
        for pair in zip(actual, expected, strict=True)
    ]
    sizes = torch.stack([theirs.abs().max() for _, theirs in pairs])
    errors = torch.stack([(ours - theirs).abs().max() for ours, theirs in pairs])
    result = float((errors / sizes.clamp(min=float(sizes.max()) * 1e-3 + 1e-30)).max())
    return result if math.isfinite(result) else math.inf


def deviations(case: Case) -> Iterator[float]:
    """The relative difference of loss and gradients after every update, and of the weights."""
    nets, data = start(case), record(case)
    stream = tt.Stream(
        data.recordings,
        lanes=case.lanes,
        chunk=case.chunk,
        seed=case.seed,
        warm_up=case.warm_up,
        missing="mask" if case.missing_inputs else "error",
    )
    rate = 1e-4 if case.kind == "rotation" else 0.05
    optimizers = [torch.optim.SGD(net.parameters(), rate) for net in nets]
    policy = policy_of(case)
    for _ in range(case.epochs):
        chunk = stream.read(0, stream.steps)
        task = task_of(case, policy, lay_out(case, data, chunk.recording, chunk.position))
        updates = tt.updates(
            nets.ours,
            list(stream) if case.as_list else stream,
            task.loss_fn,
            gradient=policy,
            accumulate=case.accumulate,
        )
        answers = brute_force.updates(nets.plain, task)
        for number, (update, answer) in enumerate(zip_longest(updates, answers)):
            if update is None or answer is None or update.steps != answer.steps:
                yield math.inf
                return
            yield difference([update.loss], [answer.loss])
            yield difference(*([weight.grad for weight in net.parameters()] for net in nets))
            for optimizer in optimizers if number % 2 or not case.added else ():
                optimizer.step()
                optimizer.zero_grad()
        yield difference(*(net.parameters() for net in nets))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_updates_equal_brute_force(kind: str, seeds: int) -> None:
    for seed in range(seeds):
        case = draw(kind, seed)
        assert max(deviations(case)) <= TOLERANCE, case
