"""Where to cut: plans of integers (no torch), which one small executor runs.

The plan of Williams & Peng's BPTT(h; h'): every `stride` steps go back through the last `horizon`
steps, and count the losses of the newest `stride` steps only, so that each loss counts once.

The plan of a sweep: pieces of `chunk` steps, run forward one after another and backward in turn.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from throughtime.errors import ConfigError

# bytes of graph: on a 2-core Zen 5, 8 to 30 MB run fastest for hidden sizes 8 to 128, twice as fast
# as 300 MB
SWEET_SPOT = 16_000_000


class Window(NamedTuple):
    """One update: run `lead` to `start` without a graph, then to `stop` with one; count the losses
    from `counted` on.

    The state entering step `keep` is remembered: the next window's lead begins there.
    """

    lead: int
    start: int
    counted: int
    stop: int
    keep: int


def window(
    lead: int,
    counted: int,
    stop: int,
    ahead: Callable[[int], int],
    stride: int,
    horizon: int,
    burn_in: int = 0,
) -> Window:
    """The window that counts the losses from `counted` to before `stop`; `ahead` tells how many of
    the next steps there are.

    It reaches back `horizon` steps from its end, or to `lead`, where the state is known: a last
    window shorter than the stride sees back as far as any other, except where `horizon == stride`
    and no step is run twice with a graph.
    """
    if horizon == stride:
        return Window(lead, counted, counted, stop, max(lead, stop - burn_in))
    return Window(
        lead,
        max(lead, stop - horizon),
        counted,
        stop,
        min(stop, max(lead, stop + ahead(stride) - horizon - burn_in)),
    )


def windows(
    steps: int, stride: int, horizon: int, *, burn_in: int = 0, first: int | None = None
) -> Iterator[Window]:
    """The windows of `steps` steps, in order; the first counts `first` steps, the last what is
    left.

    Example:
        >>> from throughtime.gradient.schedule import windows
        >>> [(w.start, w.counted, w.stop) for w in windows(10, stride=4, horizon=6)]
        [(0, 0, 4), (2, 4, 8), (4, 8, 10)]
    """
    check(stride, horizon)
    lead = counted = 0
    while counted < steps:
        stop = min(counted + (stride if counted or first is None else first), steps)
        left = steps - stop
        found = window(
            lead,
            counted,
            stop,
            lambda wanted, left=left: min(wanted, left),
            stride,
            horizon,
            burn_in,
        )
        yield found
        lead, counted = found.keep, stop


def check(stride: int, horizon: int) -> None:
    """Refuses what no plan can serve."""
    # a user's 1e3 is a float
    if not isinstance(stride, int) or not isinstance(horizon, int):  # pyright: ignore[reportUnnecessaryIsInstance]
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


def whole(name: str, value: object, least: int) -> None:
    """Refuses a setting that is no whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: expected a whole number of at least {least}")


def pieces(steps: int, chunk: int, edges: Iterable[int] = ()) -> tuple[int, ...]:
    """Where the pieces of a sweep begin and end: at every one of `edges`, and after at most `chunk`
    steps in between.

    Example:
        >>> from throughtime.gradient.schedule import pieces
        >>> pieces(10, 4), pieces(10, 4, edges=[5])
        ((0, 4, 8, 10), (0, 4, 5, 9, 10))
    """
    cuts = sorted({0, steps, *(edge for edge in edges if 0 < edge < steps)})
    return (*(at for start, stop in pairwise(cuts) for at in range(start, stop, chunk)), steps)


class Course(NamedTuple):
    """Windows that do not overlap, so that one backward pass over the whole stretch gives the sum
    of their gradients.

    `spans` are the steps whose losses count, `cuts` the places where credit ends.
    """

    spans: tuple[tuple[int, int], ...]
    cuts: frozenset[int]

    def counts(self, step: int) -> bool:
        """Whether the loss of a step counts here."""
        index = bisect_right(self.spans, (step, math.inf)) - 1
        return index >= 0 and step < self.spans[index][1]


def courses(plan: Iterable[Window]) -> list[Course]:
    """The windows of a plan as few courses: one without overlap, else about horizon / stride.

    Example:
        >>> from throughtime.gradient.schedule import courses, windows
        >>> [course.spans for course in courses(windows(9, stride=3, horizon=6))]
        [((0, 3), (6, 9)), ((3, 6),)]
    """
    found: list[list[Window]] = []
    for window in plan:
        free = next((course for course in found if course[-1].stop <= window.start), None)
        if free is None:
            found.append([window])
        else:
            free.append(window)
    return [
        Course(
            tuple((w.counted, w.stop) for w in course),
            frozenset(w.start for w in course if w.start),
        )
        for course in found
    ]


class Size(NamedTuple):
    """Bytes that a net needs: for the graph of one step, for any graph at all, for the state at one
    edge.

    `tensors` is how many tensors the graph of one step saves: several in a Python loop over steps,
    none in a fused layer.
    """

    step: float
    fixed: float
    edge: float
    tensors: float = 0.0

    def of(self, steps: int, chunk: int, *, kept: bool) -> float:
        """Bytes for a sweep of `steps` steps in pieces of `chunk`.

        `kept` is whether edge states stay in this memory.
        """
        return (
            self.fixed
            + chunk * self.step
            + (self.edge * math.ceil(steps / chunk) if kept else self.edge)
        )


def best_chunk(
    steps: int, size: Size, budget: float, *, kept: bool = True, sweet: float | None = SWEET_SPOT
) -> int:
    """The piece length that runs fastest within `budget` bytes.

    On a CPU (`sweet`) a graph of some 16 MB stays near the processor and makes the cost of a call
    small. Where the edge states of so short pieces do not fit, the shortest that fit are taken; the
    least memory of all is needed near sqrt(steps * edge / step).

    Raises:
        ConfigError: the budget is below the least that is needed; it says how much that is, and
            what else helps.

    Example:
        >>> from throughtime.gradient.schedule import Size, best_chunk
        >>> best_chunk(100_000, Size(step=8_000, fixed=0, edge=1_000), budget=512e6)
        2000
    """
    leanest = _leanest(steps, size) if kept else 1
    if size.of(steps, leanest, kept=kept) > budget:
        raise ConfigError(_too_small(steps, leanest, size, budget, kept))
    fast = steps if sweet is None else min(steps, max(1, int(sweet / max(size.step, 1))))
    if size.of(steps, fast, kept=kept) > budget:
        fast = _nearest_fitting(
            fast, leanest, lambda chunk: size.of(steps, chunk, kept=kept) <= budget
        )
    return even(steps, fast)


def even(steps: int, chunk: int) -> int:
    """The length that makes as many pieces of nearly equal length."""
    return -(-steps // -(-steps // chunk))


def _leanest(steps: int, size: Size) -> int:
    """The piece length that takes least memory: near sqrt(steps * edge / step), where pieces come out even."""
    root = math.isqrt(steps)
    lengths = {*range(1, root + 1), *(-(-steps // count) for count in range(1, root + 2))}
    return min(lengths, key=lambda chunk: size.of(steps, chunk, kept=True))


def _nearest_fitting(wish: int, fitting: int, fits: Callable[[int], bool]) -> int:
    """The length closest to the wish that fits, by halving the way between one that fits and one that does not."""
    while abs(wish - fitting) > 1:
        middle = (wish + fitting) // 2
        wish, fitting = (wish, middle) if fits(middle) else (middle, fitting)
    return fitting


def _too_small(steps: int, leanest: int, size: Size, budget: float, kept: bool) -> str:
    least = size.of(steps, leanest, kept=kept)
    edges = f", the states at the chunks' edges {in_bytes(size.edge)} each" if kept else ""
    instead = (
        "offload='cpu' or offload=FOLDER for the edge states, or a segment"
        if kept
        else "fewer lanes"
    )
    return (
        f"a memory of {in_bytes(budget)} is too small for {steps:,} steps: the graph of a single"
        f" step takes {in_bytes(size.fixed + size.step)}{edges}; at least {in_bytes(least)} are"
        f" needed, with chunks of {leanest}. Give memory='{math.ceil(least * 1.05 / 1e3)}kB', or"
        f" {instead}."
    )


def in_bytes(amount: float) -> str:
    """An amount of memory as people write it.

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
    """The number of bytes in a setting like "512MB", "2 GB" or 512e6; 1 MB is 10^6 bytes, 1 MiB is
    2^20.

    Raises:
        ConfigError: it is no amount of memory.
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
