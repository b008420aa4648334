"""A run on several ranks: results of one process, one log, common checkpoints, failing ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from processes import end, free_port, in_processes, torchrun
from test_cli import run
from test_run import _lines, finish, flags, settings, stop_at, write_recordings
from throughtime import state as trees
from throughtime.app.fit import from_first, gathered
from throughtime.app.model import load_model
from throughtime.app.run_folder import RunFolder, checkpoint_bytes, load_checkpoint
from throughtime.app.settings import Config
from throughtime.app.train import Training
from throughtime.distributed import Ranks
from throughtime.errors import RunError, ThroughtimeError

SURROUNDINGS = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")} | {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
PATIENCE = 180.0  # seconds; nothing waits for them but a test that fails
VARIANTS: dict[str, dict[str, Any]] = {
    "horizon": {"horizon": 25, "updates": 40, "keep": "last"},  # where a mutant differs
    "hand-off": {"hand_off": True, "updates": None, "epochs": 3},
    "exact": {"gradient": "exact", "cut_every": 25, "stride": None, "updates": 30, "patience": 3},
}


def values(folder: Path, name: str, variant: str) -> dict[str, Any]:
    return settings(folder / "data", folder / name, lanes=4, dtype="float64", **VARIANTS[variant])


def apart(one: RunFolder, other: RunFolder) -> float:
    """The largest difference of a weight."""
    pairs = zip(
        load_model(one.model)[0].parameters(), load_model(other.model)[0].parameters(), strict=True
    )
    return max((a - b).abs().max().item() for a, b in pairs)


# --- a run ---


def through(training: Training) -> Training:
    training.run()
    return training


def running(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    ranks = Ranks(distributed.get_rank(), 2, torch.device("cpu"))
    for variant in VARIANTS:
        through(Training.begin(Config(**values(folder, f"whole-{variant}", variant)), ranks))
        stopped = Training.begin(Config(**values(folder, f"stopped-{variant}", variant)), ranks)
        stop_at(stopped, 13, pressed=rank == 1)
        torch.manual_seed(999 + rank)
        resumed = Training.resume(stopped.folder.path, ranks=ranks)
        yield f"stopped-{variant}", resumed.done.count
        through(resumed)
        if variant == "horizon":
            mutant = Training.begin(Config(**values(folder, "mutant", "horizon")), ranks)
            stop_at(mutant, 7)  # where the lanes of rank 1 still play
            if rank == 0:
                forget_the_state_of_the_second(RunFolder(folder / "mutant"))
            distributed.barrier()
            through(Training.resume(folder / "mutant", ranks=ranks))
    for case, more in {"apart": {"seed": rank}, "other rate": {"lr": 0.001 + rank}}.items():
        other = Training.begin(Config(**values(folder, case, "horizon") | more), ranks)
        yield case, outcome(partial(through, other))
    data = {"data": str(folder / ("other" if rank else "data"))}
    other = Training.begin(Config(**values(folder, "other data", "horizon") | data), ranks)
    yield "other data", outcome(partial(through, other))
    broken = Training.begin(Config(**values(folder, "broken", "horizon")), ranks)
    if rank:
        broken.loss_fn = NoNumber()
    yield "broken", outcome(partial(through, broken))
    masked = Training.begin(
        Config(**values(folder, "masked", "horizon") | {"warm_up": 10_000}), ranks
    )
    yield "masked", outcome(partial(through, masked))
    yield "first", from_first(ranks, lambda: rank + 10)
    yield "gathered", gathered(ranks, {"rank": rank})


def outcome(work: Callable[[], object]) -> str:
    """What was raised."""
    with pytest.raises(ThroughtimeError) as raised:
        work()
    return f"{type(raised.value).__name__}: {raised.value}"


class NoNumber(nn.Module):
    """A loss of which nothing is learnt."""

    def forward(self, *_: Tensor) -> Tensor:
        raise RunError("the loss is nan")


def forget_the_state_of_the_second(folder: RunFolder) -> None:
    """A mutant of a checkpoint: what the lanes of rank 1 carried is lost."""
    saved = load_checkpoint(folder.checkpoint)
    policy_state = saved["ranks"][1]["updates"]["policy"]
    for state in ("carried", "edge"):
        for tensor in trees.tensors(policy_state[state]):
            tensor.zero_()
    folder.checkpoint.write_bytes(checkpoint_bytes(saved))


@dataclass(frozen=True)
class Ran:
    folder: Path
    reports: list[dict[str, Any]]

    def of(self, name: str) -> RunFolder:
        return RunFolder(self.folder / name)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs of two ranks in `running`, and the same of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    write_recordings(folder / "data")
    labels = np.load(write_recordings(folder / "other") / "1_y.npy")
    labels[17], labels[18] = labels[18], labels[17] + 1
    np.save(folder / "other" / "1_y.npy", labels % 3)
    for variant in VARIANTS:
        finish(values(folder, f"one-{variant}", variant))
    finish(values(folder, "half", "horizon") | {"lanes": 2})
    return Ran(folder, in_processes(2, partial(Path, folder), running))


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_give_weights_and_lines_of_one_process(ran: Ran, variant: str) -> None:
    whole, one = ran.of(f"whole-{variant}"), ran.of(f"one-{variant}")
    assert apart(whole, one) < 1e-10
    assert apart(ran.of("half"), ran.of("one-horizon")) > 1e-4  # a mutant: the lanes of one rank
    for mine, theirs in zip(_lines(whole), _lines(one), strict=True):
        nested = mine.pop("recordings", None), theirs.pop("recordings", None)
        assert mine == (theirs if mine["kind"] == "data" else pytest.approx(theirs, nan_ok=True))
        assert (nested[0] is None) == (nested[1] is None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_stopped_by_one_rank_goes_on_to_the_same_bits_on_all(ran: Ran, variant: str) -> None:
    assert [mine[f"stopped-{variant}"] for mine in ran.reports] == [13] * 2
    whole, resumed = ran.of(f"whole-{variant}"), ran.of(f"stopped-{variant}")
    assert whole.model.read_bytes() == resumed.model.read_bytes()
    assert _lines(whole) == _lines(resumed)
    assert apart(ran.of("mutant"), ran.of("whole-horizon")) > 1e-6


def test_a_checkpoint_holds_the_positions_of_all_ranks(
    ran: Ran,
) -> None:
    alone, together = (
        load_checkpoint(ran.of(f"{name}-horizon").checkpoint) for name in ("one", "whole")
    )
    names = {"net", "optimizer", "schedule", "best", "loss", "done", "ranks"}
    names |= {"parts"}
    assert set(alone) == set(together) == names
    assert [position["stream"]["rank"] for position in together["ranks"]] == [0, 1]
    for position in (*alone["ranks"], *together["ranks"]):
        assert set(position) == {"updates", "stream", "random"}


@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("apart", "rank 1 starts with other weights", "rank 1 starts with other weights"),
        ("other rate", "has after the first update other weights", "other weights than rank 0"),
        ("other data", "would not play its share of the plan", "its share of the plan of rank 0"),
        ("broken", "RankError: 1 of 2 ranks could not make", "diverged at update 1: the loss is"),
        ("masked", "without a single step that counts", "without a single step that counts"),
    ],
)
def test_a_run_that_cannot_go_on_ends_on_all_ranks(
    ran: Ran, case: str, first: str, second: str
) -> None:
    for mine, output in zip(ran.reports, (first, second), strict=True):
        assert output in mine[case]


def test_messages_of_ranks(ran: Ran) -> None:
    for mine in ran.reports:
        assert mine["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert mine["first"] == 10


def test_a_run_of_two_ranks_does_not_go_on_as_one_process(ran: Ran) -> None:
    with pytest.raises(
        RunError,
        match=r"holds the positions of 2 ranks.*not of 1: start as many by torchrun",
    ):
        Training.resume(ran.of("whole-horizon").path).run()


# --- the command ---


@contextmanager
def started(words: list[str], log: Path, **more: str) -> Generator["subprocess.Popen[bytes]"]:
    """A command whose outputs go to a file; nothing that it has started outlives the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(words, env=SURROUNDINGS | more, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process.pid)
            process.wait()


def throughtime_on_two(values: dict[str, Any]) -> list[str]:
    return [*torchrun(2), "-m", "throughtime", *flags(values)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_recordings(tmp_path / "data")
    return tmp_path


@pytest.mark.slow
def test_the_command_on_two_ranks_trains_and_speaks_as_one_process(data: Path) -> None:
    one = finish(values(data, "one", "horizon"))
    words, log = throughtime_on_two(values(data, "two", "horizon")), data / "two.log"
    with started(words, log) as command:
        assert command.wait(PATIENCE) == 0, log.read_text()
    two = RunFolder(data / "two")
    assert apart(one, two) < 1e-10
    assert len(_lines(one)) == len(_lines(two))
    for line in (
        "cut into 4 parts, one a lane",
        "of 'valid', the state carried",
        "model, metrics and report.html are in",
    ):
        assert log.read_text(encoding="utf-8").count(line) == 1
    assert two.report.is_file()


@pytest.mark.slow
def test_a_rank_that_fails_alone_prints_why_and_ends_all(data: Path) -> None:
    script = data / "script.py"
    script.write_text(
        "import os, sys\n"
        "from throughtime.app.cli import main\n"
        "sys.argv += ['--lr', 'no'] if os.environ['RANK'] == '1' else []\n"
        "main()\n",
        encoding="utf-8",
    )
    words = [*torchrun(2), str(script), *flags(values(data, "run", "horizon"))]
    with started(words, data / "log") as command:
        assert command.wait(PATIENCE) != 0
    assert "error: --lr no: Input should be a valid number" in (data / "log").read_text()
    assert not (data / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_torchrun_ended_by_a_signal_says_once_how_to_go_on(data: Path) -> None:
    folder, log = RunFolder(data / "run"), data / "stopped.log"
    more = {"updates": 1_000_000, "checkpoint_every": 0.3, "valid_every": 0}
    with started(throughtime_on_two(values(data, "run", "horizon") | more), log) as stopped:
        deadline = time.monotonic() + PATIENCE
        while not ("update " in log.read_text() and folder.checkpoint.is_file()):
            assert stopped.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stopped.send_signal(signal.SIGTERM)
        stopped.wait(PATIENCE)
    assert log.read_text().count("go on with: throughtime train --resume") == 1
    assert load_checkpoint(folder.checkpoint)["done"]["count"] > 0


@pytest.mark.slow
def test_an_agent_of_torchrun_on_each_of_two_machines(data: Path) -> None:
    """With loopback in the place of the machines, and the variables that srun sets."""
    one = finish(values(data, "one", "horizon"))
    meet = ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--local-addr", "127.0.0.1"]
    meet += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    agent += ["--nproc-per-node", "1", *meet, "-m", "throughtime"]
    words = [*agent, *flags(values(data, "two", "horizon"))]
    common = {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "1234"}
    own = [{"SLURM_PROCID": str(i), "SLURM_NODEID": str(i)} for i in range(2)]
    with (
        started(words, data / "0.log", **common, **own[0]) as first,
        started(words, data / "1.log", **common, **own[1]) as second,
    ):
        assert (first.wait(PATIENCE), second.wait(PATIENCE)) == (0, 0)
    assert apart(one, RunFolder(data / "two")) < 1e-10
    said = (data / "0.log").read_text() + (data / "1.log").read_text()
    assert said.count("cut into 4 parts, one a lane") == 1


def test_lanes_that_two_ranks_cannot_share_and_missing_devices_are_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    output = run(*flags(values(data, "run", "horizon") | {"lanes": 3}), ok=False)
    assert (
        "--lanes 3 are those of all ranks together, and each of the 2 that torchrun has started"
        " plays the same number: take a multiple of 2, such as 4" in output
    )
    if not torch.cuda.is_available():
        output = run(*flags(values(data, "run", "horizon") | {"device": "cuda"}), ok=False)
        assert "device" in output
    assert not (data / "run").exists()
