"""Every test of this folder has the mock device; without a compiler they are skipped."""

import mock_device
import pytest
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
