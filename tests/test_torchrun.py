"""Ranks started by torchrun, through `examples/torchrun.py`: the weights of one process, and a rank
that is killed.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore

import throughtime as tt
from processes import elsewhere, end, free_port, started, torchrun
from strategies import apart
from throughtime.distributed import rank_errors
from throughtime.errors import ModelError, RunError

EXAMPLE = Path(__file__).parent.parent / "examples" / "torchrun.py"
PATIENCE = 120.0  # seconds; nothing waits for them but a test that fails


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def group_of_one() -> Generator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def launched(checkpoint: Path, *flags: str, updates: int) -> list[str]:
    """The command: torchrun, two ranks, on loopback."""
    arguments = ["--checkpoint", str(checkpoint), "--updates", str(updates)]
    return [*torchrun(2, *flags), str(EXAMPLE), *arguments]


def on_two_forked(checkpoint: Path, updates: int) -> dict[str, Any]:
    """The same in one second instead of eight: agent and ranks fork a process that has torch."""
    python, _, module, *arguments = launched(
        checkpoint, "--run-path", "--start-method", "fork", updates=updates
    )
    assert python == sys.executable
    agent = (
        f"import runpy, torch; torch.set_num_threads(1); runpy.run_module({module!r},"
        " run_name='__main__', alter_sys=True)"
    )
    done = elsewhere(
        agent, *arguments, patience=PATIENCE, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )
    assert done.code == 0, done.errors
    return torch.load(checkpoint)


def alone(checkpoint: Path, updates: int, lanes: int = 4) -> dict[str, Any]:
    """What it holds after training in this process, on as many lanes."""
    example = loaded(EXAMPLE)
    with group_of_one(), mock.patch.object(example, "LANES", lanes):
        example.train(checkpoint, updates, example.POLICIES["truncated"], updates)
    return torch.load(checkpoint)


def test_the_two_ranks_that_an_agent_of_torchrun_starts_give_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    result, expected = on_two_forked(tmp_path / "two.pt", 10), alone(tmp_path / "one.pt", 10)
    assert result["done"] == expected["done"] == 10
    assert apart(result["net"], expected["net"]) < 1e-6
    assert len(result["positions"]) == 2
    half = alone(tmp_path / "half.pt", 10, lanes=2)  # a mutant: half of the lanes
    assert apart(result["net"], half["net"]) > 1e-3


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit and what it said; killed, with all that it has started, where it does not end."""
    try:
        _, output = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        end(process.pid)
        _, output = process.communicate()
        raise AssertionError(f"the process did not end: {output}") from None
    return process.returncode, output


def wait_for(condition: Callable[[], object], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert running.poll() is None, "the process ended before it was to be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
def test_a_killed_rank_is_reported_on_the_other_with_how_to_resume(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    command = [
        sys.executable,
        str(EXAMPLE),
        "--checkpoint",
        str(checkpoint),
        "--updates",
        "1000000",
    ]
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (
        started(command, RANK="0", **variables) as first,
        started(command, RANK="1", **variables) as second,
    ):
        wait_for(checkpoint.exists, first)
        second.send_signal(signal.SIGKILL)
        code, output = ended(first)
    assert code == 1
    assert "throughtime.distributed.RankError: another rank did not answer: it has ended" in output
    assert "Start all ranks again from the last checkpoint" in output
    causes = "Connection closed by peer", "Connection reset by peer"
    assert any(cause in output for cause in causes)


def test_only_errors_of_the_process_group_are_reported_as_a_lost_rank() -> None:
    with (
        pytest.raises(
            RunError, match=r"another rank did not answer.*\(Connection closed\)"
        ) as caught,
        rank_errors(),
    ):
        raise RuntimeError("Connection closed\nby peer")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(ZeroDivisionError), rank_errors():
        _ = 1 // 0


def wrapped(kind: str, module: nn.Module) -> nn.Module:
    return getattr(nn.parallel, kind)(module)


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "DataParallel"])
def test_wrappers_for_several_devices_are_refused_with_the_line_to_write(kind: str) -> None:
    refused = rf"(?s)is wrapped in {kind}, .*Hand the bare module: net = tt.carry\(wrapped.module\)"
    data = {"inputs": torch.randn(40, 3), "targets": torch.randn(40)}
    stream = tt.Stream(data, lanes=1, chunk=10)
    with group_of_one():
        net: Any = wrapped(kind, tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1))))
        for make in (
            lambda: tt.carry(nn.Sequential(wrapped(kind, nn.LSTM(3, 4)), nn.Linear(4, 1))),
            lambda: tt.updates(net, stream, nn.MSELoss(), gradient=tt.Truncated(10)),
        ):
            with pytest.raises(ModelError, match=refused):
                make()
