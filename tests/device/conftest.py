"""Every test of this folder has the mock device; without a compiler they are skipped."""

from collections.abc import Generator

import mock_device
import pytest
from factories import factories_on_device
from hypothesis import settings

# the same laws are drawn for with more examples on the CPU
settings.register_profile(
    "device", settings.get_profile(settings.get_current_profile_name()), max_examples=5
)
settings.load_profile("device")


@pytest.fixture(scope="session", autouse=True)
def mock() -> None:
    try:
        mock_device.load()
    except mock_device.NoCompilerError as error:
        pytest.skip(str(error))


@pytest.fixture
def on_device(mock: None) -> Generator[None]:
    """What the tests of the CPU make is on the device."""
    del mock
    with factories_on_device():
        yield
