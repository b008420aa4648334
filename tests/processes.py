"""Ranks and scripts as real processes: joined with a timeout, ended one by one if something fails.

They are forked off a server that has imported torch and done nothing else: two seconds less for
each than a new interpreter.
"""

import faulthandler
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import distributed, multiprocessing

Work = Callable[[int, Any], Iterator[tuple[str, Any]]]
PRELOAD = [
    "throughtime",
    "hypothesis.strategies",
    "torch.distributed.fsdp",
    "torch._dynamo",
]  # the last for a first optimizer: 1.5 s
PATIENCE = 240.0  # seconds for all of a rank's work, before its stack is shown


def in_processes(
    ranks: int, before: Callable[[], Any], work: Work, patience: float = PATIENCE
) -> list[dict[str, Any]]:
    """What `work(rank, before())` yields on each rank, by name; `before` is called before there is
    a group.

    Raises:
        AssertionError: a rank failed or did not end; with the stacks of those that said something.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        children = [
            _server().Process(
                target=_child, args=(rank, ranks, port, folder, before, work, patience)
            )
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        ended = _joined(children, patience + 5)
        reports = [
            (folder / f"{rank}.txt").read_text(encoding="utf-8")
            for rank in range(ranks)
            if (folder / f"{rank}.txt").exists()
        ]
        assert ended, "\n".join(["ranks failed or did not end", *reports])
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


LOOPBACK = os.environ | {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}  # the surroundings of a command for ranks


def torchrun(ranks: int, *flags: str) -> list[str]:
    """The command that starts so many ranks of a script on this machine.

    The script and its arguments follow.
    """
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        *rendezvous,
        *flags,
    ]


def example(path: Path, ranks: int, *arguments: str | Path) -> None:
    """Run a script on so many ranks to its end."""
    done = subprocess.run(
        [*torchrun(ranks), str(path), *map(str, arguments)],
        env=LOOPBACK,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@contextmanager
def started(command: Sequence[str], **more: str) -> Generator[subprocess.Popen[str]]:
    """A command on loopback whose complaints can be read.

    Nothing that it has started outlives the block.
    """
    process = subprocess.Popen(command, env=LOOPBACK | more, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process.pid)
        process.communicate()


def end(pid: int) -> None:
    """Kill a process and its descendants by id: torchrun's ranks lead their own process groups."""
    with suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        first.suspend()  # or torchrun would start killed ranks again
        for process in (*first.children(recursive=True), first):
            with suppress(psutil.NoSuchProcess):
                process.kill()


class Ended(NamedTuple):
    """How a script ended, and what it wrote to its two outputs."""

    code: int | None
    output: str
    errors: str


def elsewhere(
    script: str, *arguments: str | Path, patience: float = PATIENCE, **more: str
) -> Ended:
    """Runs a script, given as text, in a process of its own with more in its environment; killed
    where it does not end.

    torch is imported before those variables are set; they count for whatever is loaded, read or
    started afterwards.
    """
    with tempfile.TemporaryDirectory() as name:
        child = begun(script, Path(name), *arguments, **more)
        _joined([child], patience)
        texts = [(Path(name) / file).read_text(encoding="utf-8") for file in ("said", "complained")]
        return Ended(child.exitcode, *texts)


def begun(script: str, outputs: Path, *arguments: str | Path, **more: str) -> BaseProcess:
    """The same while it runs; it writes to the files `said` and `complained` of a folder."""
    words, files = list(map(str, arguments)), (outputs / "said", outputs / "complained")
    child: BaseProcess = _server().Process(target=_script, args=(script, words, *files, more))
    child.start()
    return child


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _script(
    script: str, arguments: Sequence[str], output: Path, errors: Path, more: dict[str, str]
) -> None:
    os.environ.update(more)
    sys.argv[:] = ["script", *arguments]
    for stream, path in ((sys.stdout, output), (sys.stderr, errors)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _joined(children: Sequence[BaseProcess], patience: float) -> bool:
    """Whether all ended well.

    As soon as one has not, the others are given a moment to say so, and killed, each by its own id.
    """
    deadline = time.monotonic() + patience
    while any(child.is_alive() for child in children) and time.monotonic() < deadline:
        if any(child.exitcode for child in children):
            deadline = min(deadline, time.monotonic() + 2)
        for child in children:
            child.join(0.05)
    for child in children:
        if child.is_alive() and child.pid is not None:
            end(child.pid)
        child.join()
    return all(child.exitcode == 0 for child in children)


def _child(
    rank: int,
    ranks: int,
    port: int,
    folder: Path,
    before: Callable[[], Any],
    work: Work,
    patience: float,
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with (folder / f"{rank}.txt").open("w", encoding="utf-8") as log:
        faulthandler.dump_traceback_later(patience, exit=True, file=log)
        try:
            early = before()
            address = f"tcp://127.0.0.1:{port}"
            distributed.init_process_group(
                "gloo",
                init_method=address,
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=60),
            )
            torch.save(dict(work(rank, early)), folder / f"{rank}.pt")
            distributed.barrier()
            distributed.destroy_process_group()
        except BaseException:  # noqa: BLE001  # the parent reports it
            log.write(f"rank {rank}\n{traceback.format_exc()}")
            log.flush()
            sys.exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
