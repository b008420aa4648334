"""Sums in memory that ranks share: the same on every rank, and no wait for one that has ended.

Shapes: `N` numbers of each rank.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from errno import ENOSPC
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed

from processes import LOOPBACK, free_port, in_processes
from throughtime.kernels import shared_sum
from throughtime.kernels.library import library
from throughtime.kernels.shared_sum import SharedSum

FOLDER = Path("/dev/shm")
pytestmark = pytest.mark.skipif(
    library() is None or not FOLDER.is_dir(), reason="needs the compiled core and /dev/shm"
)
SIZES = (1, 2, 5, 1000, 84_000)
ROUNDS = 200


def vector(rank: int, size: int, dtype: torch.dtype, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randn(size, generator=generator, dtype=dtype)


def opened(size: int, dtype: torch.dtype = torch.float32) -> SharedSum:
    shared = SharedSum.open(size, dtype)
    assert shared is not None
    return shared


def summed(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    shared = opened(size, dtype)
    shared.mine.copy_(vector(rank, size, dtype))
    shared.reduce()
    return shared.total.clone()


def many(rank: int) -> list[float]:
    """The sum of many messages in a row; ranks take turns in being late."""
    shared, sums = opened(3000, torch.float64), list[float]()
    for number in range(ROUNDS):
        if number % 20 == rank:
            time.sleep(0.005)  # the others have gone to sleep
        shared.mine.copy_(vector(rank, 3000, torch.float64, number))
        shared.reduce()
        sums.append(float(shared.total.sum()))
    return sums


def error(reduce: Callable[[], None]) -> str:
    try:
        reduce()
    except RuntimeError as raised:
        return str(raised)
    return ""


def too_late(rank: int) -> str:
    shared = opened(3)
    if rank:
        time.sleep(1.0)
        return error(shared.reduce)
    shared.timeout = 0.2
    return error(shared.reduce)


def dropped(rank: int) -> tuple[str, float]:
    """One rank drops its sum, which frees its lock as the end of its process does."""
    shared = opened(3)
    shared.reduce()
    if rank:
        del shared
        gc.collect()
        return "", 0.0
    began = time.monotonic()
    return error(shared.reduce), time.monotonic() - began


def refused(rank: int) -> Iterator[tuple[str, bool]]:
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(ENOSPC, "no space"))
    with full:
        yield "no room", SharedSum.open(10, torch.float32) is None
    for name, where in (("first", 0), ("second", 1)):
        with mock.patch.object(shared_sum, "library", return_value=None if rank == where else 1):
            yield f"no core on the {name}", SharedSum.open(10, torch.float32) is None
    yield "other sizes", SharedSum.open(10 + rank, torch.float32) is None


def work(rank: int, before: None) -> Iterator[tuple[str, Any]]:
    del before
    for size in SIZES:
        for dtype in (torch.float32, torch.float64):
            yield f"{size} {dtype}", summed(rank, size, dtype)
    yield "many", many(rank)
    shared = opened(3)
    distributed.barrier()  # rank 0 removes the name after the others have opened it
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    yield "maps", [line for line in maps if "/dev/shm/throughtime-" in line]
    del shared
    yield "too late", too_late(rank)
    yield "dropped", dropped(rank)
    yield "refused", dict(refused(rank))


def nothing() -> None: ...


@cache
def results(ranks: int) -> list[dict[str, Any]]:
    return in_processes(ranks, nothing, work)


RANKS = pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])


@RANKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_the_same_sum(ranks: int, size: int, dtype: torch.dtype) -> None:
    expected = vector(0, size, dtype)
    for rank in range(1, ranks):
        expected = expected + vector(rank, size, dtype)
    for result in results(ranks):
        assert torch.equal(result[f"{size} {dtype}"], expected)


@RANKS
def test_messages_in_a_row_do_not_mix(ranks: int) -> None:
    expected = [
        sum(float(vector(rank, 3000, torch.float64, number).sum()) for rank in range(ranks))
        for number in range(ROUNDS)
    ]
    for result in results(ranks):
        assert result["many"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_limit_says() -> None:
    first, _ = (result["too late"] for result in results(2))
    assert first == "not all ranks have come within 0.2 seconds"


def test_a_rank_that_has_dropped_its_sum_is_named_at_once() -> None:
    message, seconds = results(2)[0]["dropped"]
    assert message == "rank 1 has ended"
    assert seconds < 5


def test_without_memory_or_core_on_any_rank_no_rank_shares() -> None:
    for result in results(2):
        assert result["refused"] == dict.fromkeys(result["refused"], True)
        assert len(result["refused"]) == 4


def test_no_file_is_left_behind() -> None:
    for result in results(2):
        assert result["maps"]
        assert all(line.endswith(" (deleted)") for line in result["maps"])


SCRIPT = """
import os, signal, sys, torch
from torch import distributed
from throughtime.kernels.shared_sum import SharedSum
rank, port = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
shared = SharedSum.open(100, torch.float32)
shared.reduce()
if rank:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    shared.reduce()
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_killed_rank_is_named_though_nobody_has_waited_for_its_process() -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), port],
            env=LOOPBACK,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].communicate(timeout=60)[0] == "rank 1 has ended\n"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
