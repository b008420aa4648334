"""Where to cut: plans of integers (no torch), which one small executor runs.

The plan of Williams & Peng's BPTT(h; h'): every `stride` steps go back through the last `horizon`
steps, and count the losses of the newest `stride` steps only, so that each loss counts once.
"""

from collections.abc import Iterator
from typing import NamedTuple

from throughtime.errors import ConfigError


class Window(NamedTuple):
    """One update: run `start` to `stop` with a graph, count the losses from `counted` on.

    The state entering step `keep` is remembered: the next window starts there.
    """

    start: int
    counted: int
    stop: int
    keep: int


def window(counted: int, stop: int, overlap: int) -> Window:
    """The window that counts the losses from `counted` to before `stop` and looks `overlap` steps further back."""
    return Window(max(0, counted - overlap), counted, stop, max(0, stop - overlap))


def windows(steps: int, stride: int, horizon: int) -> Iterator[Window]:
    """The windows of `steps` steps, in order; the last one counts what is left.

    Example:
        >>> from throughtime.gradient.schedule import windows
        >>> [(w.start, w.counted, w.stop) for w in windows(10, stride=4, horizon=6)]
        [(0, 0, 4), (2, 4, 8), (6, 8, 10)]
    """
    check(stride, horizon)
    for counted in range(0, steps, stride):
        yield window(counted, min(counted + stride, steps), horizon - stride)


def check(stride: int, horizon: int) -> None:
    """Refuses what no plan can serve."""
    if not isinstance(stride, int) or not isinstance(horizon, int):  # pyright: ignore[reportUnnecessaryIsInstance]  # a user's 1e3 is a float
        raise ConfigError(f"stride={stride!r}, horizon={horizon!r}: expected whole numbers of steps")
    if stride < 1:
        raise ConfigError(f"stride={stride}: expected at least 1 step between two updates")
    if horizon < stride:
        raise ConfigError(
            f"horizon={horizon} is below stride={stride}: the first losses of every stride would reach back no step at all. "
            f"Take horizon >= stride, or stride={max(1, horizon)}."
        )
