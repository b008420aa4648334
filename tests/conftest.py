"""Settings of every test: one thread, a seed, NaN in fresh memory, hypothesis without deadlines."""

import gc
import os
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "throughtime", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("throughtime"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "throughtime")

# The converted CSV files of tests go nowhere else; processes that tests start inherit it.
_cache = tempfile.TemporaryDirectory(prefix="throughtime-cache-")
os.environ["THROUGHTIME_CACHE"] = _cache.name

torch.set_num_threads(1)  # the nets are tiny: a second thread costs more than it brings
torch.use_deterministic_algorithms(True)  # torch.empty is then filled with NaN


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Collections look at what a file has made.

    Of what is imported there are 700,000 objects, .4 s each time.
    """
    gc.collect()
    gc.freeze()
