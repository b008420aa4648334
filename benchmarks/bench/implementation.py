"""An implementation of the training that runs a number of updates and then waits."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor, nn

WAIT = 600.0  # seconds for a thread to end


class Implementation(Protocol):
    """Runs updates of its net, in turns."""

    net: nn.Module

    @abstractmethod
    def run(self, count: int) -> list[Tensor]:
        """So many updates; their losses."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything."""


class Loop:
    """A loop that is the implementation's own: a generator of losses, one for each update.

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


class _Stop(BaseException):  # not an Exception, so that no trainer survives it
    """Ends the trainer of a implementation that is closed."""


class Trainer:
    """A loop inside a library: it runs in a thread that stops after the last step of a turn.

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
        self._left, self._stopped, self._threads = 0, False, torch.get_num_threads()
        self._error: BaseException | None = None
        self._mine, self._done = threading.Semaphore(0), threading.Semaphore(0)
        optimizer.register_step_post_hook(self._after_step)
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
        self._stopped = True
        self._mine.release()
        self._thread.join(WAIT)

    def _play(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts for each thread by itself
        try:
            self._wait()
            while True:
                self._epoch()
        except _Stop:
            return
        except BaseException as error:  # noqa: BLE001  # raised again by `run`
            self._error = error
            self._done.release()

    def _after_step(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._done.release()
            self._wait()

    def _wait(self) -> None:
        self._mine.acquire()
        if self._stopped:
            raise _Stop
