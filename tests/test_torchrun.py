"""Ranks started by torchrun, through `examples/torchrun.py`: the weights of one process, and a rank
that is killed.

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Never, cast
from unittest import mock

import psutil
import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FullyShardedDataParallel

import throughtime as tt
from processes import LOOPBACK, elsewhere, end, free_port, in_processes, started, torchrun
from strategies import apart, recordings
from throughtime.distributed import rank_errors
from throughtime.errors import ModelError, RunError
from throughtime.gradient import Policy

EXAMPLE = Path(__file__).parent.parent / "examples" / "torchrun.py"
PATIENCE = 120.0  # seconds; nothing waits for them but a test that fails
UPDATES = 50


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


def launched(
    checkpoint: Path, *flags: str, updates: int = UPDATES, gradient: str = "truncated"
) -> list[str]:
    """The command: torchrun, two ranks, on loopback."""
    arguments = ["--checkpoint", str(checkpoint), "--updates", str(updates), "--gradient", gradient]
    return [*torchrun(2, *flags), str(EXAMPLE), *arguments]


def on_two(checkpoint: Path, updates: int = UPDATES, gradient: str = "truncated") -> dict[str, Any]:
    """What the checkpoint holds after training on two ranks."""
    with started(launched(checkpoint, updates=updates, gradient=gradient)) as agent:
        code, output = ended(agent)
    assert code == 0, output
    return torch.load(checkpoint)


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


def alone(
    checkpoint: Path, gradient: str, lanes: int = 4, updates: int = UPDATES
) -> dict[str, Any]:
    """What it holds after training in this process, on as many lanes."""
    example = loaded(EXAMPLE)
    with group_of_one(), mock.patch.object(example, "LANES", lanes):
        example.train(checkpoint, updates, example.POLICIES[gradient], updates)
    return torch.load(checkpoint)


def test_the_two_ranks_that_an_agent_of_torchrun_starts_give_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    result, expected = (
        on_two_forked(tmp_path / "two.pt", 10),
        alone(tmp_path / "one.pt", "truncated", updates=10),
    )
    assert result["done"] == expected["done"] == 10
    assert apart(result["net"], expected["net"]) < 1e-6
    assert len(result["positions"]) == 2
    assert (
        apart(result["net"], alone(tmp_path / "half.pt", "truncated", 2, 10)["net"]) > 1e-3
    )  # a mutant: half of the lanes


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["truncated", "exact"])
def test_two_ranks_of_torchrun_give_the_weights_of_one_process(
    gradient: str, tmp_path: Path
) -> None:
    result, expected = (
        on_two(tmp_path / "two.pt", gradient=gradient),
        alone(tmp_path / "one.pt", gradient),
    )
    assert result["done"] == expected["done"] == UPDATES
    assert apart(result["net"], expected["net"]) < 1e-6
    assert len(result["positions"]) == 2
    assert (
        apart(result["net"], alone(tmp_path / "half.pt", gradient, lanes=2)["net"]) > 1e-3
    )  # a mutant: half of the lanes


@pytest.mark.slow
def test_two_agents_that_meet_as_on_two_machines_give_the_weights_of_one_process(
    tmp_path: Path,
) -> None:
    meeting = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "7",
        "--local-addr",
        "127.0.0.1",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meeting,
        "--rdzv-endpoint",
        f"127.0.0.1:{free_port()}",
        str(EXAMPLE),
    ]
    command += ["--checkpoint", str(tmp_path / "two.pt"), "--updates", str(UPDATES)]
    with started(command) as one, started(command) as other:
        ends = [ended(one), ended(other)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert (
        apart(
            torch.load(tmp_path / "two.pt")["net"], alone(tmp_path / "one.pt", "truncated")["net"]
        )
        < 1e-6
    )


def test_the_scripts_that_the_page_starts_exist_and_accept_its_flags() -> None:
    page = (EXAMPLE.parent.parent / "docs" / "how-to" / "distributed.md").read_text(
        encoding="utf-8"
    )
    started = re.findall(r"(examples/\w+\.py)((?: --\w+(?: \d+)?)*)", page)
    assert {script for script, _ in started} >= {
        "examples/torchrun.py",
        "examples/fsdp2.py",
        "examples/accelerate_train.py",
    }
    for script, flags in started:
        known = (EXAMPLE.parent.parent / script).read_text(encoding="utf-8")
        assert all(f'"{flag}"' in known for flag in re.findall(r"--\w+", flags)), flags


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


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, str]]]:
    """The checkpoint of two ranks, the second killed in the middle, and the exit of each."""
    checkpoint = tmp_path_factory.mktemp("killed") / "checkpoint.pt"
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
        return checkpoint, [ended(first), ended(second)]


def test_a_killed_rank_is_reported_on_the_other_with_how_to_resume(
    killed: tuple[Path, list[tuple[int, str]]],
) -> None:
    _, ((first, output), (second, _)) = killed
    assert second == -signal.SIGKILL
    assert first == 1
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


@pytest.mark.slow
def test_resuming_after_the_kill_gives_the_weights_of_an_uninterrupted_run_to_the_bit(
    killed: tuple[Path, list[tuple[int, str]]], tmp_path: Path
) -> None:
    checkpoint, _ = killed
    before = torch.load(checkpoint)
    last = before["done"] + 33
    resumed, whole = on_two(checkpoint, updates=last), on_two(tmp_path / "whole.pt", updates=last)
    assert resumed["done"] == whole["done"] == last
    assert apart(resumed["net"], whole["net"]) == 0
    assert apart(before["net"], whole["net"]) > 1e-3


@pytest.mark.slow
def test_torchrun_starts_killed_ranks_again_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint, last = tmp_path / "restarted.pt", 400
    command = launched(checkpoint, "--max-restarts", "3", updates=last)
    with started(command) as agent:
        wait_for(checkpoint.exists, agent)
        (second,) = [
            child
            for child in psutil.Process(agent.pid).children()
            if child.environ().get("RANK") == "1"
        ]
        second.kill()
        code, output = ended(agent)
    assert code == 0, output
    assert "Signal 9 (SIGKILL)" in output or "exitcode: -9" in output
    assert (
        apart(torch.load(checkpoint)["net"], on_two(tmp_path / "whole.pt", updates=last)["net"])
        == 0
    )


def addresses_after(store: HashStore, restarts: int, machines: int) -> int:
    """How many there are in a store once a rank has met itself in it."""
    counted = {"GROUP_WORLD_SIZE": str(machines), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    example = loaded(EXAMPLE)
    with (
        mock.patch.dict(os.environ, counted),
        mock.patch.object(example, "rendezvous", return_value=iter([(store, 0, 1)])),
    ):
        example.join_group(timedelta(seconds=60))
    distributed.destroy_process_group()
    return store.num_keys()


def test_ranks_that_are_started_again_find_no_address_of_those_that_ended() -> None:
    store = HashStore()
    first = addresses_after(store, 0, machines=1)
    assert first > 0
    assert addresses_after(store, 1, machines=1) == 2 * first
    assert (
        addresses_after(store, 1, machines=1) == 2 * first
    )  # a mutant: the count stands still, and so does the store


def test_ranks_on_several_machines_which_count_restarts_apart_meet_all_the_same() -> None:
    store = HashStore()
    assert addresses_after(store, 0, machines=2) == addresses_after(store, 1, machines=2)


def test_what_a_command_has_started_ends_with_it() -> None:
    begins = (
        "subprocess.Popen(['sleep', '600'], start_new_session=True); print(file=sys.stderr,"
        " flush=True)"
    )
    code = (  # until it is killed: its standard input may be at its end already
        f"import signal, subprocess, sys; {begins}; signal.pause()"
    )
    with started([sys.executable, "-c", code]) as command:
        assert command.stderr is not None
        command.stderr.readline()
        (child,) = psutil.Process(command.pid).children()
        assert (
            os.getpgid(child.pid) == child.pid
        )  # as torchrun's ranks are: what is sent to the command's group does not reach it
    deadline = time.monotonic() + PATIENCE
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline


class Breaks:
    """Content that fails when it is half written."""

    def __reduce__(self) -> Never:
        raise OSError("no space left")


def test_a_checkpoint_that_is_half_written_leaves_the_one_before_whole(tmp_path: Path) -> None:
    save, path = loaded(EXAMPLE).save, tmp_path / "checkpoint.pt"
    save({"done": torch.arange(3)}, path)
    with pytest.raises(OSError, match="no space left"):
        save({"done": torch.arange(10_000), "rest": Breaks()}, path)
    assert torch.load(path)["done"].tolist() == [0, 1, 2]
    with pytest.raises(OSError, match="no space left"):  # a mutant: straight into the file
        torch.save({"done": torch.arange(10_000), "rest": Breaks()}, path)
    with pytest.raises(RuntimeError, match=r"PytorchStreamReader|unexpected"):
        torch.load(path)


def nothing_before() -> None:
    """The stream is made where the group is up."""


POLICIES: dict[str, Policy] = {
    "stride": tt.Truncated(7),
    "horizon": tt.Truncated(7, 15),
    "exact": tt.Exact(chunk=5),
    "segment": tt.Exact(cut_every=20, chunk=5),
}


UNEQUAL, EQUAL = (40, 25, 53, 8, 3, 29, 15), (40, 40, 40, 40)


def messages(
    policy: Policy,
    accumulate: int = 1,
    lengths: tuple[int, ...] = UNEQUAL,
    *,
    every_backward: bool = False,
) -> list[int]:
    """How many times ranks added something up for each update.

    A mutant adds gradients up at every backward pass.
    """
    torch.manual_seed(0)
    net = tt.carry(nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1))).double()
    stream = tt.Stream(recordings(lengths, outputs=1), 2, 10)
    with mock.patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as sent:
        if every_backward:
            for weight in net.parameters():
                weight.register_hook(lambda gradient: distributed.all_reduce(gradient.contiguous()))
        counts = [0] + [
            sent.call_count
            for _ in tt.updates(net, stream, nn.MSELoss(), gradient=policy, accumulate=accumulate)
        ]
    return [after - before for before, after in pairwise(counts)]


def counting(rank: int, before: None) -> Iterator[tuple[str, Any]]:
    del rank, before
    for name, policy in POLICIES.items():
        yield name, messages(policy)
    yield "accumulated", messages(POLICIES["horizon"], accumulate=4)
    yield (
        "mutant",
        messages(POLICIES["horizon"], 4, EQUAL, every_backward=True),
    )  # of unequal lengths the ranks would not even join_group


def test_gradients_are_reduced_once_per_update_however_many_backward_passes() -> None:
    """One message adds up the numbers of valid steps, one the gradients."""
    for tallies in in_processes(2, nothing_before, counting):
        for name in (*POLICIES, "accumulated"):
            assert set(tallies[name]) == {2}, name
        assert len(tallies["segment"]) > 2
        assert max(tallies["mutant"]) > 2


def wrapped(kind: str, module: nn.Module) -> nn.Module:
    if kind == "DistributedDataParallel":
        return nn.parallel.DistributedDataParallel(module)
    return (
        nn.DataParallel(module)
        if kind == "DataParallel"
        else FullyShardedDataParallel(module, device_id=torch.device("cpu"))
    )


def lstm() -> nn.Module:
    return nn.Sequential(nn.LSTM(3, 4), nn.Linear(4, 1))


class HidesReadout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        self.readout: nn.Module = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(x)[0])


def stream() -> tt.Stream:
    return tt.Stream({"inputs": torch.randn(40, 3), "targets": torch.randn(40)}, lanes=1, chunk=10)


def check_refused(kind: str) -> None:
    refused = rf"is wrapped in {kind}: .*ranks of tt.updates add gradients up themselves"
    with group_of_one():
        net = wrapped(kind, tt.carry(lstm()))
        module = HidesReadout()
        later = tt.carry(module)
        module.readout = wrapped(kind, module.readout)
        for make in (
            lambda: tt.updates(later, stream(), nn.MSELoss(), gradient=tt.Truncated(10)),
            lambda: tt.carry(wrapped(kind, lstm())),
            lambda: tt.carry(nn.Sequential(wrapped(kind, nn.LSTM(3, 4)), nn.Linear(4, 1))),
            lambda: tt.updates(cast("Any", net), stream(), nn.MSELoss(), gradient=tt.Truncated(10)),
        ):
            with pytest.raises(ModelError, match=refused) as caught:
                make()
            assert "Hand the bare module: net = tt.carry(wrapped.module)" in str(caught.value)
        bare = wrapped(kind, net := tt.carry(lstm())).module
        assert bare is net


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "DataParallel"])
def test_wrappers_for_several_devices_are_refused_with_the_line_to_write(kind: str) -> None:
    check_refused(kind)


@pytest.mark.slow
def test_the_first_kind_of_fsdp_is_refused_too() -> None:
    """In a process of its own: torch keeps such nets, and nodes of their graphs, for ever."""
    code = "import test_torchrun; test_torchrun.check_refused('FullyShardedDataParallel')"
    around = LOOPBACK | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=around,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
