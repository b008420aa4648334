"""Export refuses no sound net that was trained on raw units, and every file with an error."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import raw_nets
import throughtime as tt
from throughtime.deploy import export as exporting
from throughtime.deploy import session, source, verify
from throughtime.deploy.chain import read_chain
from throughtime.errors import ModelError

FORMATS = [
    "onnx",
    pytest.param("c", marks=pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")),
    pytest.param("js", marks=pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")),
]
# those that amplify most
QUICK = [("weather", "gru", 2, 1), ("weather", "lstm", 1, 0), ("weather", "lstm", 2, 0)]
TABLE = [
    pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in raw_nets.NETS
]
PLANTED = [
    pytest.param(error, case, marks=[] if case[:3] == QUICK[k % 3][:3] else pytest.mark.slow)
    for k, error in enumerate(raw_nets.ERRORS)
    for case in (("weather", "gru", 1, 0), ("weather", "gru", 2, 1), ("weather", "lstm", 2, 0))
]


def test_the_table_has_36_nets_and_the_planted_errors_are_more_than_12() -> None:
    assert len(TABLE) == 36
    assert len(PLANTED) >= 12


@pytest.mark.parametrize("case", TABLE)
def test_a_net_trained_on_raw_units_is_refused_in_no_format(case: Any, tmp_path: Path) -> None:
    net = raw_nets.trained(*case)
    x, _ = raw_nets.signal(case[0], 1, 99)
    for suffix in ("onnx", "c", "js"):
        written = tt.export(net, tmp_path / f"net.{suffix}", inputs=x[:, 0], steps=20_000)
        assert written.paths[0].exists()
        if written.verification is not None:
            _, error, drift = written.verification
            assert error <= 2e-5 + (verify.MARGIN + 1) * (drift or 0.0)  # outputs are below 20


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(("error", "case"), PLANTED)
def test_a_file_with_a_planted_error_is_refused(
    error: str, case: Any, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the conformance vector, and by verification where the vector tolerates everything."""

    def planted(*args: Any) -> Any:
        chain = read_chain(*args)
        raw_nets.ERRORS[error](chain)
        return chain

    net = raw_nets.trained(*case, scaled=error == "missing standardisation")
    x, _ = raw_nets.signal(case[0], 1, 99)
    monkeypatch.setattr(exporting, "read_chain", planted)
    for message in ("differs|computes other|check fails", "the file differs from the net"):
        with pytest.raises(ModelError, match=message):
            tt.export(net, tmp_path / f"net.{suffix}", inputs=x[:, 0], steps=20_000)
        monkeypatch.setattr(session, "TOLERANCE", 1e30)
        monkeypatch.setattr(source, "TOLERANCE", 1e30)
    assert list(tmp_path.iterdir()) == []
