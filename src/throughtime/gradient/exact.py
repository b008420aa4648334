"""The exact gradient of a whole recording, in memory that does not grow with it.

    g = d/dw  (1/N) * sum of the losses of all N valid steps of the recording

No credit is cut: it flows back to inputs a million steps before the loss. The forward pass stores
the states between chunks; the backward pass runs chunk after chunk again, from the last to the
first (`_segments.py`). Not to be confused with `Truncated(horizon=...)`, which makes an update
every few steps and cuts credit, nor with wrapping every chunk in `torch.utils.checkpoint`, which
computes the same and keeps outputs, losses and a graph of chunks in memory.

Cost per step: two forward and one backward pass, 4/3 of plain backpropagation through time if a
backward pass costs two forward passes. Memory: the graph of one chunk, and the states between
chunks.

References: T. Chen et al., Training deep nets with sublinear memory cost (2016); A. Gruslys et al.,
Memory-efficient backpropagation through time, NeurIPS 2016.
"""

from dataclasses import dataclass
from typing import Literal

from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source
from throughtime.errors import ConfigError, counted
from throughtime.gradient import schedule
from throughtime.gradient._backward import AdjointRecorder, LossPass, take_segments
from throughtime.gradient._memory import MemoryBudget, Offload
from throughtime.gradient._segments import CheckpointedPass, Verify, check_verify
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import (
    AdjointStats,
    CarriedState,
    MemorylessPolicy,
    Update,
    empty_update,
)


@dataclass(frozen=True)
class Exact(MemorylessPolicy):
    """The full gradient of each recording, in bounded memory.

    An update at every step at which all lanes start a recording. With one lane that is one for
    every recording; with several one for the epoch, unless recordings end together. `cut_every`
    makes one every so many steps, and no longer the exact gradient: that of `Truncated(cut_every)`,
    in the memory of one chunk.

    Use it where rare events matter long after they happen, to know what a truncation costs
    (`tt.audit`), or wherever an update per recording is enough. `Truncated` makes more updates of
    less exact gradients in the same time.

    Args:
        memory: for the graph and the stored states, "512MB", "2GiB" or bytes; gradients, as large
            as the weights, come on top. An estimate: saved tensors, twice, and 1.5 kB for every
            node of the graph, counted on a few steps.
        chunk: steps per forward call; "auto": the fastest that fits, measured on a few steps. It
            changes no gradient.
        cut_every: steps per update; credit is cut between them, the state is carried.
        offload: where the states between chunks are stored: `None` on their device, "cpu", or a
            folder, for a temporary file that is mapped into memory.
        verify: which of the recomputed states are compared with those of the forward pass; "first"
            costs next to nothing.
        clip_adjoint: largest norm, lane by lane, of the gradient that crosses a chunk boundary;
            needs `chunk`, which then does change the gradient.

    Raises:
        ConfigError: a setting out of range, or a memory too small: it says how much is needed.
        DataError: the chunks come from an iterator and cannot be read again.
        ModelError: the forward pass does not repeat.
        RunError: a gradient is not finite; chunk and parameter are named, `.grad` and weights
            unchanged.

    Cost: two forward passes and one backward pass per step.

    Example:
        >>> import torch, throughtime as tt
        >>> recording = {"inputs": torch.randn(5000, 3), "targets": torch.randn(5000)}
        >>> stream = tt.Stream(recording, lanes=1, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> run = tt.updates(net, stream, torch.nn.MSELoss(), gradient=tt.Exact())
        >>> [update.steps for update in run]
        [5000]

    References: Chen et al. (2016); Gruslys et al., NeurIPS 2016.
    """

    memory: str | int | float = "512MB"
    chunk: int | Literal["auto"] = "auto"
    cut_every: int | None = None
    offload: Offload = None
    verify: Verify = "first"
    clip_adjoint: float | None = None

    def __post_init__(self) -> None:
        self._budget.check()
        check_verify(self.verify)
        if self.cut_every is not None:
            schedule.check_whole("cut_every", self.cut_every, 1)
        if self.clip_adjoint is not None and not self.clip_adjoint > 0:
            raise ConfigError(f"clip_adjoint={self.clip_adjoint}: expected a norm above 0")
        if self.clip_adjoint is not None and self.chunk == "auto":
            raise ConfigError(
                "clip_adjoint clips at the chunks' edges, so the chunk becomes part of the"
                " gradient: give chunk=... too"
            )

    @property
    def _budget(self) -> MemoryBudget:
        return MemoryBudget(self.memory, self.chunk, self.offload)

    def describe(self) -> str:
        """The setting in words."""
        if self.cut_every is not None:
            return (
                f"an update every {counted(self.cut_every, 'step')}, credit cut there: back through"
                f" at most {counted(self.cut_every, 'step')}"
            )
        return (
            "an update for every recording (with several lanes, where all of them start one),"
            " credit back through all of it"
        )

    def update(
        self, net: Carried, source: Source, objective: Objective, state: CarriedState
    ) -> tuple[Update | None, CarriedState]:
        """The update of the next steps, up to a start or a cut, of which one is valid."""
        while (
            steps := source.steps_to_common_reset()
            if self.cut_every is None
            else source.remaining(self.cut_every)
        ):
            update, state = self._update_segment(net, source, objective, state, steps)
            if update is not None:
                return update, state
        source.take(1)
        return None, state

    def _update_segment(
        self, net: Carried, source: Source, objective: Objective, state: CarriedState, steps: int
    ) -> tuple[Update | None, CarriedState]:
        begin = source.position

        def read(start: int, stop: int) -> Chunk:
            return source.read(begin + start, begin + stop)

        read(0, 1)  # refuses an iterator before anything has run
        length = self._budget.segment_steps(
            net, steps, lambda n: read(0, n), state.carried, objective
        )
        bounds = schedule.pieces(steps, length)
        checkpoints = CheckpointedPass(
            net, bounds, read, state.carried, offload=self.offload, verify=self.verify
        )
        loss_pass = LossPass.run(checkpoints, take_segments(source, bounds), objective)
        after, outputs, chunk = checkpoints.state, loss_pass.outputs, loss_pass.chunk
        if not loss_pass.valid_steps:
            return empty_update(objective, chunk, after, outputs), CarriedState(after)
        recorder = AdjointRecorder(self.clip_adjoint, objective.scale(outputs), chunk)
        loss = loss_pass.backward(objective, recorder, begin)
        norms, limit = recorder.adjoints, self.clip_adjoint
        clipped = 0 if limit is None else int((norms > limit).sum())
        stats = AdjointStats(length, norms, clipped)
        weight = loss_pass.loss_weight
        update = Update(loss, loss_pass.valid_steps, after, outputs, chunk, stats, weight)
        return update, CarriedState(after)
