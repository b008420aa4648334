"""Plain text as tokens: each symbol and the one to come, by bytes or by characters."""

import pickle
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from processes import elsewhere
from throughtime.chunk import join
from throughtime.errors import DataError
from throughtime.stream import Recording, text

TARGETS_MISSING = -100


@given(
    content=st.text(min_size=1, max_size=300),
    bounds=st.tuples(st.integers(0, 300), st.integers(0, 300)),
)
def test_characters_are_those_of_the_file(content: str, bounds: tuple[int, int]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.txt"
        path.write_bytes(content.encode())
        recording = text(path, unit="characters")
        assert isinstance(recording, Recording)
        assert recording.symbols == "".join(sorted(set(content)))
        assert len(recording) == len(content)
        start, stop = sorted(bounds)
        steps = recording.read(start, stop)
        assert "".join(str(recording.symbols[i]) for i in steps.inputs) == content[start:stop]
        assert steps.targets is not None
        known = steps.targets[steps.targets != TARGETS_MISSING]
        assert "".join(str(recording.symbols[i]) for i in known) == content[start + 1 : stop + 1]
        assert (steps.inputs.dtype, steps.targets.dtype, steps.inputs.shape) == (
            np.int64,
            np.int64,
            steps.targets.shape,
        )


@given(
    content=st.binary(min_size=1, max_size=300),
    start=st.integers(0, 300),
    count=st.integers(0, 300),
)
def test_bytes_are_those_of_the_file(content: bytes, start: int, count: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.txt"
        path.write_bytes(content)
        steps = text(path).read(start, start + count)
        assert bytes(steps.inputs.tolist()) == content[start : start + count]
        assert steps.targets is not None
        assert steps.targets.tolist() == [*content[1:], TARGETS_MISSING][start : start + count]


def test_a_path_of_text_is_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "r.TXT").write_bytes("né".encode())
    epoch = join(list(tt.Stream(tmp_path / "r.TXT", lanes=1, chunk=2)))
    assert epoch.inputs.flatten().tolist() == [110, 195, 169]
    assert epoch.targets is not None
    assert epoch.targets.flatten().tolist() == [195, 169, TARGETS_MISSING]
    assert epoch.mask.flatten().tolist() == [True, True, False]


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_bytes(b"a" * 200_000 + b"\xff")
    with pytest.raises(
        DataError,
        match=rf"{re.escape(str(path))}: is no UTF-8 .*WINDOWS-1252.*; or take unit='bytes'",
    ):
        text(path, unit="characters")
    assert len(text(path)) == 200_001
    path.write_bytes("é".encode()[:1])
    with pytest.raises(DataError, match="unexpected end of data"):
        text(path, unit="characters")
    path.write_bytes(b"")
    with pytest.raises(DataError, match="the file is empty, expected text"):
        text(path)
    with pytest.raises(DataError, match=r"nowhere\.txt: no such file"):
        text(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="unit='words': expected 'bytes' or 'characters'"):
        text(path, unit="words")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("unit", ["bytes", "characters"])
def test_text_that_changes_is_refused_and_its_copy_reads_on(unit: str, tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_bytes("für elise ".encode() * 1000)
    recording = text(path, unit=unit)  # pyright: ignore[reportArgumentType]
    (tmp_path / "copy").write_bytes(pickle.dumps(recording))
    done = elsewhere(
        "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).read(3,"
        " 8).inputs.tolist())",
        tmp_path / "copy",
    )
    assert done.output.strip() == str(recording.read(3, 8).inputs.tolist())
    path.write_bytes(b"elise")
    with pytest.raises(
        DataError, match=r"r\.txt: changed since it was opened from 11000 to 5 bytes"
    ):
        recording.read(0, 5)
