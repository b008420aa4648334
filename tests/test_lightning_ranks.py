"""Lightning's strategy "ddp" on real processes: the weights of one, resumed to the bit."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
pytestmark = pytest.mark.slow  # three interpreters that import torch and Lightning
SCRIPT = Path(__file__).parent / "lightning_ranks.py"
NAMES = ("horizon", "exact", "accumulated")


@cache
def results(ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote."""
    launch = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(SCRIPT.parent),
    }
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launch, SCRIPT, folder, str(ranks)],
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_weights_of_one_process(name: str) -> None:
    (alone,) = results(1)
    for values in results(2):
        assert values[name]["updates"] == alone[name]["updates"] > 20
        assert (values[name]["weights"] - alone[name]["weights"]).abs().max() < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_losses_logged_on_ranks_are_those_of_all_recordings(name: str) -> None:
    (alone,) = results(1)
    for values in results(2):
        assert values[name]["logged"] == pytest.approx(alone[name]["logged"], rel=1e-6)


def test_resume_on_ranks_gives_the_same_weights_to_the_bit() -> None:
    for values in results(2):
        assert torch.equal(values["resumed"]["weights"], values["horizon"]["weights"])


def test_policies_give_weights_of_their_own() -> None:
    (alone,) = results(1)
    assert (alone["horizon"]["weights"] - alone["exact"]["weights"]).abs().max() > 1e-4
