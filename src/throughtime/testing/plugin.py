"""Fixtures of pytest: write `from throughtime.testing.plugin import doctor, doctor_ignores  #
noqa: F401` in `conftest.py`.

A test that takes `doctor` runs under `tt.doctor()`, and fails where something is found:

    def test_an_epoch(doctor):
        train_one_epoch(net, chunks)

Override `doctor_ignores` to silence codes.
"""

from collections.abc import Iterator

from throughtime.doctor import Doctor
from throughtime.doctor import doctor as open_doctor
from throughtime.errors import DiagnosisError, MissingExtraError

try:
    import pytest
except ImportError as error:
    raise MissingExtraError(
        "throughtime.testing.plugin needs pytest. Install it: pip install pytest"
    ) from error


@pytest.fixture
def doctor_ignores() -> frozenset[str]:
    """The codes that `doctor` does not report.

    None, unless a test file defines a fixture of this name.
    """
    return frozenset()


@pytest.fixture
def doctor(doctor_ignores: frozenset[str]) -> Iterator[Doctor]:
    """A doctor that watches the test.

    Yields:
        The doctor; a test that expects findings reads and checks `doctor.findings` and calls
        `doctor.clear()`.

    Raises:
        DiagnosisError: after the test, where something was found, or where the doctor itself failed
            and may have missed it.
    """
    with open_doctor(ignore=doctor_ignores) as watching:
        yield watching
    if watching.findings or watching.internal_error is not None:
        raise DiagnosisError(str(watching))
