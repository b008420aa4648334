"""Damaged files of every format: as the format's library reads them, or refused by a DataError."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from damaged_files import LIBRARIES, verdict
from format_files import FORMATS
from processes import elsewhere
from throughtime.errors import DataError
from throughtime.stream.formats import open_table

SCRIPT = Path(__file__).with_name("damaged_files.py").read_text(encoding="utf-8")


def run(mode: str, files: Sequence[str]) -> tuple[int, dict[str, str]]:
    """The exit status, and what became of the files, the last one perhaps `started`."""
    ended = elsewhere(SCRIPT, mode, *files)
    results = dict(json.loads(line) for line in ended.output.splitlines())
    assert results, ended.errors
    return ended.code or 0, results


def results_of(files: Sequence[str]) -> dict[str, str]:
    """What became of each file; a crash is no fault where the library alone crashes, too."""
    results: dict[str, str] = {}
    while len(results) < len(files):
        status, more = run("both", files[len(results) :])
        results |= more
        if status:
            file = [*more][-1]
            alone, _ = run("alone", [file])
            results[file] = "crash of the library" if alone else f"FAULT exit status {status}"
    return results


def check(files: Sequence[str]) -> None:
    results = results_of(files)
    assert {file: r for file, r in results.items() if r.startswith("FAULT")} == {}
    assert {"read", "refused"} <= set(results.values())


def test_a_damaged_file_is_read_as_the_library_does_or_refused() -> None:
    check([f"{name} {seed}" for name in LIBRARIES for seed in range(4)])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LIBRARIES))
def test_300_damaged_files_are_read_as_the_library_does_or_refused(name: str) -> None:
    check([f"{name} {seed}" for seed in range(300)])


def test_every_format_of_a_library_is_damaged() -> None:
    suffixes = {FORMATS[name].suffix for name in LIBRARIES}
    others = {".csv", ".hdf5"}  # CSV: benchmarks/fuzz_readers.py
    assert suffixes | others == {form.suffix for form in FORMATS.values()}


@pytest.mark.parametrize(
    ("values", "there", "instead"),
    [
        ([1.0] * 100, (800).to_bytes(8, "little"), (80).to_bytes(8, "little")),
        (["text"], b"text", b"\xff\xff\xff\xff"),
    ],
    ids=["a short buffer", "no UTF-8"],
)
def test_what_pyarrow_does_not_check_is_refused(
    values: list[Any], there: bytes, instead: bytes, tmp_path: Path
) -> None:
    """Mutant: batches are not validated."""
    batch = pa.record_batch([values], names=["a"])
    with pa.ipc.new_file(tmp_path / "r.arrow", batch.schema) as file:
        file.write_batch(batch)
    content = (tmp_path / "r.arrow").read_bytes()
    assert there in content
    (tmp_path / "r.arrow").write_bytes(content.replace(there, instead))
    with pytest.raises(DataError, match="cannot be read"):
        open_table(tmp_path / "r.arrow")


def test_the_verdict_detects_other_values_and_other_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMATS["npy"].make(tmp_path / "r.npy")
    assert verdict("npy", tmp_path / "r.npy") == "read"
    read = LIBRARIES["npy"]
    monkeypatch.setitem(LIBRARIES, "npy", lambda path: {k: v + 1 for k, v in read(path).items()})
    assert verdict("npy", tmp_path / "r.npy").startswith("FAULT not as the library")
    monkeypatch.setitem(LIBRARIES, "npy", lambda _: 1 / 0)
    assert verdict("npy", tmp_path / "r.npy").startswith("FAULT not as the library")
    (tmp_path / "r.npy").write_bytes(b"")
    assert verdict("npy", tmp_path / "r.npy") == "refused"
