"""Every test of this folder has the mock device; without a compiler they are skipped."""

import mock_device
import pytest


@pytest.fixture(scope="session", autouse=True)
def mock() -> None:
    try:
        mock_device.load()
    except mock_device.NoCompilerError as error:
        pytest.skip(str(error))
