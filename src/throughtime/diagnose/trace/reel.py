"""What updates in one call are seen to do: the kernel writes into frames that were laid out once,
and nothing is taken apart until asked.

One frame is written to, others hold the last passes; when a newer one has come the oldest is
written to again. What somebody reads is copied first. So an update pays for a pointer or two,
memory stays as it is, and what was read stays true.
"""

from collections.abc import Sequence
from weakref import ref

from throughtime.diagnose.trace.fused import Told
from throughtime.diagnose.trace.passes import History, Pass, Run
from throughtime.kernels.fused_step import Room
from throughtime.kernels.recurrent import Call

NO_TASK = -1  # as torch counts the runs of its engine


class Reel:
    """The frames of one size of update.

    Args:
        history: where passes are kept; not kept alive.
        calls: what captures, each with the name of its track, in the order of play.
    """

    def __init__(self, history: History, calls: Sequence[tuple[str, Call]]) -> None:
        self._history, self._calls = ref(history), calls
        self._free: Frame | None = None
        self._now = self._new()

    def _new(self) -> "Frame":
        return Frame(
            self, [track for track, _ in self._calls], [Room(call) for _, call in self._calls]
        )

    def point(self) -> None:
        """The update that comes is written where nothing is kept."""
        for room in self._now.rooms:
            room.point()

    def keep(self) -> None:
        """It has been made."""
        history, frame = self._history(), self._now
        if history is not None:
            history.add(frame)
            self._now, self._free = self._free or self._new(), None

    def give_back(self, frame: "Frame") -> None:
        """It may be written to again; one is enough."""
        self._free = frame


class Frame:
    """What one update was seen to do, in memory that will be used again: a pass that nobody has read."""

    def __init__(self, reel: Reel, tracks: Sequence[str], rooms: Sequence[Room]) -> None:
        self._reel, self._tracks, self.rooms = reel, tracks, rooms

    def read(self) -> Pass:
        """A copy, with the layers in the order in which a backward pass comes to them."""
        run = Run(NO_TASK)
        for track, room in zip(reversed(self._tracks), reversed(self.rooms), strict=True):
            run.note(track, 0, Told(room.cell, room.captured.clone(), room.shape, back=False), None)
        return Pass((run,))

    def forget(self) -> None:
        """Nobody will read it."""
        self._reel.give_back(self)
