"""Team: the ranks of a run. The first of them writes and speaks; what goes wrong on one ends all,
and is said once.

Every message carries what failed on its rank, if something did, beside what it is for: a rank that
fails while the others are about to tell each other something else is heard all the same. All of it
is `torch.distributed` on the default group; a team of one sends nothing.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from throughtime.errors import RunError, ThroughtimeError

T = TypeVar("T")


class TeamError(RunError):
    """What went wrong on one rank, raised on all of them; `mine` on the one that is to say it."""

    def __init__(self, message: str, *, mine: bool) -> None:
        super().__init__(message)
        self.mine = mine


class LostRankError(RunError):
    """A rank that has ended without a word, or does not answer."""


@dataclass(frozen=True)
class Team:
    """The ranks that train one net, and which of them this process is.

    Args:
        rank: of this process.
        count: how many there are.
        device: where small numbers are put together: that of the net.

    Example:
        >>> from throughtime.app.team import Team
        >>> alone = Team()
        >>> alone.first, alone.gathered("a"), alone.first_does(lambda: 3), alone.agreed(True, False)
        (True, ['a'], 3, [True, False])
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def here(cls, device: torch.device) -> "Team":
        """All ranks of the default process group, which is up."""
        return cls(distributed.get_rank(), distributed.get_world_size(), device)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """What each rank has, told to all.

        Raises:
            TeamError: a rank has failed meanwhile.
            LostRankError: a rank does not answer.
        """
        return [value] if self.count == 1 else self._exchanged(value, None)

    def all_do(self, work: Callable[[], T]) -> T:
        """Every rank does the work; what fails on one fails on all, and is said by the first on
        which it did.

        Returns:
            What came out on this rank.

        Raises:
            TeamError: it failed on some rank; on a team of one the error itself.
            LostRankError: a rank does not answer.
        """
        if self.count == 1:
            return work()
        done, failed = _attempt(work)
        self._exchanged(None, failed)
        return cast("T", done)

    def first_does(self, work: Callable[[], T]) -> T:
        """Only the first rank does the work, and all are told what came out, or that it failed.

        See `all_do`.
        """
        if self.count == 1:
            return work()
        done, failed = _attempt(work) if self.first else (None, None)
        return cast("T", self._exchanged(done, failed)[0])

    def settle(self, error: Exception | None) -> None:
        """Raises the error of a rank on all, if any has one; all ranks must come here together."""
        if self.count > 1:
            self._exchanged(None, error)
        elif error is not None:
            raise error

    def agreed(self, *wishes: bool) -> list[bool]:
        """For each wish whether any rank has it: one small message."""
        if self.count == 1:
            return list(wishes)
        asked = torch.tensor(wishes, dtype=torch.int32, device=self.device)
        with _heard():
            distributed.all_reduce(asked, op=distributed.ReduceOp.MAX)
        return [bool(wish) for wish in asked.tolist()]

    def part(self) -> None:
        """Waits until all ranks have come here, so that none ends while the first still writes.

        One that is gone is not waited for.
        """
        if self.count > 1:
            with suppress(RuntimeError):
                distributed.barrier()

    def _exchanged(self, value: T, error: Exception | None) -> list[T]:
        """What each rank has, unless something failed."""
        everyone: list[Any] = [None] * self.count
        with _heard():
            distributed.all_gather_object(
                everyone, (value, None if error is None else _said(error))
            )
        failed = [(rank, said) for rank, (_, said) in enumerate(everyone) if said is not None]
        if not failed:
            return [one for one, _ in everyone]
        rank, said = failed[0]
        if error is not None and rank == self.rank and not _expected(error):
            raise error
        raise TeamError(
            said if rank == 0 else f"rank {rank}: {said}", mine=rank == self.rank
        ) from error


ALONE = Team()


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What came out, or what went wrong; what all ranks know already goes on its way."""
    try:
        return work(), None
    except (TeamError, LostRankError):
        raise
    # whatever it is, the others are told and then it is raised
    except Exception as error:
        return None, error


def _expected(error: Exception) -> bool:
    """Whether it is told as a message and not as a traceback."""
    return isinstance(error, (ThroughtimeError, OSError))


def _said(error: Exception) -> str:
    return str(error) if _expected(error) else f"{type(error).__name__}: {error}"


@contextmanager
def _heard() -> Generator[None]:
    """A message between ranks; one that nobody answers is told as what it means."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0].partition(". ")[0]  # gloo's advice on bugs follows
        raise LostRankError(
            "another rank has ended, or did not answer within the time limit of the process group"
            f" ({said})"
        ) from error
