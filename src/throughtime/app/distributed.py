"""The ranks of a run, which torchrun starts: what they send each other, and how they end together.

Every exchange between ranks carries the error of each rank, if it has one, beside its value. So a
rank that fails while the others send something else is noticed all the same. Communication is
`torch.distributed` on the default group; a team of one sends nothing.
"""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from throughtime._device import is_accelerator
from throughtime.app.config import Config
from throughtime.app.flags import in_words, print_error
from throughtime.app.run_folder import to_cpu
from throughtime.distributed import RankError, differing_keys, rank_errors
from throughtime.errors import ConfigError, RunError, ThroughtimeError
from throughtime.stream.manifest import join_faults

T = TypeVar("T")
_EXPECTED = (ThroughtimeError, OSError)  # users get the message, not the traceback


class TeamError(RunError):
    """The error of one rank, raised on all of them; the first one prints it."""


@dataclass(frozen=True)
class Team:
    """The ranks that train one net, and which of them this process is.

    Args:
        rank: of this process.
        count: of all processes.
        device: for small messages: that of the net.

    Example:
        >>> from throughtime.app.distributed import Team
        >>> alone = Team()
        >>> alone.is_first, alone.gather("a"), alone.on_first(lambda: 3), alone.any_of(True, False)
        (True, ['a'], 3, [True, False])
    """

    rank: int = 0
    count: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on all ranks; tensors come on the CPU from other ranks.

        Raises:
            TeamError: a rank has failed meanwhile.
            RankError: a rank does not answer.
        """
        return self._exchange(value, None)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise on all.

        Returns:
            The result on this rank.

        Raises:
            TeamError: it failed on some rank. A team of one raises the error itself.
            RankError: a rank does not answer.
        """
        if self.count == 1:
            return work()
        result, error = _attempt(work)
        self.raise_together(error)
        return cast("T", result)

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank alone; all ranks return its result. See `on_all`."""
        if self.count == 1:
            return work()
        result, error = _attempt(work) if self.is_first else (None, None)
        return cast("T", self._exchange(result, error)[0])

    def raise_together(self, error: Exception | None) -> None:
        """Raise the error of a rank on all, if any has one; all ranks must call this together."""
        self._exchange(None, error)

    def check_equal(self, values: Mapping[str, object]) -> None:
        """Refuse ranks whose values are not those of the first; all ranks must call it together.

        Raises:
            TeamError: what differs, and on which rank.
        """
        first, *others = self.gather({key: repr(value) for key, value in values.items()})
        faults = [
            f"{key} is {other.get(key)} on rank {rank} and {first.get(key)} on rank 0"
            for rank, other in enumerate(others, start=1)
            for key in differing_keys(first, other)
        ]
        if faults:
            raise TeamError(
                f"the ranks do not train the same run: {join_faults(faults)}. Start all of them"
                " with the same command, on the same data and run folder"
            )

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank: one small message."""
        if self.count == 1:
            return list(flags)
        reduced = torch.tensor(flags, dtype=torch.int32, device=self.device)
        with rank_errors():
            distributed.all_reduce(reduced, op=distributed.ReduceOp.MAX)
        return [bool(flag) for flag in reduced.tolist()]

    def _exchange(self, value: T, error: Exception | None) -> list[T]:
        """The value of each rank, unless one has an error."""
        if self.count == 1:
            if error is not None:
                raise error
            return [value]
        everyone: list[Any] = [None] * self.count
        message = None if error is None else _message(error)
        with rank_errors():
            distributed.all_gather_object(everyone, (to_cpu(value), message))
        failed = [(rank, text) for rank, (_, text) in enumerate(everyone) if text is not None]
        if not failed:
            return [result for result, _ in everyone]
        rank, text = failed[0]
        if error is not None and rank == self.rank and not isinstance(error, _EXPECTED):
            raise error
        raise TeamError(text if rank == 0 else f"rank {rank}: {text}") from error


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result or the error; an error that all ranks have already is raised."""
    try:
        return work(), None
    except (TeamError, RankError):
        raise
    except Exception as error:  # noqa: BLE001 (whatever it is, it is raised on all ranks)
        return None, error


def _message(error: Exception) -> str:
    expected = isinstance(error, _EXPECTED)
    return in_words(error) if expected else f"{type(error).__name__}: {error}"


@contextmanager
def started_team(config: Config) -> Generator[Team]:
    """The team of the processes that torchrun has started, or of this one alone.

    An error on one rank is printed once and ends all of them.

    Raises:
        ConfigError: lanes that they cannot share, or devices that this machine lacks.
        SystemExit: with code 2, after an error.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or not distributed.is_torchelastic_launched():
        yield Team()
        return
    device = _own_device(config, ranks)
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    team = Team(distributed.get_rank(), ranks, device)
    try:
        code: Any = 0
        try:
            yield team
        except SystemExit as stop:  # after Ctrl-C, on all ranks
            code = stop.code
        except TeamError as error:
            code = 2
            if team.is_first:
                print_error(str(error))
        with suppress(RuntimeError):  # a rank is lost
            distributed.barrier()  # none ends while the first still writes
    except _EXPECTED as error:
        code = 2
        print_error(f"rank {team.rank}: {in_words(error)}")
    finally:
        distributed.destroy_process_group()  # a rank that waits for this one gets an error
    if code:
        raise SystemExit(code)


def _own_device(config: Config, ranks: int) -> torch.device:
    """The device of this process."""
    if config.lanes % ranks:
        raise ConfigError(
            f"--lanes {config.lanes} are those of all ranks together, and each of the {ranks} that"
            f" torchrun has started plays the same number: take a multiple of {ranks}, such as"
            f" {-(-config.lanes // ranks) * ranks}"
        )
    device = torch.device(config.device)
    if is_accelerator(device):
        local, count = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if config.device != device.type or local >= count:
            raise ConfigError(
                f"--device {config.device} for rank {local} of a machine that has {count} GPUs:"
                f" each rank takes its own; write --device {device.type}, --nproc-per-node"
                f" {max(count, 1)} to torchrun"
            )
        device = torch.device(device.type, local)
        torch.accelerator.set_device_index(local)
    return device
