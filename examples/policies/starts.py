"""The states in which windows start: those in which the windows before them ended, or noise.

    tt.updates(net, tt.Stream([*tt.windows(recordings, 50)], 16, 50), loss_fn,
               gradient=CarriedStart(stride=50))

Trained on windows from the initial state alone, a net meets only the states of the first steps. Run
for longer it enters others, and what it does there is left to chance. Two remedies of Buitrago Ruiz
and Gu change the states that enter the windows of a shuffled stream, `tt.windows`:

    CarriedStart   the state in which the window before it ended when it was last played
    NoiseStart     mean + deviation * n, n ~ N(0, 1), of each number of the states in which recent
                   windows ended

Both are `tt.Truncated(stride)` with `Window.enter`, which replaces the state wherever a lane starts
a recording. No gradient flows into the new one. What they know of past states is `at.memory`: it is
in every checkpoint, and `tt.updates(..., policy_state=updates.policy_state)` hands it on to the
next epoch. Cost: that of `tt.Truncated`, and the memory of a state for every window, or of two.

References: R. Buitrago Ruiz and A. Gu, Understanding and improving length generalization in
recurrent models, ICML 2025 (arXiv 2507.02782); S. Kapturowski et al., Recurrent experience replay
in distributed reinforcement learning, ICLR 2019, for stored states.

Shapes: `B` lanes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

import throughtime as tt
from throughtime.chunk import Chunk, Source
from throughtime.gradient import Probe, Progress, Window
from throughtime.state import State
from throughtime.stream.recording import Part, Recording

Rows: TypeAlias = Sequence[Tensor]  # a lane of a state, leaf by leaf
AVERAGED = 1_000  # states in the running moments


def preceding(recordings: Sequence[Recording]) -> list[int]:
    """The index of the part that ends where each recording begins; -1 where there is none.

    Example:
        >>> import numpy as np, throughtime as tt
        >>> preceding(tt.windows([np.zeros((250, 3)), np.zeros((80, 3))], 100))
        [-1, 0, 1, -1]
    """
    parts = {i: r for i, r in enumerate(recordings) if isinstance(r, Part)}
    ends = {(id(part.whole), part.stop): i for i, part in parts.items()}
    return [
        ends.get((id(parts[i].whole), parts[i].start), -1) if i in parts else -1
        for i in range(len(recordings))
    ]


@dataclass(frozen=True)
class CarriedStart:
    """`tt.Truncated(stride)` whose windows continue those before them.

    A window starts in the state in which the window before it ended when it was last played. The
    first window of a recording, and one whose predecessor has not been played, start in the net's
    initial state. The last window of a lane is known only if the epoch ends with it: an idle lane
    runs on. On several ranks each knows the windows that it has played.

    Args:
        stride: steps between two updates, best the length of the windows.

    Raises:
        ConfigError: at the first update: no recording of the stream continues another.
    """

    stride: int

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        """The next stride; `at.memory` is the state in which each window ended, and what plays."""
        recordings = source.recordings if isinstance(source, tt.Stream) else []
        if not at.step and max(preceding(recordings), default=-1) < 0:
            raise tt.errors.ConfigError(
                "CarriedStart continues the window before, and no recording of these chunks"
                " continues another; cut them: tt.Stream(tt.windows(recordings, 100), ...)"
            )
        ends: dict[int, Rows] = dict(at.memory[0] if at.memory else {})

        def start(recording: int) -> Rows:
            continues = recording and preceding(recordings[recording - 1 : recording + 1])[1] == 0
            return ends.get(recording - 1, ()) if continues else ()

        return _plan(self.stride, source, at, probe, ends, ends.update, start)


@dataclass(frozen=True)
class NoiseStart:
    """`tt.Truncated(stride)` whose windows start from noise like the states in which others ended.

    Args:
        stride: steps between two updates, best the length of the windows.
    """

    stride: int

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        """The next stride; `at.memory` is the running moments of past states, and what plays."""
        known: dict[str, Any] = dict(at.memory[0] if at.memory else {"count": 0, "moments": []})

        def learn(ended: dict[int, Rows]) -> None:
            known["count"] += len(ended)
            share = len(ended) / min(known["count"], max(AVERAGED, len(ended)))
            leaves = [torch.stack(rows).double() for rows in zip(*ended.values(), strict=True)]
            latest = [torch.stack([leaf.mean(0), leaf.square().mean(0)]) for leaf in leaves]
            before = known["moments"] or latest
            known["moments"] = [a.lerp(b, share) for a, b in zip(before, latest, strict=True)]

        def start(_: int) -> Rows:
            moments = [(mean, square - mean.square()) for mean, square in known["moments"]]
            return [m + v.clamp(min=0).sqrt() * torch.randn_like(m) for m, v in moments]

        return _plan(self.stride, source, at, probe, known, learn, start)


def _plan(
    stride: int,
    source: Source,
    at: Progress,
    probe: Probe,
    known: Any,
    learn: Callable[[dict[int, Rows]], None],
    start: Callable[[int], Rows],
) -> tuple[Window | None, Any]:
    """The window of `tt.Truncated(stride)`, whose recordings start in other states.

    `known` is remembered; `learn` notes the states in which recordings ended, and `start` returns
    the leaves of the state in which one starts, none for the initial state.
    """
    # the recording of each lane; those of an epoch that was left have not ended
    playing: dict[int, int] = dict(at.memory[1]) if at.memory and at.step else {}

    def end(state: State, lanes: Sequence[int]) -> None:
        leaves = tt.state.tensors(state)
        ended: dict[int, Rows] = {
            playing[k]: [leaf[k].detach().clone() for leaf in leaves] for k in lanes
        }
        if ended:
            learn(ended)

    def enter(chunk: Chunk, state: State, fresh: State) -> State:
        rows = chunk.metadata  # on the host, also where the chunk is on a GPU
        recordings, resets = (row[chunk.start].tolist() for row in (rows.recording, rows.resets))
        end(state, [k for k, reset in enumerate(resets) if reset and k in playing])
        entering = tt.state.map_leaves(Tensor.clone, fresh)
        leaves = tt.state.tensors(entering)
        for k in (k for k, reset in enumerate(resets) if reset):
            playing[k] = recordings[k]
            for leaf, row in zip(leaves, start(playing[k]), strict=False):
                if leaf.is_floating_point() or row.dtype == leaf.dtype:  # no noise on counters
                    leaf[k] = row
        return tt.state.reset(state, entering, chunk.resets[0])

    window, _ = tt.Truncated(stride).plan(source, at, probe)
    if window is not None:
        return window._replace(enter=enter), (known, playing)
    if at.step:
        chunk = source.read(at.step - 1, at.step)
        last = chunk.metadata.recording[chunk.start].tolist()
        end(at.carried, [k for k in playing if last[k] == playing[k]])
    return None, (known, playing)
