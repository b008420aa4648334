"""Odd but legal files give the values of their format's own library, or are refused in words.

The cases were written without knowledge of the readers: CSV in `odd_texts.py`, Parquet and Arrow in
`odd_tables.py`, HDF5, Zarr and NumPy in `odd_arrays.py`, `odd_netcdf.py`, sound, EDF and WFDB in
`odd_signals.py`. The files of `malformed_files.py` must be refused.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import throughtime as tt
from malformed_files import MALFORMED, MalformedFile
from odd_arrays import ARRAYS
from odd_files import MATRIX, OddFile, Reference, differences, nanoseconds, rows
from odd_netcdf import NETCDF
from odd_signals import SIGNALS
from odd_tables import TABLES
from odd_texts import TEXTS
from throughtime.errors import DataError
from throughtime.stream import StepArrays

CASES = [*TEXTS, *TABLES, *ARRAYS, *NETCDF, *SIGNALS]
# A refusal says what to do: it has an imperative.
ADVICE = re.compile(
    r"\b(add|call|choose|convert|copy|correct|delete|download|drop|export|fill|give|install|keep|"
    r"leave|make|move|name|pass|put|quote|read it|remove|rename|repair|replace|save|select|set|"
    r"sort|split|store|use|write)\b|the file has \[|\w=",
    re.IGNORECASE,
)


class Outcome(NamedTuple):
    """What a use of a file came to: its faults, and the refusals."""

    faults: list[str]
    refusals: list[str]


def whole(path: Path, **options: Any) -> StepArrays:
    """All steps of a recording of the file."""
    recording = tt.recording(path, **options)
    return recording.read(0, len(recording))


def uses(path: Path, reference: Reference, options: Mapping[str, Any]) -> Iterator[list[str]]:
    """Read the file in every way; each step of the iterator yields what differs."""
    names = list(reference.numbers)
    if names == [MATRIX]:
        yield differences(whole(path, **options).inputs, reference.numbers[MATRIX])
        return
    # Columns of several types have one that holds them: integers become floating.
    steps = zip(*(rows(column) for column in reference.numbers.values()), strict=True)
    joined = [[float(value) for row in step for value in row] for step in steps]
    yield differences(_flat(whole(path, inputs=names, **options).inputs), joined)
    for name in names[:6]:
        yield from _uses_of_a_column(path, name, reference, options)
    for name, texts in reference.texts.items():
        classes = sorted({text for text in texts if text is not None})
        values = whole(path, inputs=names[:1], targets=name, classes=classes, **options).targets
        indices = [-100 if text is None else classes.index(text) for text in texts]
        yield [f"text {name!r}: {fault}" for fault in differences(values, indices)]
    if reference.times is not None:
        yield _differences_of_times(path, reference, options)


def _uses_of_a_column(
    path: Path, name: str, reference: Reference, options: Mapping[str, Any]
) -> Iterator[list[str]]:
    column = reference.numbers[name]
    values = whole(path, inputs=[name], **options).inputs
    yield [f"input {name!r}: {fault}" for fault in differences(_flat(values), column)]
    others = [other for other in reference.numbers if other != name][:1]
    if others:
        values = _flat(
            whole(path, inputs=others, targets=name, allow_target_as_input=True, **options).targets
        )
        yield [f"target {name!r}: {fault}" for fault in differences(values, column)]


def _flat(values: Any) -> Any:
    return values.reshape(len(values), -1)


def _differences_of_times(
    path: Path, reference: Reference, options: Mapping[str, Any]
) -> list[str]:
    recording = tt.recording(path, inputs=list(reference.numbers), **options)
    times: Any = getattr(recording, "times", None)
    if times is None:
        whole(path, **options)  # raises where the column that holds them is refused as text
        return ["the time stamps are lost"]
    values, expected = nanoseconds(times.read(0, len(recording))), nanoseconds(reference.times)
    return [] if values == expected else [f"times {values[:3]}, expected {expected[:3]}"]


def outcome(path: Path, case: OddFile) -> Outcome:
    """Read the file by its columns, and try the columns that are no inputs."""
    reference, faults, refusals = case.write(path), list[str](), list[str]()
    try:
        for fault in uses(path, reference, case.options):
            faults += fault
    except DataError as error:
        refusals.append(str(error))
    for name in (*reference.texts, *reference.refused):
        try:
            values = whole(path, inputs=[name], **case.options).inputs
        except DataError as error:
            faults += _unclear(path, str(error))
        else:
            faults.append(f"{name!r} is no number, but an input {values[:3].tolist()}")
    if not (reference.texts or refusals):
        try:
            steps = whole(path, **case.options).inputs
        except DataError as error:
            refusals.append(str(error))
        else:
            count = sum(len(rows(column)[0]) for column in reference.numbers.values())
            width = _flat(steps).shape[1]
            faults += [] if width == count else [f"{width} inputs by default, expected {count}"]
    return Outcome(faults, refusals)


def _unclear(path: Path, message: str) -> list[str]:
    lacks = [
        *([] if path.stem in message else ["the name of the file"]),
        *([] if ADVICE.search(message) else ["what to do"]),
    ]
    return [f"a refusal without {' and '.join(lacks)}: {message}"] if lacks else []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_value_differs_silently(case: OddFile, tmp_path: Path) -> None:
    path = tmp_path / case.file
    faults, refusals = outcome(path, case)
    faults += [fault for message in refusals for fault in _unclear(path, message)]
    if case.common:
        faults += [f"refused: {message}" for message in refusals]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("case", MALFORMED, ids=str)
def test_a_malformed_file_is_refused_by_file_line_and_column(
    case: MalformedFile, tmp_path: Path
) -> None:
    path = tmp_path / case.file
    case.write(path)
    with pytest.raises(DataError) as refusal:
        read_everything(path)
    message = str(refusal.value)
    lines = [f"line {case.line}", *(["first line"] if case.line == 1 else [])]
    parts = {
        "file": path.stem in message,
        "line": case.line is None
        or re.search(rf"\b({'|'.join(lines)})\b", message.replace(",", "")),
        "column": case.column is None or f"column '{case.column}'" in message,
    }
    lacks = [name for name, present in parts.items() if not present]
    assert not lacks, f"no {' and no '.join(lacks)}: {message}"


def read_everything(path: Path) -> None:
    """Read all steps and all time stamps of the default inputs."""
    recording = tt.recording(path)
    recording.read(0, len(recording))
    times: Any = getattr(recording, "times", None)
    if times is not None:
        times.read(0, len(recording))


def test_the_corpus_is_large() -> None:
    names = [case.file for case in (*CASES, *MALFORMED)]
    assert len(names) == len(set(names))
    assert len(CASES) >= 150
    assert len(MALFORMED) >= 60


def test_a_reader_that_changes_a_value_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def wrong(path: Path, **options: Any) -> StepArrays:
        arrays = read(path, **options)
        return arrays._replace(inputs=arrays.inputs * (1 + 1e-6))

    read = whole
    for case in (TEXTS[0], TABLES[0], ARRAYS[0]):
        assert not outcome(tmp_path / case.file, case).faults
        with monkeypatch.context() as patch:
            patch.setattr("test_odd_files.whole", wrong)
            assert outcome(tmp_path / case.file, case).faults


def test_a_value_that_differs_is_noticed() -> None:
    assert differences([[1.0], [float("nan")]], [1, float("nan")]) == []
    assert differences([[float(2**53)]], [2**53 + 1])
    assert differences([[0.1]], [0.1 + 1e-12])
    assert differences([[0.0]], [float("nan")])
    assert differences([[1.0, 2.0]], [1.0])
