"""The ranks of a run: how they start, find each other, and end together with one message.

Every exchange between ranks carries the error of each rank, if it has one, beside its value. So a
rank that fails while the others send something else is noticed all the same. Communication is
`torch.distributed` on the default group; a team of one sends nothing.
"""

import os
import re
import socket
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from threading import Thread
from typing import Any, TypeVar, cast

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessContext, start_processes

from throughtime._device import is_accelerator
from throughtime.app.config import Config
from throughtime.app.flags import in_words, print_error
from throughtime.app.run_folder import to_cpu
from throughtime.distributed import differing_keys
from throughtime.errors import ConfigError, RunError, ThroughtimeError
from throughtime.stream.manifest import join_faults

T = TypeVar("T")
_PATIENCE = 30.0  # seconds in which a rank started here must end once the process group is gone
_NODES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


class TeamError(RunError):
    """The error of one rank, raised on all of them; `is_origin` on the rank that must print it."""

    def __init__(self, message: str, *, is_origin: bool) -> None:
        super().__init__(message)
        self.is_origin = is_origin


class LostRankError(RunError):
    """A rank that has ended without a message, or does not answer."""


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

    @classmethod
    def of_group(cls, device: torch.device) -> "Team":
        """All ranks of the default process group, which must be initialized."""
        return cls(distributed.get_rank(), distributed.get_world_size(), device)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on all ranks; tensors come on the CPU from other ranks.

        Raises:
            TeamError: a rank has failed meanwhile.
            LostRankError: a rank does not answer.
        """
        return [value] if self.count == 1 else self._exchange(to_cpu(value), None)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise on all.

        Returns:
            The result on this rank.

        Raises:
            TeamError: it failed on some rank; the first such rank prints it. A team of one raises
                the error itself.
            LostRankError: a rank does not answer.
        """
        if self.count == 1:
            return work()
        result, error = _attempt(work)
        self._exchange(None, error)
        return cast("T", result)

    def on_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank alone; all ranks return its result. See `on_all`."""
        if self.count == 1:
            return work()
        result, error = _attempt(work) if self.is_first else (None, None)
        return cast("T", self._exchange(result, error)[0])

    def raise_together(self, error: Exception | None) -> None:
        """Raise the error of a rank on all, if any has one; all ranks must call this together."""
        if self.count > 1:
            self._exchange(None, error)
        elif error is not None:
            raise error

    def check_equal(self, values: Mapping[str, object]) -> None:
        """Refuse ranks whose values are not those of the first; all ranks must call it together.

        Raises:
            TeamError: what differs, and on which rank.
        """
        if self.count == 1:
            return
        everyone = self.gather({key: repr(value) for key, value in values.items()})
        self.on_first(lambda: _refuse_differences(everyone))

    def any_of(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank: one small message."""
        if self.count == 1:
            return list(flags)
        reduced = torch.tensor(flags, dtype=torch.int32, device=self.device)
        with _lost_rank_errors():
            distributed.all_reduce(reduced, op=distributed.ReduceOp.MAX)
        return [bool(flag) for flag in reduced.tolist()]

    def barrier(self) -> None:
        """Wait for all ranks, so that none ends while the first still writes; not for lost ones."""
        if self.count > 1:
            with suppress(RuntimeError):
                distributed.barrier()

    def _exchange(self, value: T, error: Exception | None) -> list[T]:
        """The value of each rank, unless one has an error."""
        everyone: list[Any] = [None] * self.count
        message = None if error is None else _message(error)
        with _lost_rank_errors():
            distributed.all_gather_object(everyone, (value, message))
        failed = [(rank, text) for rank, (_, text) in enumerate(everyone) if text is not None]
        if not failed:
            return [result for result, _ in everyone]
        rank, text = failed[0]
        is_origin = rank == self.rank
        if error is not None and is_origin and not _is_expected(error):
            raise error
        raise TeamError(text if rank == 0 else f"rank {rank}: {text}", is_origin=is_origin) from (
            error
        )


def _refuse_differences(everyone: Sequence[Mapping[str, str]]) -> None:
    for rank, other in enumerate(everyone):
        if keys := differing_keys(everyone[0], other):
            faults = [
                f"{key} is {other.get(key)} on rank {rank} and {everyone[0].get(key)} on rank 0"
                for key in keys
            ]
            raise RunError(
                f"the ranks do not train the same run: {join_faults(faults)}. Start all of them"
                " with the same command, on the same data and run folder"
            )


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result or the error; an error that all ranks have already is raised."""
    try:
        return work(), None
    except (TeamError, LostRankError):
        raise
    except Exception as error:  # noqa: BLE001 (whatever it is, it is raised on all ranks)
        return None, error


def _is_expected(error: Exception) -> bool:
    """Whether users get its message, not its traceback."""
    return isinstance(error, (ThroughtimeError, OSError))


def _message(error: Exception) -> str:
    return in_words(error) if _is_expected(error) else f"{type(error).__name__}: {error}"


@contextmanager
def _lost_rank_errors() -> Generator[None]:
    """Explain the error of a message that another rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]  # gloo's advice on bugs follows
        raise LostRankError(
            "another rank has ended, or did not answer within the time limit of the process group"
            f" ({reason})"
        ) from error


@contextmanager
def started_team(config: Config) -> Generator[Team]:
    """The team that the settings describe; its ranks are started or joined.

    An error on one rank is printed once and ends all of them.

    Raises:
        ConfigError: ranks that do not fit the way this process was started.
        SystemExit: with code 2, after an error.
    """
    if config.strategy == "single":
        _refuse_copies()
        yield Team()
        return
    with _process_group(config) as device:
        team = Team.of_group(device)
        try:
            yield team
        except SystemExit:
            team.barrier()
            raise
        except TeamError as error:
            if error.is_origin:
                print_error(str(error))
            team.barrier()
            raise SystemExit(2) from error
        except (ThroughtimeError, OSError) as error:
            print_error(f"rank {team.rank}: {in_words(error)}")
            raise SystemExit(2) from error
        team.barrier()


def _refuse_copies() -> None:
    """Processes of torchrun that share no group would all write one folder."""
    copies = int(os.environ.get("WORLD_SIZE", "1"))
    if distributed.is_torchelastic_launched() and copies > 1:
        raise ConfigError(
            f"torchrun has started {copies} processes, and strategy='single' is one: each would"
            " train the same run. Add --strategy ddp --devices N, the processes on a node, and"
            " --nodes M"
        )


@contextmanager
def _process_group(config: Config) -> Generator[torch.device]:
    """A process group of `devices * nodes` ranks, and the device of this one.

    Where no launcher has started the processes of this machine, this process is the first of them
    and starts the others with its own command line.
    """
    try:
        variables = _launched(config)
        children = None
        if variables is None:
            variables = _own_variables(config)
            children = _start_others(config, variables)
        device = _join_group(config, variables)
        if children is not None and is_accelerator(device):
            Thread(target=_end_with_others, args=(children,), daemon=True).start()
    except (RuntimeError, ValueError) as error:
        reason = error if isinstance(error, ConfigError) else str(error).partition("\n")[0]
        raise ConfigError(
            f"strategy='ddp' with device={config.device}, devices={config.devices} on each of"
            f" nodes={config.nodes} does not fit how this process was started, or the machine:"
            f" {reason}"
        ) from error
    try:
        yield device
    finally:
        distributed.destroy_process_group()  # a rank that waits for this one gets an error
        for process in () if children is None else children.processes:
            process.join(_PATIENCE)
            process.kill()
            process.join()


def _launched(config: Config) -> dict[str, str] | None:
    """The variables of torchrun or Slurm; `None` if neither has started this process.

    Raises:
        ConfigError: another number of processes than the settings have.
    """
    env = os.environ
    if {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        launcher, variables = "torchrun", dict(env)
    elif "SLURM_NTASKS" in env and env.get("SLURM_JOB_NAME") not in {"bash", "interactive"}:
        launcher, variables = "Slurm", _slurm_variables()
    else:
        return None
    ranks = config.devices * config.nodes
    if int(variables["WORLD_SIZE"]) != ranks:
        raise ConfigError(
            f"{launcher} has started {variables['WORLD_SIZE']} processes, and the settings have"
            f" {ranks}: write --devices N, the processes on a node, and --nodes M"
        )
    return variables


def _slurm_variables() -> dict[str, str]:
    """The variables of torchrun for a task that srun has started."""
    env = os.environ
    nodes = env.get("SLURM_NODELIST", "127.0.0.1")  # such as cpu[03-05,07],gpu1
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?", nodes)
    first = "".join(part or "" for part in match.groups()) if match else nodes
    job = env.get("SLURM_JOB_ID", "0")[-4:]
    return {
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "MASTER_ADDR": env.get("MASTER_ADDR", first),
        "MASTER_PORT": env.get("MASTER_PORT", str(15_000 + int(job))),
    }


def _own_variables(config: Config) -> dict[str, str]:
    """The variables of this process as the first of its machine.

    Raises:
        ConfigError: several machines, and no variable says which is the first of them.
    """
    node, address, port = "0", "127.0.0.1", ""
    if config.nodes > 1:
        if not set(_NODES) <= os.environ.keys():
            raise ConfigError(
                f"nodes={config.nodes}: nothing says where the other machines are. Start it on each"
                f" of them with torchrun --nnodes {config.nodes} --rdzv-backend c10d"
                " --rdzv-endpoint HOST:PORT, under Slurm with srun, or set"
                f" {', '.join(_NODES[:-1])} and {_NODES[-1]}"
            )
        address, port, node = (os.environ[name] for name in _NODES)
    if not port:
        with socket.socket() as free:
            free.bind((address, 0))
            port = str(free.getsockname()[1])
    return {
        "RANK": str(int(node) * config.devices),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(config.devices * config.nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def _start_others(config: Config, variables: dict[str, str]) -> ProcessContext | None:
    """Start the other ranks of this machine."""
    _check_gpus(config)
    if config.devices == 1:
        return None
    return start_processes(
        _run_rank, (variables,), config.devices - 1, join=False, start_method="spawn"
    )


def _run_rank(index: int, variables: dict[str, str]) -> None:
    """The command line of this process, as another rank of its machine."""
    from throughtime.app.cli import main

    rank, local_rank = int(variables["RANK"]) + index + 1, index + 1
    os.environ.update(variables | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)})
    try:
        main()
    except Exception:
        traceback.print_exc()
        raise


def _end_with_others(children: ProcessContext) -> None:
    """End this process if another rank of its machine dies, for which NCCL would wait minutes."""
    waiting = {process.sentinel: process for process in children.processes}
    while waiting:
        for sentinel in connection.wait(list(waiting)):
            process = waiting.pop(cast("int", sentinel))
            process.join()
            if process.exitcode not in {0, 2, 130}:
                print_error(f"another rank has ended (exit code {process.exitcode})")
                os._exit(2)


def _check_gpus(config: Config) -> None:
    device = torch.device(config.device)
    count = torch.get_device_module(device).device_count()
    if is_accelerator(device) and count < config.devices:
        raise ConfigError(f"this machine has {count} GPUs")


def _join_group(config: Config, variables: dict[str, str]) -> torch.device:
    _check_gpus(config)
    device = torch.device(config.device)
    if is_accelerator(device):
        device = torch.device(device.type, int(variables["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    # torchrun's agent holds the store that env:// joins; elsewhere the first rank opens it.
    store = f"tcp://{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    distributed.init_process_group(
        distributed.get_default_backend_for_device(device),
        "env://" if distributed.is_torchelastic_launched() else store,
        rank=int(variables["RANK"]),
        world_size=int(variables["WORLD_SIZE"]),
    )
    return device
