"""One way of doing the work, as something that can be run for so many updates and then waits for its next turn."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor, nn

WAIT = 600.0  # seconds for a thread to end


class Side(Protocol):
    """Runs updates of its net, in turns."""

    net: nn.Module

    @abstractmethod
    def run(self, count: int) -> list[Tensor]:
        """So many updates; their losses."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything."""


class Loop:
    """A loop that is the side's own: a generator of losses, one for each update.

    Args:
        net: which trains.
        losses: without end.
        around: is open for as long as a turn lasts.
    """

    def __init__(
        self,
        net: nn.Module,
        losses: Iterator[Tensor],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.net, self._losses, self._around = net, losses, around

    def run(self, count: int) -> list[Tensor]:
        """So many updates; their losses."""
        with self._around():
            return list(islice(self._losses, count))

    def close(self) -> None:
        """Nothing is held but the net."""


class _Over(BaseException):  # not an Exception, so that no trainer survives it
    """Ends the trainer of a side that is closed."""


class Trainer:
    """A loop that belongs to a library: it plays in a thread, which stops after the last step of
    each turn.

    Args:
        net: which trains.
        optimizer: steps once for each update.
        epoch: trains, and returns sooner or later.
        losses: where the loss of each update is put.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        epoch: Callable[[], object],
        losses: list[Tensor],
    ) -> None:
        self.net, self._epoch, self._losses = net, epoch, losses
        self._left, self._over, self._threads = 0, False, torch.get_num_threads()
        self._error: BaseException | None = None
        self._mine, self._done = threading.Semaphore(0), threading.Semaphore(0)
        optimizer.register_step_post_hook(self._stepped)
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def run(self, count: int) -> list[Tensor]:
        """So many updates; their losses."""
        self._left = count
        self._losses.clear()
        self._mine.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return list(self._losses)

    def close(self) -> None:
        """Ends the thread."""
        self._over = True
        self._mine.release()
        self._thread.join(WAIT)

    def _play(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts for each thread by itself
        try:
            self._wait()
            while True:
                self._epoch()
        except _Over:
            return
        except BaseException as error:  # whatever it is, the turn tells it
            self._error = error
            self._done.release()

    def _stepped(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._done.release()
            self._wait()

    def _wait(self) -> None:
        self._mine.acquire()
        if self._over:
            raise _Over
