"""Ranks as real processes: spawned on loopback, joined with a timeout, ended one by one if something fails."""

import faulthandler
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

Work = Callable[[int, Any], Iterator[tuple[str, Any]]]
PATIENCE = 240.0  # seconds for all of a rank's work, before its stack is shown


def in_processes(ranks: int, before: Callable[[], Any], work: Work, patience: float = PATIENCE) -> list[dict[str, Any]]:
    """What `work(rank, before())` yields on each rank, by name; `before` is called before there is a group.

    Raises:
        AssertionError: a rank failed or did not end; with the stacks of those that said something.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        children = [context.Process(target=_child, args=(rank, ranks, port, folder, before, work, patience)) for rank in range(ranks)]
        for child in children:
            child.start()
        ended = _joined(children, patience + 5)
        told = [(folder / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(ranks) if (folder / f"{rank}.txt").exists()]
        assert ended, "\n".join(["ranks failed or did not end", *told])
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _joined(children: Sequence[BaseProcess], patience: float) -> bool:
    """Whether all ended well; as soon as one has not, the others are given a moment to say so, and killed, each by its own id."""
    deadline = time.monotonic() + patience
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        if any(child.exitcode for child in children):
            deadline = min(deadline, time.monotonic() + 2)
        for child in children:
            child.join(0.05)
    for child in children:
        if child.is_alive():
            child.kill()
        child.join()
    return all(child.exitcode == 0 for child in children)


def _child(rank: int, ranks: int, port: int, folder: Path, before: Callable[[], Any], work: Work, patience: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with (folder / f"{rank}.txt").open("w", encoding="utf-8") as log:
        faulthandler.dump_traceback_later(patience, exit=True, file=log)
        try:
            early = before()
            address = f"tcp://127.0.0.1:{port}"
            distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
            torch.save(dict(work(rank, early)), folder / f"{rank}.pt")
            distributed.barrier()
            distributed.destroy_process_group()
        except BaseException:  # noqa: BLE001  # whatever it is, the parent tells it
            log.write(f"rank {rank}\n{traceback.format_exc()}")
            log.flush()
            sys.exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
