"""Turns: every side of a case runs for a while, then the next, in one process, so that a machine
that is busy now is so for all.

First the sides are checked to compute the same: losses of the first updates, or their gradients
where the weights stay. What disagrees is not timed.
"""

import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from throughtime.bench.cases import Case
from throughtime.bench.peers import PEERS
from throughtime.bench.side import Side
from throughtime.bench.sides import OURS, Make, sides_of
from throughtime.bench.work import Work, work_of
from throughtime.errors import RunError
from throughtime.kernels.library import level
from throughtime.nn import GRU, LSTM, RNN, backend

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative
CHECKED = 20  # updates


@dataclass(frozen=True)
class Settings:
    """How long to look.

    Attributes:
        rounds: turns of every side.
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


def measured(
    case: Case, settings: Settings, peak: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """One row of the results, with the threads that are set.

    Args:
        case: what to measure.
        settings: how long.
        peak: as `machine.peaks` tells it, for the distance to the floor.

    Raises:
        RunError: two sides do not compute the same.
    """
    work, load = work_of(case), os.getloadavg()[0]
    makes, absent = _makes(work, settings.peers)
    apart = checked(work, makes, settings.checked)
    with ExitStack() as stack:
        sides = {name: make(work) for name, make in makes.items()}
        for side in sides.values():
            stack.callback(side.close)
        times = timed(sides, settings.rounds, settings.turn)
    floor = case.flops / max(peak[case.type].values()) / 1e6
    row: dict[str, Any] = {
        "case": case.name,
        "kind": case.kind,
        "threads": torch.get_num_threads(),
        "level": level(),
        "runs": _runs(work),
    }
    row |= {
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "checked": settings.checked,
        "apart": apart,
        "absent": absent,
    }
    row |= {
        "mflops": round(case.flops / 1e6, 3),
        "floor_ms": floor,
        "sides": told(times, case.at_most),
    }
    return row


def _runs(work: Work) -> str:
    """Which code plays the recurrent layer."""
    like = {"LSTM": LSTM, "GRU": GRU, "RNN": RNN}[work.case.cell]
    layer = like(work.case.inputs, work.case.hidden).to(work.case.dtype)
    return str(
        backend(layer, torch.zeros(1, work.case.lanes, work.case.inputs, dtype=work.case.dtype))
    )


def _makes(work: Work, peers: Sequence[str]) -> tuple[dict[str, Make], dict[str, str]]:
    """The sides, and why others are not among them."""
    makes, absent = sides_of(work), dict[str, str]()
    for name in peers if work.case.kind == "train" else ():
        try:
            PEERS[name](work).close()
        except ImportError as error:
            absent[name] = str(error)
        else:
            makes[name] = PEERS[name]
    return makes, absent


def checked(work: Work, makes: Mapping[str, Make], count: int) -> dict[str, float]:
    """The largest relative difference of each side from the first.

    Where steps are reset, the side without resets does another work and has nothing to be compared
    with.

    Raises:
        RunError: it is more than rounding.
    """
    case, found = work.case, dict[str, list[Tensor]]()
    for name, make in makes.items():
        if case.kind != "resets" or name != OURS:
            side = make(work)
            try:
                found[name] = (
                    gradients(side, count)
                    if case.kind == "horizon"
                    else [loss.clone() for loss in side.run(count)]
                )
            finally:
                side.close()
    first, *others = found
    apart = {name: difference(found[name], found[first]) for name in others}
    if not all(far <= TOLERANCE[case.dtype] for far in apart.values()):
        what = "gradients" if case.kind == "horizon" else "losses"
        raise RunError(
            f"{case.name}: the {what} of the first {count} updates are apart by {apart} of their"
            f" size from those of '{first}', expected {TOLERANCE[case.dtype]:g} at most: these"
            " sides do not compute the same, and their times would mean nothing. Find out backend is"
            " right before measuring"
        )
    return apart


def gradients(side: Side, count: int) -> list[Tensor]:
    """Of all weights, after each update."""
    found: list[Tensor] = []
    for _ in range(count):
        side.run(1)
        found.append(
            torch.cat([torch.as_tensor(weight.grad).flatten() for weight in side.net.parameters()])
        )
    return found


def difference(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest, of the largest number there is; NaN and a missing update are infinite."""
    if len(mine) != len(theirs):
        return float("inf")
    far = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, theirs, strict=True)]
    return max(
        (value if value == value else float("inf") for value in far), default=float("inf")
    )  # NaN is unlike itself


def timed(sides: Mapping[str, Side], rounds: int, turn: float) -> dict[str, list[Turn]]:
    """Milliseconds of an update, for each side and round; each round is begun by another side."""
    counts = {name: _count(side, turn) for name, side in sides.items()}
    times: dict[str, list[Turn]] = {name: [] for name in sides}
    names = list(sides)
    for at in range(rounds):
        first = at % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(_turn(sides[name], counts[name]))
    return times


def _count(side: Side, turn: float) -> int:
    """Updates that take about a turn, after some that warm up."""
    side.run(2)
    count = 1
    while (ms := count * _turn(side, count).clock) < turn * 1e3 / 4:
        count *= 2
    return max(1, round(count * turn * 1e3 / ms))


def _turn(side: Side, count: int) -> Turn:
    began, busy = time.perf_counter(), time.process_time()
    side.run(count)
    return Turn(
        (time.perf_counter() - began) / count * 1e3, (time.process_time() - busy) / count * 1e3
    )


def told(times: Mapping[str, Sequence[Turn]], price: bool) -> dict[str, dict[str, Any]]:
    """Milliseconds of each side, and how many times those of the first; where that is the price,
    how many times the second's it is.

    `processor_ratio` is that of processor time, of all threads: on one thread what other processes
    take is not in it.
    """
    base = next(iter(times.values()))
    found: dict[str, dict[str, Any]] = {}
    for name, own in times.items():
        pairs = [
            (mine, theirs) if price else (theirs, mine)
            for mine, theirs in zip(base, own, strict=True)
        ]
        found[name] = {
            "ms": _spread(turn.clock for turn in own),
            "ratio": _spread(a.clock / b.clock for a, b in pairs),
            "processor_ratio": _spread(a.busy / b.busy for a, b in pairs),
        }
    return found


def _spread(values: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    known = list(values)
    if len(known) == 1:
        return known * 3
    return [round(value, 5) for value in statistics.quantiles(known, n=4, method="inclusive")]
