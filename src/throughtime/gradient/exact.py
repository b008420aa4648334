"""The exact gradient of a whole recording, in memory that does not grow with it.

    g = d/dw  (1/N) * sum of the losses of all N valid steps of the recording

No credit is cut: a loss blames inputs a million steps before it. The forward pass keeps the states
at the edges of chunks, the backward pass runs chunk after chunk again, from the last to the first
(`sweep.py`). To be confused neither with `Truncated(horizon=...)`, which makes an update every few
steps and cuts credit, nor with wrapping every chunk in `torch.utils.checkpoint`, which computes the
same and keeps outputs, losses and a graph of chunks in memory.

Cost per step: two forward and one backward pass, 4/3 of plain backpropagation through time if a
backward pass costs two forward passes. Memory: the graph of one chunk, and the states at the edges.

References: T. Chen et al., Training deep nets with sublinear memory cost (2016); A. Gruslys et al.,
Memory-efficient backpropagation through time, NeurIPS 2016.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError
from throughtime.gradient import schedule
from throughtime.gradient.budget import Room
from throughtime.gradient.edges import Offload
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import AdjointStats, Progress, Update, nothing
from throughtime.gradient.stretch import Stretch, lane_norms, scaled, taken
from throughtime.gradient.sweep import Adjoint, Sweep, Verify, check_verify


@dataclass(frozen=True)
class Exact:
    """The full gradient of each recording, or segment, in bounded memory.

    An update for every stretch after which all lanes start a recording: for every recording with
    one lane, for the epoch with several, unless recordings end together; or, with `segment`, every
    so many steps.

    Use it where rare events matter long after they happen, to know what a truncation costs
    (`tt.audit`), or wherever an update per recording is enough. `Truncated` makes more updates of
    less exact gradients in the same time.

    Args:
        memory: for graph and edge states, "512MB", "2GiB" or bytes; gradients, as large as the
            weights, come on top.
        chunk: steps per forward call; "auto": the fastest that fits, measured on a few steps. It
            changes no gradient.
        segment: steps per update; credit is cut between segments, the state is carried.
        offload: where the states at the chunks' edges are kept: `None` on their device, "cpu", or a
            folder, for a temporary file that is mapped into memory.
        verify: which of the recomputed states are compared with those of the forward pass; "first"
            costs nothing to speak of.
        clip_adjoint: largest norm, lane by lane, of the gradient that crosses a chunk's edge; needs
            `chunk`, which then does change the gradient.

    Raises:
        ConfigError: a setting out of range, or a memory too small: it says how much is needed.
        DataError: the chunks come from an iterator and cannot be read again.
        ModelError: the forward pass does not repeat.
        RunError: a gradient is not finite; chunk and parameter are named, `.grad` and weights
            untouched.

    Cost: two forward passes and one backward pass per step.

    Example:
        >>> import torch, throughtime as tt
        >>> stream = tt.Stream({"inputs": torch.randn(5000, 3), "targets": torch.randn(5000)}, lanes=1, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> [update.steps for update in tt.updates(net, stream, torch.nn.MSELoss(), gradient=tt.Exact())]
        [5000]

    References: Chen et al. (2016); Gruslys et al., NeurIPS 2016.
    """

    memory: str | int | float = "512MB"
    chunk: int | Literal["auto"] = "auto"
    segment: int | None = None
    offload: Offload = None
    verify: Verify = "first"
    clip_adjoint: float | None = None

    def __post_init__(self) -> None:
        self._room.check()
        check_verify(self.verify)
        if self.segment is not None:
            schedule.whole("segment", self.segment, 1)
        if self.clip_adjoint is not None and not self.clip_adjoint > 0:
            raise ConfigError(f"clip_adjoint={self.clip_adjoint}: expected a norm above 0")
        if self.clip_adjoint is not None and self.chunk == "auto":
            raise ConfigError(
                "clip_adjoint clips at the chunks' edges, so the chunk becomes part of the"
                " gradient: give chunk=... too"
            )

    @property
    def _room(self) -> Room:
        return Room(self.memory, self.chunk, self.offload)

    def describe(self) -> str:
        """The setting in words."""
        every = (
            "an update for every recording (with several lanes, where all of them start one)"
            if self.segment is None
            else f"an update every {self.segment} steps"
        )
        return (
            f"{every}, credit back through {'all of it' if self.segment is None else 'all of them'}"
        )

    def update(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        """The next recording or segment that has a valid step."""
        while (
            steps := source.steps_to_common_reset()
            if self.segment is None
            else source.remaining(self.segment)
        ):
            update, progress = self._segment(net, source, objective, progress, steps)
            if update is not None:
                return update, progress
        source.take(1)
        return None, progress

    def _segment(
        self, net: Carried, source: Source, objective: Objective, progress: Progress, steps: int
    ) -> tuple[Update | None, Progress]:
        begin = source.position

        def read(start: int, stop: int) -> Chunk:
            return source.read(begin + start, begin + stop)

        read(0, 1)  # refuses an iterator before anything has run
        length = self._room.length(
            net, steps, lambda wanted: read(0, wanted), progress.state, objective
        )
        bounds = schedule.pieces(steps, length)
        sweep = Sweep(net, bounds, read, progress.edge, offload=self.offload, verify=self.verify)
        stretch = Stretch.played(sweep, taken(source, bounds), objective)
        after = Progress(sweep.state, sweep.state)
        if not stretch.valid:
            return nothing(objective, stretch.chunk, after.state, stretch.outputs), after
        clip = Clip(self.clip_adjoint, objective.scale(stretch.outputs), stretch.chunk)
        loss = stretch.descend(objective, clip, begin)
        return (
            Update(
                loss,
                stretch.valid,
                after.state,
                stretch.outputs,
                stretch.chunk,
                clip.adjoint_stats(length),
                stretch.mass,
            ),
            after,
        )


@dataclass(eq=False)
class Clip:
    """What every adjoint passes on its way across an edge: measured, and clipped if it is too long."""

    most: float | None
    scale: float  # of a GradScaler
    like: Chunk
    norms: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, adjoint: Adjoint) -> Adjoint:
        """The adjoint, each lane no longer than `most`."""
        norms = lane_norms(adjoint)
        if norms is None:
            self.norms.append(torch.zeros(self.like.lanes, device=self.like.inputs.device))
            return adjoint
        self.norms.append(norms / self.scale)
        return (
            adjoint
            if self.most is None
            else scaled(adjoint, (self.most / self.norms[-1]).clamp(max=1.0))
        )

    def adjoint_stats(self, chunk: int) -> AdjointStats:
        """What was measured."""
        norms = (
            torch.stack(self.norms)
            if self.norms
            else torch.zeros(0, self.like.lanes, device=self.like.inputs.device)
        )
        return AdjointStats(
            chunk, norms, 0 if self.most is None else int((norms > self.most).sum())
        )
