"""The stream over ranks, and with parts that hand on: every step once per epoch, whoever plays it.

Shapes: `T` steps, `B` lanes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import throughtime as tt
from quick import examples
from strategies import draw_lanes, recordings, seeds
from test_stream import whole
from throughtime.chunk import Chunk

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hand-off": {"hand_off": True},
    "warm-up": {"warm_up": 4},
}
modes = st.sampled_from(list(MODES.values()))


def on_ranks(
    lengths: Sequence[int], lanes: int, ranks: int, seed: int = 0, **options: Any
) -> list[tt.Stream]:
    return [
        tt.Stream(recordings(lengths), lanes, 7, seed=seed, rank=rank, ranks=ranks, **options)
        for rank in range(ranks)
    ]


def check_epoch(epochs: Sequence[Chunk], lengths: Sequence[int]) -> None:
    """Every step once, in order within its lane, with a reset wherever a lane does not continue."""
    counts, starts = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    assert len({epoch.steps for epoch in epochs}) == 1
    for epoch in epochs:
        for row, at, reset in zip(
            epoch.recording.T.tolist(),
            epoch.position.T.tolist(),
            epoch.resets.T.tolist(),
            strict=True,
        ):
            busy = sum(r >= 0 for r in row)
            assert row[busy:] == [-1] * (len(row) - busy)
            assert not any(reset[busy:])
            for t in range(busy):
                goes_on = t > 0 and (row[t], at[t]) == (row[t - 1], at[t - 1] + 1)
                assert reset[t] is not goes_on
                counts[row[t], at[t]] += 1
                starts[row[t], at[t]] += reset[t]
    assert counts == Counter((i, t) for i, length in enumerate(lengths) for t in range(length))
    assert max(starts.values()) == 1


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    wish=st.integers(1, 5),
    ranks=st.integers(1, 4),
    seed=seeds,
    mode=modes,
)
def test_ranks_play_every_step_once_in_every_epoch(
    lengths: list[int], wish: int, ranks: int, seed: int, mode: dict[str, Any]
) -> None:
    lanes = max(1, draw_lanes(lengths, wish * ranks) // ranks)
    ranks = max(1, min(ranks, sum(lengths) // lanes))
    streams = on_ranks(lengths, lanes, ranks, seed, **mode)
    for _ in range(2):
        check_epoch([whole(stream) for stream in streams], lengths)
    assert (
        len({stream.state_dict()["epoch"] for stream in streams})
        == len({len(stream) for stream in streams})
        == 1
    )
