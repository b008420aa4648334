"""Lightning's strategy "ddp" on real processes: the weights of one, resumed to the bit."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="needs the extra 'lightning'")
pytestmark = pytest.mark.slow  # three interpreters that import torch and Lightning
SCRIPT = Path(__file__).parent / "lightning_ranks.py"


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


def test_two_ranks_give_the_weights_and_losses_of_one_process_and_resume_to_the_bit() -> None:
    (alone,) = results(1)
    for values in results(2):
        assert values["updates"] == alone["updates"] > 12
        assert (values["weights"] - alone["weights"]).abs().max() < 1e-10
        assert values["logged"] == pytest.approx(alone["logged"], rel=1e-6)
        assert torch.equal(values["resumed"], values["weights"])
