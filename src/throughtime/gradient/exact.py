"""The exact gradient of a whole recording, in memory that hardly grows with it.

    g = d/dw  (1/N) * sum of the losses of all N valid steps of the recording

No credit is cut: it flows back to inputs a million steps before the loss. The forward pass keeps
the states between segments; the backward pass runs segment after segment again, from the last to
the first (`segment.py`). Not to be confused with `Truncated(horizon=...)`, which makes an update
every few steps and cuts credit, nor with wrapping every chunk in `torch.utils.checkpoint`, which
computes the same and keeps outputs, losses and a graph of chunks in memory.

Cost per step: two forward and one backward pass, 4/3 of plain backpropagation through time if a
backward pass costs two forward passes. Memory: the graph of one segment, and the states between
segments: steps / chunk of them.

References: T. Chen et al., Training deep nets with sublinear memory cost (2016); A. Gruslys et al.,
Memory-efficient backpropagation through time, NeurIPS 2016.
"""

from dataclasses import dataclass
from typing import Any

from throughtime.chunk import Source
from throughtime.errors import ConfigError, counted
from throughtime.gradient.segment import lane_norms
from throughtime.gradient.window import Credit, Probe, Progress, Window, set_whole


@dataclass(frozen=True)
class Exact:
    """The full gradient of each recording, in the memory of one segment and of a state for each.

    An update at every step at which all lanes start a recording. With one lane that is one for
    every recording; with several one for the epoch, unless recordings end together. `cut_every`
    makes one every so many steps, and no longer the exact gradient: that of `Truncated(cut_every)`,
    in the memory of one segment.

    Use it where rare events matter long after they happen, to know what a truncation costs
    (`tt.audit`), or wherever an update per recording is enough. `Truncated` makes more updates of
    less exact gradients in the same time.

    Args:
        chunk: steps per segment, which runs again in the backward pass; it changes no gradient.
            Default: 1,000, or the square root of the steps if that is more; more while the graph
            of a segment takes less than 8 MB, fewer where it would take more than 512 MB, by a
            trial of a few steps.
        cut_every: steps per update; credit is cut between them, the state is carried.
        clip_adjoint: largest norm, lane by lane, of the gradient that crosses from one segment to
            the one before; needs `chunk`, which then does change the gradient.

    Raises:
        ConfigError: a setting out of range.
        DataError: the chunks come from an iterator and cannot be read again.
        ModelError: the forward pass does not repeat.
        RunError: a gradient is not finite; steps and parameter are named, `.grad` and weights
            unchanged.

    Cost: two forward passes and one backward pass per step, and memory for the state at the start
    of each segment. A `chunk` much below the default costs more, since each segment is two calls.

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

    chunk: int | None = None
    cut_every: int | None = None
    clip_adjoint: float | None = None

    def __post_init__(self) -> None:
        set_whole(self, chunk=1, cut_every=1)
        if self.clip_adjoint is not None and not self.clip_adjoint > 0:
            raise ConfigError(f"clip_adjoint={self.clip_adjoint}: expected a norm above 0")
        if self.clip_adjoint is not None and self.chunk is None:
            raise ConfigError(
                "clip_adjoint clips between segments, so their length becomes part of the"
                " gradient: give chunk=... too"
            )

    def describe(self) -> str:
        """The setting in words."""
        if self.cut_every is not None:
            return (
                f"an update every {counted(self.cut_every, 'step')}, gradients cut there: they"
                f" flow back at most {counted(self.cut_every, 'step')}"
            )
        return (
            "an update for every recording (with several lanes, where all of them start one),"
            " gradients flow back through all of it"
        )

    def plan(self, source: Source, at: Progress, probe: Probe) -> tuple[Window | None, Any]:
        """The window up to the next step at which all lanes start a recording, or to a cut."""
        del probe
        steps = source.steps_to_common_reset()  # also refuses chunks that come only once
        if self.cut_every is not None:
            steps = source.remaining(self.cut_every)
        if not steps:
            return None, at.memory
        stop, gate = at.step + steps, None if self.clip_adjoint is None else self._clip
        plan = Window(at.step, at.step, at.step, stop, stop, self.chunk or "auto", gate)
        return plan, at.memory

    def _clip(self, step: int, credit: Credit) -> Credit:
        """Scale the lanes whose credit is too long."""
        del step
        norms = lane_norms(credit)
        if norms is None or self.clip_adjoint is None:
            return credit
        factors = (self.clip_adjoint / norms).clamp(max=1.0)
        return [
            leaf if leaf is None else leaf * factors.view(-1, *[1] * (leaf.dim() - 1))
            for leaf in credit
        ]
