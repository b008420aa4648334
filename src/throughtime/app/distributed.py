"""The ranks of a run, which torchrun starts: what they send each other.

All of them do the same; only the first writes and prints. A rank that fails prints why and ends,
and torchrun ends the others. A rank alone sends nothing.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed

from throughtime.app.config import Config
from throughtime.app.run_folder import to_cpu
from throughtime.distributed import Ranks
from throughtime.errors import ConfigError

T = TypeVar("T")
ALONE = Ranks(0, 1, torch.device("cpu"))


def gathered(ranks: Ranks, value: T) -> list[T]:
    """The value of each rank, on all ranks; tensors come on the CPU from other ranks.

    Raises:
        RankError: a rank does not answer.
    """
    return [value] if ranks.count == 1 else ranks.gather(to_cpu(value))


def from_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on the first rank alone; all ranks return its result, when it has ended.

    Raises:
        RankError: a rank does not answer.
    """
    result: Any = work() if ranks.rank == 0 else None
    return gathered(ranks, result)[0]


@contextmanager
def started_ranks(config: Config) -> Generator[Ranks]:
    """This process among those that torchrun has started, or alone.

    Raises:
        ConfigError: lanes that they cannot share, or devices that this machine lacks.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or not distributed.is_torchelastic_launched():
        yield ALONE
        return
    if config.lanes % count:
        raise ConfigError(
            f"--lanes {config.lanes} are those of all ranks together, and each of the {count} that"
            f" torchrun has started plays the same number: take a multiple of {count}, such as"
            f" {-(-config.lanes // count) * count}"
        )
    device = _own_device(torch.device(config.device))
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    try:
        yield Ranks(distributed.get_rank(), count, device)
    finally:
        distributed.destroy_process_group()  # a rank that waits for this one gets an error


def _own_device(device: torch.device) -> torch.device:
    """The device of this process; of several GPUs its own."""
    if device.type == "cpu":
        return device
    local, count = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if str(device) != device.type or local >= count:
        raise ConfigError(
            f"--device {device} for rank {local} of a machine that has {count} GPUs: each rank"
            f" takes its own; write --device {device.type}, --nproc-per-node {max(count, 1)} to"
            " torchrun"
        )
    torch.accelerator.set_device_index(local)
    return torch.device(device.type, local)
