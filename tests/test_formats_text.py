"""Plain text as tokens: each byte and the one to come."""

import pickle
import re
from pathlib import Path
from tempfile import TemporaryDirectory

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
    content=st.binary(min_size=2, max_size=300),
    start=st.integers(0, 300),
    count=st.integers(0, 300),
)
def test_bytes_are_those_of_the_file(content: bytes, start: int, count: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "r.txt"
        path.write_bytes(content)
        recording = text(path)
        assert isinstance(recording, Recording)
        assert len(recording) == len(content)
        start = min(start, len(content))
        steps = recording.read(start, start + count)
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
    for content, reason in ((b"", "the file is empty, expected text"), (b"a", "has 1 steps, so")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"r\.txt.*{reason}"):
            text(path)
    with pytest.raises(DataError, match=rf"{re.escape(str(tmp_path))}/nowhere\.txt: no such file"):
        text(tmp_path / "nowhere.txt")


def test_text_that_changes_is_refused_and_its_copy_reads_on(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_bytes("für elise ".encode() * 1000)
    recording = text(path)
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
