"""Element types that may not mix, missing values, and the memory layout of chunks."""

import numpy as np
import pytest
import torch

import throughtime as tt
from throughtime.errors import DataError


def test_floating_types_are_not_mixed_unless_a_type_is_asked_for() -> None:
    pair = [{"inputs": np.zeros((4, 1), dtype)} for dtype in (np.float32, np.float64)]
    with pytest.raises(
        DataError,
        match=(
            r"float64 numbers, recording '0': \(T, 1\) of float32 numbers.*give the stream a"
            r" dtype"
        ),
    ):
        list(tt.Stream(pair, lanes=2, chunk=4, seed=None))
    assert (
        next(iter(tt.Stream(pair, lanes=2, chunk=4, dtype=torch.float64))).inputs.dtype
        == torch.float64
    )


def test_layouts_are_checked_for_every_recording_however_many_have_fitted() -> None:
    fitting = [{"inputs": np.zeros((4, 2), np.float32), "static": np.zeros(3)} for _ in range(20)]
    for wrong in (
        {"static": np.zeros(2)},
        {},
        {"static": np.zeros(3), "inputs": np.zeros((4, 3), np.float32)},
    ):
        stream = tt.Stream(
            [*fitting, {"inputs": np.zeros((4, 2), np.float32)} | wrong],
            lanes=1,
            chunk=4,
            seed=None,
        )
        for _ in range(2):  # what was refused once is refused again
            with pytest.raises(DataError, match="recording '20' has"):
                list(stream)


def test_types_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(DataError, match=r"torch\.bfloat16: expected one of"):
        tt.Stream({"inputs": np.zeros(4)}, lanes=1, chunk=4, dtype=torch.bfloat16)
    with pytest.raises(DataError, match="complex128"):
        tt.Stream({"inputs": np.zeros(4, np.complex128)}, lanes=1, chunk=4)
    with pytest.raises(DataError, match=r"inputs are torch\.bfloat16"):
        tt.Stream({"inputs": torch.zeros(4, dtype=torch.bfloat16)}, lanes=1, chunk=4)


def test_a_chunk_lies_equally_in_memory_wherever_the_stream_was_resumed() -> None:
    """Kernels round by the alignment of memory, so resuming to the bit needs this."""

    def make_stream() -> tt.Stream:
        return tt.Stream({"inputs": np.zeros((5000, 3), np.float32)}, lanes=1, chunk=7, seed=None)

    through = make_stream()
    for at in range(0, 700, 7):
        resumed = make_stream()
        resumed.load_state_dict(through.state_dict() | {"position": at})
        pair = through.take(7), resumed.take(7)
        assert len({chunk.inputs.data_ptr() % 64 for chunk in pair if chunk is not None}) == 1


def test_what_is_printed_is_short() -> None:
    stream = tt.Stream(
        {"inputs": torch.randn(50, 3), "targets": torch.randn(50)}, lanes=1, chunk=20
    )
    net = tt.carry(torch.nn.GRU(3, 1))
    first, *_ = tt.updates(net, stream, torch.nn.MSELoss(), gradient=tt.Truncated(20))
    assert repr(first).startswith("Update(loss=")
    assert repr(first.chunk) == "Chunk(inputs (20, 1, 3), targets (20, 1), valid=20, resets=1)"
    assert repr(stream) == "Stream(1 recordings, 50 steps, lanes=1, at step 0 of epoch 1)"
