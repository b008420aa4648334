"""Timing in turns: the implementations of a case run one after another, in one process.

So a busy machine slows all of them. Before that, the losses of the first updates are compared, or
their gradients if the weights do not change. Implementations that disagree are not timed.
"""

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from benchmarks.bench.cases import Case
from benchmarks.bench.implementation import Implementation
from benchmarks.bench.implementations import OURS, Make, equals_of, implementations_of
from benchmarks.bench.peers import PEERS
from benchmarks.bench.workload import Workload, workload_of
from torch import Tensor

from throughtime.errors import RunError
from throughtime.kernels.library import level
from throughtime.nn import GRU, LSTM, RNN, backend

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative
CHECKED = 20  # updates
FIXED = {"horizon", "exact"}  # kinds in which the weights stay


@dataclass(frozen=True)
class Settings:
    """How long to look.

    Attributes:
        rounds: turns of every implementation.
        turn: seconds of a turn, at least an update.
        peers: of `PEERS`, backend to measure where they are installed.
        checked: updates whose losses are compared.
    """

    rounds: int = 15
    turn: float = 0.2
    peers: tuple[str, ...] = tuple(PEERS)
    checked: int = CHECKED


class Turn(NamedTuple):
    """Milliseconds of an update: by the clock, and of the processor."""

    clock: float
    busy: float


QUICK = Settings(rounds=5, turn=0.03, peers=())


def measure(
    case: Case, settings: Settings, peak: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """One row of the results, with the threads that are set.

    Args:
        case: what to measure.
        settings: how long.
        peak: as `machine.peaks` tells it, for the distance to the floor.

    Raises:
        RunError: two implementations do not compute the same.
    """
    workload, load = workload_of(case), os.getloadavg()[0]
    makes, absent = _makes(workload, settings.peers)
    checked = 1 if case.kind == "exact" else settings.checked  # of a whole recording
    apart = max_differences(workload, equals_of(workload, makes), checked)
    with ExitStack() as stack:
        implementations = {name: make(workload) for name, make in makes.items()}
        for implementation in implementations.values():
            stack.callback(implementation.close)
        times = timed(implementations, settings.rounds, settings.turn)
    floor = case.flops / max(peak[case.type].values()) / 1e6
    row: dict[str, Any] = {
        "case": case.name,
        "kind": case.kind,
        "threads": torch.get_num_threads(),
        "level": level(),
        "runs": _runs(workload),
    }
    row |= {
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "checked": checked,
        "apart": apart,
        "absent": absent,
    }
    row |= {
        "mflops": round(case.flops / 1e6, 3),
        "floor_ms": floor,
        "implementations": summary(times, case.at_most),
    }
    return row


def _runs(workload: Workload) -> str:
    """Which code plays the recurrent layer."""
    if not workload.case.fused:
        return "torch.nn"
    like = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}[workload.case.cell]
    layer = like(workload.case.inputs, workload.case.hidden).to(workload.case.dtype)
    return str(
        backend(
            layer,
            torch.zeros(1, workload.case.lanes, workload.case.inputs, dtype=workload.case.dtype),
        )
    )


def _makes(workload: Workload, peers: Sequence[str]) -> tuple[dict[str, Make], dict[str, str]]:
    """The implementations, and why others are not among them."""
    makes, absent = implementations_of(workload), dict[str, str]()
    for name in peers if workload.case.kind == "train" else ():
        try:
            PEERS[name](workload).close()
        except ImportError as error:
            absent[name] = str(error)
        else:
            makes[name] = PEERS[name]
    return makes, absent


def max_differences(workload: Workload, makes: Mapping[str, Make], count: int) -> dict[str, float]:
    """The largest relative difference of each implementation from the first.

    With resets, the implementation without resets has another task and is not compared.

    Raises:
        RunError: it is more than rounding.
    """
    case, result = workload.case, dict[str, list[Tensor]]()
    for name, make in makes.items():
        if case.kind != "resets" or name != OURS:
            implementation = make(workload)
            try:
                result[name] = (
                    gradients(implementation, count)
                    if case.kind in FIXED
                    else [loss.clone() for loss in implementation.run(count)]
                )
            finally:
                implementation.close()
    first, *others = result
    apart = {name: difference(result[name], result[first]) for name in others}
    if not all(far <= TOLERANCE[case.dtype] for far in apart.values()):
        what = "gradients" if case.kind in FIXED else "losses"
        raise RunError(
            f"{case.name}: the {what} of the first {count} updates differ from those of"
            f" '{first}' by {apart} of their size, expected at most {TOLERANCE[case.dtype]:g}:"
            " they do not compute the same. Find out which is right before measuring"
        )
    return apart


def gradients(implementation: Implementation, count: int) -> list[Tensor]:
    """Of all weights, after each update."""
    result: list[Tensor] = []
    for _ in range(count):
        implementation.run(1)
        result.append(
            torch.cat(
                [
                    torch.as_tensor(weight.grad).flatten()
                    for weight in implementation.net.parameters()
                ]
            )
        )
    return result


def difference(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest, of the largest number there is; NaN and a missing update are infinite."""
    if len(mine) != len(theirs):
        return float("inf")
    far = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, theirs, strict=True)]
    return max(
        (value if value == value else float("inf") for value in far), default=float("inf")
    )  # NaN is unlike itself


def timed(
    implementations: Mapping[str, Implementation], rounds: int, turn: float
) -> dict[str, list[Turn]]:
    """Milliseconds of an update by implementation and round; rounds start in rotation."""
    counts = {
        name: _count(implementation, turn) for name, implementation in implementations.items()
    }
    times: dict[str, list[Turn]] = {name: [] for name in implementations}
    names = list(implementations)
    for at in range(rounds):
        first = at % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_turn(implementations[name], counts[name]))
    return times


def _count(implementation: Implementation, turn: float) -> int:
    """Updates that take about a turn, after some that warm up."""
    implementation.run(2)
    count = 1
    while (ms := count * _turn(implementation, count).clock) < turn * 1e3 / 4:
        count *= 2
    return max(1, round(count * turn * 1e3 / ms))


def _turn(implementation: Implementation, count: int) -> Turn:
    began, busy = time.perf_counter(), time.process_time()
    implementation.run(count)
    return Turn(
        (time.perf_counter() - began) / count * 1e3, (time.process_time() - busy) / count * 1e3
    )


def summary(times: Mapping[str, Sequence[Turn]], price: bool) -> dict[str, dict[str, Any]]:
    """Milliseconds of each implementation, and their ratio to the first.

    With `price` the ratio is that of the first to the second. `processor_ratio` is the ratio of
    processor time, over all threads, which does not include other processes.
    """
    base = next(iter(times.values()))
    result: dict[str, dict[str, Any]] = {}
    for name, own in times.items():
        pairs = [
            (mine, theirs) if price else (theirs, mine)
            for mine, theirs in zip(base, own, strict=True)
        ]
        result[name] = {
            "ms": _spread(turn.clock for turn in own),
            "ratio": _spread(a.clock / b.clock for a, b in pairs),
            "processor_ratio": _spread(a.busy / b.busy for a, b in pairs),
        }
    return result


def _spread(values: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    known = list(values)
    if len(known) == 1:
        return known * 3
    return [round(value, 5) for value in statistics.quantiles(known, n=4, method="inclusive")]
