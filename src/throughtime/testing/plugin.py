"""Fixtures for pytest.

In `conftest.py` write

    from throughtime.testing.plugin import doctor, doctor_ignores  # noqa: F401

A test that takes `doctor` runs under `tt.doctor()`, and fails if it finds something:

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
    """The codes that `doctor` does not report: none, unless a test file overrides this."""
    return frozenset()


@pytest.fixture
def doctor(doctor_ignores: frozenset[str]) -> Iterator[Doctor]:
    """A doctor that watches the test.

    Yields:
        The doctor; a test that expects findings reads and checks `doctor.findings` and calls
        `doctor.clear()`.

    Raises:
        DiagnosisError: after the test, if the doctor has findings, or if it failed itself and may
            have missed some.
    """
    with open_doctor(ignore=doctor_ignores) as instance:
        yield instance
    if instance.findings or instance.internal_error is not None:
        raise DiagnosisError(str(instance))
