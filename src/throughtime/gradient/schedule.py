"""Plans of where to cut: integers only, no torch.

The plan of Williams & Peng's BPTT(h; h'): every `stride` steps go back through the last `horizon`
steps, and count the losses of the newest `stride` steps only, so that each loss counts once.

The plan of a checkpointed pass: segments of `chunk` steps, run forward in order and backward in
reverse order.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from throughtime.errors import ConfigError

# bytes of graph: on a 2-core Zen 5, 8 to 30 MB run fastest for hidden sizes 8 to 128, twice as fast
# as 300 MB
FASTEST_GRAPH = 16_000_000


class Window(NamedTuple):
    """One update, in steps: run `lead` to `start` without a graph, then to `stop` with one.

    The losses from `counted` on count. The state entering step `keep` is stored: the lead of the
    next window begins there.
    """

    lead: int
    start: int
    counted: int
    stop: int
    keep: int


@lru_cache  # the same few windows, update after update
def window(
    lead: int,
    counted: int,
    stop: int,
    following: int,
    stride: int,
    horizon: int,
    burn_in: int = 0,
) -> Window:
    """The window that counts the losses from `counted` to before `stop`.

    It reaches back `horizon` steps from its end, or to `lead`, where the state is stored. So a last
    window shorter than the stride reaches back as far as any other, except where `horizon ==
    stride` and no step is run twice with a graph.

    Args:
        lead: the first step that can be run.
        counted: the first step whose loss counts.
        stop: the end.
        following: steps that the next window counts: the stride, or fewer at the end.
        stride: steps between two updates.
        horizon: steps that credit may flow back.
        burn_in: steps before the next window that are run again without a graph.
    """
    if horizon == stride:
        return Window(lead, counted, counted, stop, max(lead, stop - burn_in))
    return Window(
        lead,
        max(lead, stop - horizon),
        counted,
        stop,
        min(stop, max(lead, stop + following - horizon - burn_in)),
    )


def windows(
    steps: int, stride: int, horizon: int, *, burn_in: int = 0, first: int | None = None
) -> Iterator[Window]:
    """The windows of `steps` steps, in order.

    The first one counts `first` steps, the last one those that are left.

    Example:
        >>> from throughtime.gradient.schedule import windows
        >>> [(w.start, w.counted, w.stop) for w in windows(10, stride=4, horizon=6)]
        [(0, 0, 4), (2, 4, 8), (4, 8, 10)]
    """
    check_horizon(stride, horizon)
    lead = counted = 0
    while counted < steps:
        stop = min(counted + (stride if counted or first is None else first), steps)
        following = min(stride, steps - stop)
        plan = window(lead, counted, stop, following, stride, horizon, burn_in)
        yield plan
        lead, counted = plan.keep, stop


def check_horizon(stride: int, horizon: int) -> None:
    """Refuse settings without a plan."""
    ks = (stride, horizon)  # a user's 1e3 is a float
    if not all(isinstance(k, int) for k in ks):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"stride={stride!r}, horizon={horizon!r}: expected whole numbers of steps"
        )
    if stride < 1:
        raise ConfigError(f"stride={stride}: expected at least 1 step between two updates")
    if horizon < stride:
        raise ConfigError(
            f"horizon={horizon} is below stride={stride}: the first losses of every stride would"
            f" reach back no step at all. Take horizon >= stride, or stride={max(1, horizon)}."
        )


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse a setting that is not a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: expected a whole number of at least {least}")


def pieces(steps: int, chunk: int, edges: Iterable[int] = ()) -> tuple[int, ...]:
    """Bounds of segments of at most `chunk` steps, with a bound at each of `edges`.

    Example:
        >>> from throughtime.gradient.schedule import pieces
        >>> pieces(10, 4), pieces(10, 4, edges=[5])
        ((0, 4, 8, 10), (0, 4, 5, 9, 10))
    """
    cuts = sorted({0, steps, *(edge for edge in edges if 0 < edge < steps)})
    return (*(at for start, stop in pairwise(cuts) for at in range(start, stop, chunk)), steps)


class WindowGroup(NamedTuple):
    """Windows that do not overlap: one backward pass over all steps sums their gradients.

    `spans` are the steps whose losses count, `cuts` the steps before which credit ends.
    """

    spans: tuple[tuple[int, int], ...]
    cuts: frozenset[int]

    def counts(self, step: int) -> bool:
        """Whether the loss of a step counts in this group."""
        index = bisect_right(self.spans, (step, math.inf)) - 1
        return index >= 0 and step < self.spans[index][1]


def group_windows(plan: Iterable[Window]) -> list[WindowGroup]:
    """The windows of a plan in as few groups: one without overlap, else about horizon / stride.

    Example:
        >>> from throughtime.gradient.schedule import group_windows, windows
        >>> [group.spans for group in group_windows(windows(9, stride=3, horizon=6))]
        [((0, 3), (6, 9)), ((3, 6),)]
    """
    groups: list[list[Window]] = []
    for window in plan:
        free = next((group for group in groups if group[-1].stop <= window.start), None)
        if free is None:
            groups.append([window])
        else:
            free.append(window)
    return [
        WindowGroup(
            tuple((w.counted, w.stop) for w in group),
            frozenset(w.start for w in group if w.start),
        )
        for group in groups
    ]


class GraphSize(NamedTuple):
    """Bytes that a net needs: per step of graph, per graph, and per stored state.

    `nodes` is how many nodes the graph of one step has: several in a Python loop over steps, none
    in a fused layer.
    """

    step: float
    fixed: float
    edge: float
    nodes: float = 0.0

    def total(self, steps: int, chunk: int, *, stored: bool) -> float:
        """Bytes for a pass of `steps` steps in segments of `chunk`.

        `stored` is whether the states between segments stay in this memory.
        """
        return (
            self.fixed
            + chunk * self.step
            + (self.edge * math.ceil(steps / chunk) if stored else self.edge)
        )


def best_chunk(
    steps: int,
    size: GraphSize,
    budget: float,
    *,
    stored: bool = True,
    target: float | None = FASTEST_GRAPH,
) -> int:
    """The segment length that runs fastest within `budget` bytes.

    On a CPU a graph of about 16 MB (`target`) stays in cache and makes the cost of a call small.
    If the states between such short segments do not fit, the shortest segments that fit are taken.
    The least memory of all is needed near sqrt(steps * edge / step).

    Raises:
        ConfigError: the budget is too small; the message says how much is needed, and what else
            helps.

    Example:
        >>> from throughtime.gradient.schedule import GraphSize, best_chunk
        >>> best_chunk(100_000, GraphSize(step=8_000, fixed=0, edge=1_000), budget=512e6)
        2000
    """
    leanest = _leanest(steps, size) if stored else 1
    if size.total(steps, leanest, stored=stored) > budget:
        raise ConfigError(_too_small(steps, leanest, size, budget, stored))
    fast = steps if target is None else min(steps, max(1, int(target / max(size.step, 1))))
    if size.total(steps, fast, stored=stored) > budget:
        fast = _nearest_fitting(
            fast, leanest, lambda chunk: size.total(steps, chunk, stored=stored) <= budget
        )
    return even(steps, fast)


def even(steps: int, chunk: int) -> int:
    """The length that makes as many segments of nearly equal length."""
    return -(-steps // -(-steps // chunk))


def _leanest(steps: int, size: GraphSize) -> int:
    """The segment length that takes least memory: near sqrt(steps * edge / step)."""
    root = math.isqrt(steps)
    lengths = {*range(1, root + 1), *(-(-steps // count) for count in range(1, root + 2))}
    return min(lengths, key=lambda chunk: size.total(steps, chunk, stored=True))


def _nearest_fitting(target: int, fitting: int, fits: Callable[[int], bool]) -> int:
    """The length closest to the target that fits, by bisection."""
    while abs(target - fitting) > 1:
        middle = (target + fitting) // 2
        target, fitting = (target, middle) if fits(middle) else (middle, fitting)
    return fitting


def _too_small(steps: int, leanest: int, size: GraphSize, budget: float, stored: bool) -> str:
    least = size.total(steps, leanest, stored=stored)
    edges = f", the states at the chunks' edges {in_bytes(size.edge)} each" if stored else ""
    instead = (
        "offload='cpu' or offload=FOLDER for the edge states, or cut_every=STEPS"
        if stored
        else "fewer lanes"
    )
    return (
        f"a memory of {in_bytes(budget)} is too small for {steps:,} steps: the graph of a single"
        f" step takes {in_bytes(size.fixed + size.step)}{edges}; at least {in_bytes(least)} are"
        f" needed, with chunks of {leanest}. Give memory='{math.ceil(least * 1.05 / 1e3)}kB', or"
        f" {instead}."
    )


def in_bytes(amount: float) -> str:
    """An amount of memory in readable units.

    Example:
        >>> from throughtime.gradient.schedule import in_bytes
        >>> in_bytes(512e6), in_bytes(900)
        ('512 MB', '900 bytes')
    """
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= 0.9995 * size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount:.0f} byte" + ("" if round(amount) == 1 else "s")


def bytes_in(memory: str | int | float) -> float:
    """The number of bytes in a setting like "512MB", "2 GB" or 512e6.

    1 MB is 10^6 bytes, 1 MiB is 2^20.

    Raises:
        ConfigError: it is not an amount of memory.
    """
    units = {"": 1, "b": 1, "byte": 1, "bytes": 1}
    units |= {f"{prefix}b": 10 ** (3 * i) for i, prefix in enumerate("kmgtp", 1)}
    units |= {f"{prefix}ib": 2 ** (10 * i) for i, prefix in enumerate("kmgtp", 1)}
    text = str(memory).strip().lower()
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        amount = float(number) * units[text[len(number) :].strip()]
    except (ValueError, KeyError):
        amount = math.nan
    if not amount > 0 or math.isinf(amount):
        raise ConfigError(
            f"memory={memory!r}: expected an amount like '512MB', '2GiB', or a number of bytes"
        )
    return amount
