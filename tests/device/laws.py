"""Whole files of tests of the CPU on the mock device: `pytest --device tests/test_x.py`.

The files are listed in the Makefile (`LAWS`), what of them does not run here in `EXCLUDED`. Of a
product of parameters one row a value runs, as of tests of the mark `covering`; of what hypothesis
draws few examples. `make test-all` runs the others too.
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mock_device
import pytest
from factories import factories_on_device
from hypothesis import Phase, settings

HERE = Path(__file__).parent
EXAMPLES = 3

# by the reason, the tests that it concerns: `file::test`, or the beginning of a name
EXCLUDED: dict[str, tuple[str, ...]] = {
    "autocast of Lightning is that of the accelerator of the CPU": (
        "test_lightning_stream.py::test_mixed_precision_is_that_of_autocast",
    ),
    "the device has no sparse tensors": (
        "test_delivery.py::test_sparse_gradients_stay_sparse_and_equal_dense_ones",
    ),
}


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw few examples, before tests are imported; the CPU finds the smallest that fails."""
    del config
    plain = settings.get_profile(settings.get_current_profile_name())
    settings.register_profile(
        "laws", plain, max_examples=EXAMPLES, phases=(Phase.explicit, Phase.generate)
    )
    settings.load_profile("laws")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    reasons = {name: reason for reason, names in EXCLUDED.items() for name in names}
    for item in items:
        if item.path.parent == HERE:
            continue
        name = f"{item.path.name}::{item.name}"
        for start, reason in reasons.items():
            if name.startswith(start):
                item.add_marker(pytest.mark.skip(reason=reason))
        if hasattr(item, "callspec"):
            item.add_marker(pytest.mark.covering)


@pytest.fixture(autouse=True)
def on_device_by_default(request: pytest.FixtureRequest) -> Generator[None]:
    """What tests of other folders make is on the device."""
    if request.path.parent == HERE:
        yield
        return
    try:
        mock_device.load()
    except mock_device.NoCompilerError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        stack.enter_context(factories_on_device())
        if "lightning" in request.path.name:
            stack.enter_context(trainers_on_device())
        yield


@contextmanager
def trainers_on_device() -> Generator[None]:
    """Lightning's accelerator of the CPU has its root device on the mock device."""
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import SingleDeviceStrategy

    def nothing(_: Any, device: Any) -> None:
        del device

    device = property(lambda _: mock_device.DEVICE)
    with (
        mock.patch.object(SingleDeviceStrategy, "root_device", device),
        mock.patch.object(CPUAccelerator, "setup_device", nothing),
    ):
        yield
