"""How a run shows itself while it goes: a live line on a terminal, plain lines elsewhere."""

import math
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from throughtime.app.train import Moment

_PLAIN_EVERY = 10.0  # seconds between two plain lines


class Progress:
    """`with Progress(console) as progress: progress.show(moment)`."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._console = console
        self._last = -math.inf

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, moment: Moment) -> None:
        """Shows the moment: always on a terminal, every ten seconds and at the end elsewhere."""
        line = progress_line(moment)
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif moment.update >= moment.updates or time.monotonic() - self._last >= _PLAIN_EVERY:
            self._last = time.monotonic()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            sys.stdout.flush()


def progress_line(moment: Moment) -> str:
    """One line: update, loss, metric, speed, time left, memory, and the share of the time spent
    waiting for data.

    Example:
        >>> from throughtime.app.train import Moment
        >>> progress_line(Moment(50, 200, 0.25, {"accuracy": 0.5}, 12_500.0, 75.0, 300_000_000, 0.03))
        'update 50/200  loss 0.2500  accuracy 0.500  12.5k frames/s  1m15s left  300 MB peak
        waiting for data 3%'
    """
    figures = "".join(f"  {name} {value:.3f}" for name, value in list(moment.figures.items())[:2])
    memory = "" if moment.peak_memory is None else f"  {moment.peak_memory / 1e6:.0f} MB peak"
    rate = (
        f"{moment.frames_per_second / 1e3:.1f}k"
        if moment.frames_per_second >= 1e3
        else f"{moment.frames_per_second:.0f}"
    )
    speed = (
        f"{rate} frames/s  {duration(moment.remaining_seconds)} left{memory}  waiting for data"
        f" {moment.waiting:.0%}"
    )
    return f"update {moment.update}/{moment.updates}  loss {moment.loss:.4f}{figures}  {speed}"


def duration(seconds: float) -> str:
    """Seconds as people say them.

    Example:
        >>> duration(59.6), duration(3725)
        ('1m00s', '1h02m')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
