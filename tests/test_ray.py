"""Ray Train through `examples/ray_train.py`: weights, a second start, a killed worker."""

import importlib.util
import os
import secrets
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import Tensor

import throughtime as tt
from plain_loop import plain_loop
from strategies import apart

EXAMPLE = Path(__file__).parent.parent / "examples" / "ray_train.py"
UPDATES = 50
# Ray Train makes a context of Ray Data, which warns of its own defaults.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context"),
]
PATIENCE = 400.0  # seconds for one training; nothing waits for them but a test that fails


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster() -> Generator[None]:
    """Ray on two processors of this machine, on loopback, with a token and folder of its own."""
    import ray

    settings = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with mock.patch.dict(os.environ, settings), tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100_000_000,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def fitted(
    example: ModuleType, storage: Path, name: str, updates: int = UPDATES, every: int = UPDATES
) -> dict[str, Tensor]:
    """The weights of the last checkpoint of a training on two workers."""
    pool = ThreadPoolExecutor(1)  # so that a test can give up on it
    started = pool.submit(example.fit, storage, name, 2, updates, every)
    pool.shutdown(wait=False)
    result = started.result(timeout=PATIENCE)
    saved = torch.load(Path(result.checkpoint.path) / "model.pt")
    assert saved["done"] == result.metrics["update"]
    return saved["net"]


def alone(example: ModuleType, lanes: int) -> dict[str, Tensor]:
    """Weights of a plain loop."""
    # which Ray tells its workers alone
    with mock.patch.object(example, "get_device", return_value=torch.device("cpu")):
        stream, net, optimizer = example.parts(lanes)
    policy = tt.Truncated(stride=20, horizon=50)
    plain_loop(net, stream, optimizer, policy, stop=UPDATES)
    return net.state_dict()


@pytest.mark.usefixtures("cluster")
def test_workers_give_the_weights_of_one_process_and_go_on_to_the_bit(
    example: ModuleType, tmp_path: Path
) -> None:
    whole = fitted(example, tmp_path, "whole")
    assert apart(whole, alone(example, 4)) < 1e-6
    assert apart(whole, alone(example, 2)) > 1e-3  # a mutant: half of the lanes
    assert apart(fitted(example, tmp_path, "again", updates=30, every=5), whole) > 1e-3
    assert apart(fitted(example, tmp_path, "again"), whole) == 0
