"""Settings of every test: one thread, a seed, NaN in fresh memory, hypothesis without deadlines."""

import gc
import os
import tempfile
from collections.abc import Generator

import pytest

# Scripts and modules that tests open by name: no tests, and many import much.
collect_ignore_glob = ["cases/*", "modules/*"]


def pytest_configure(config: pytest.Config) -> None:
    """Set what torch and hypothesis do, before tests are imported.

    Not in the process that only starts others: it would import both first, for 3 s.
    """
    if config.getoption("numprocesses", None):
        return
    import torch
    from hypothesis import HealthCheck, Phase, settings

    from quick import ALL_EXAMPLES

    torch.set_num_threads(1)  # the nets are tiny: a second thread costs more than it brings
    # torch.empty is then filled with NaN. use_deterministic_algorithms imports Inductor, too: 2 s.
    torch.set_deterministic_debug_mode("error")
    default = config.getoption("markexpr") == "not slow"
    settings.register_profile(
        "throughtime",
        deadline=None,
        max_examples=ALL_EXAMPLES // 2 if default else ALL_EXAMPLES,
        suppress_health_check=[HealthCheck.too_slow],
        # a mutant's smallest example is of no interest
        phases=[p for p in Phase if p is not Phase.shrink or "MUTANT" not in os.environ],
        derandomize=bool(os.environ.get("CI")),
    )
    settings.load_profile("throughtime")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from quick import mark_products

    mark_products(items)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    """Skip what needs an `nn.LSTM` in bfloat16 where torch has none, as on x86 without AVX-512."""
    try:
        return (yield)
    except RuntimeError as error:
        if "could not create a primitive descriptor for the LSTM" not in str(error):
            raise
        pytest.skip("torch has no LSTM in bfloat16 on this processor (oneDNN)")


# The converted CSV files of tests go nowhere else; processes that tests start inherit it.
_cache = tempfile.TemporaryDirectory(prefix="throughtime-cache-")
os.environ["THROUGHTIME_CACHE"] = _cache.name
# Nor is the code of tests trusted by whoever runs them.
_settings = tempfile.TemporaryDirectory(prefix="throughtime-config-")
os.environ["XDG_CONFIG_HOME"] = _settings.name


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the generator of the CPU alone: torch.manual_seed takes 1 ms for devices not there."""
    from torch import default_generator

    default_generator.manual_seed(0)


@pytest.fixture
def float64() -> Generator[None]:
    """float64 is the default dtype of the test."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Generator[None]:
    """No test cuts the power: what is written need not be on the disk, 3 ms a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Collections look at what a file has made.

    Of what is imported there are 700,000 objects, .4 s each time.
    """
    gc.collect()
    gc.freeze()
