"""Truncated backpropagation through time, Williams & Peng's BPTT(h; h').

    every h' steps:  g = d/dw  (1/N) * sum of the losses of the newest h' steps,
                     the state h steps ago taken as a constant

h' is `stride` (k1), h is `horizon` (k2). Each loss is counted once. A loss sees back between
`horizon - stride + 1` and `horizon` steps. With `horizon == stride` this is the usual TBPTT(k, k),
in which the first loss of every chunk sees one step; to be confused neither with counting every
loss of the window (which multiplies the gradient by about h/h') nor with counting the last loss
only.

The window is run again under the current weights, so all of it belongs to the same model. A shorter
last stride of an epoch looks back as far as any other, unless `horizon == stride`, where no step is
run twice. Cost per step: h/h' forward and backward passes; memory for the graph of one window.

References: R. J. Williams and J. Peng, An efficient gradient-based algorithm for on-line training
of recurrent network trajectories, Neural Computation 2 (1990).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Chunk, Source, join
from throughtime.errors import ConfigError
from throughtime.gradient import schedule
from throughtime.gradient.budget import measure
from throughtime.gradient.finite import check_finite
from throughtime.gradient.objective import Objective
from throughtime.gradient.policy import Progress, Update, nothing
from throughtime.gradient.retained import kept_update
from throughtime.gradient.whole import whole_update
from throughtime.gradient.window import Run, run_window


@dataclass(frozen=True)
class Truncated:
    """Every `stride` steps, back through the last `horizon`; each loss counted once.

    Args:
        stride: steps between two updates (k1).
        horizon: steps that credit may flow back (k2), at least `stride`, not only multiples of it;
            default `stride`.
        jitter: begin every epoch with a stride of random length (from torch's generator), so that
            strides end elsewhere each time: no step is always the one that sees back a single step.
        burn_in: steps before the window that are run again under the new weights, without a graph,
            so that the state entering the window is less stale.
        warm_up: first steps after every reset whose loss does not count; where the chunks come from
            a `tt.Stream`, its own `warm_up` does the same, for every policy.
        graphs: "recompute" runs every window again under the present weights; "retain" keeps the
            graphs of its strides, which go on to belong to the weights they were run with: one
            forward pass instead of `horizon / stride`, for a copy of the weights per stride, and no
            saved place to resume from. "auto" retains where that is faster, in nets that loop over
            steps in Python (0.75 to 1.0 of the time; with fused layers 1.2 to 1.7), and where the
            copies take less memory than the graphs. At fixed weights the gradients are the same.

    Raises:
        ConfigError: a stride below 1, a horizon below the stride, a negative `burn_in`, or one
            together with kept graphs.

    Cost: `horizon / stride` forward and backward passes per step, and `burn_in / stride` forward
    passes.

    Example:
        >>> import throughtime as tt
        >>> tt.Truncated(stride=100, horizon=400).describe()
        'an update every 100 steps, credit back through 301 to 400 steps (350.5 on average)'

    References: Williams & Peng, Neural Computation 2 (1990).
    """

    stride: int
    horizon: int | None = None
    jitter: bool = False
    burn_in: int = 0
    warm_up: int = 0
    graphs: Literal["recompute", "retain", "auto"] = "recompute"

    def __post_init__(self) -> None:
        schedule.check(self.stride, self._horizon)
        schedule.whole("burn_in", self.burn_in, 0)
        schedule.whole("warm_up", self.warm_up, 0)
        if self.graphs not in ("recompute", "retain", "auto"):
            raise ConfigError(f"graphs={self.graphs!r}: expected 'recompute', 'retain' or 'auto'")
        if self.burn_in and self.graphs != "recompute":
            raise ConfigError(
                f"burn_in={self.burn_in} runs steps again under the new weights, which kept graphs"
                " never are: graphs='recompute'"
            )

    @property
    def _horizon(self) -> int:
        return self.stride if self.horizon is None else self.horizon

    def describe(self) -> str:
        """The setting in words: guaranteed and mean horizon."""
        least, most = self._horizon - self.stride + 1, self._horizon
        said = (
            f"an update every {self.stride} steps, credit back through {least} to {most} steps"
            f" ({(least + most) / 2:g} on average)"
        )
        said += ", the first stride of an epoch of random length" if self.jitter else ""
        said += (
            f", the first {self.warm_up} steps after a reset not counted" if self.warm_up else ""
        )
        return said + (
            f", the {self.burn_in} steps before run again under the new weights"
            if self.burn_in
            else ""
        )

    def update(
        self, net: Carried, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        """The next stride that has a valid step; strides without one only carry the state on."""
        while (chunk := source.take(self._steps(source, objective))) is not None:
            chunk, since = self._warmed_up(chunk, progress) if self.warm_up else (chunk, None)
            if self._retains(net, source.position - chunk.steps, chunk, objective, progress):
                update, progress = kept_update(
                    net, chunk, source.position, objective, progress, self.stride, self._horizon
                )
            else:
                update, progress = self._advance(net, chunk, source, objective, progress)
            progress = progress if since is None else progress._replace(since=since)
            if update is not None:
                return update, progress
        return None, progress

    def _warmed_up(self, chunk: Chunk, progress: Progress) -> tuple[Chunk, Tensor]:
        """The chunk without the targets of a warm-up.

        A state that somebody brought along is warm.
        """
        cold = progress.edge is None
        since = progress.since
        if since is None:
            since = torch.full(
                (chunk.lanes,), 0 if cold else self.warm_up, device=chunk.inputs.device
            )
        return chunk.warmed_up(self.warm_up, since)

    def _steps(self, source: Source, objective: Objective) -> int:
        if not self.jitter or source.position:
            return self.stride
        return objective.alike(int(torch.randint(1, self.stride + 1, ())))

    def _retains(
        self, net: Carried, begin: int, chunk: Chunk, objective: Objective, progress: Progress
    ) -> bool:
        """Whether graphs are kept: as asked for, or where that is faster and the copies of the weights are small."""
        if self.graphs == "recompute" or self._horizon == self.stride:
            return False
        if self.graphs == "retain" or progress.graphs:
            return True
        if begin:  # decided once, at the start of an epoch
            return False
        size = measure(net, lambda wanted: chunk[0:wanted], progress.state, objective)
        copies = sum(weight.nbytes for weight in net.parameters()) * -(
            -self._horizon // self.stride
        )
        return size.tensors >= 1 and copies < size.step * self._horizon

    def _advance(
        self, net: Carried, chunk: Chunk, source: Source, objective: Objective, progress: Progress
    ) -> tuple[Update | None, Progress]:
        counted = sum(c.steps for c in progress.past)
        plan = schedule.window(
            0,
            counted,
            counted + chunk.steps,
            source.remaining,
            self.stride,
            self._horizon,
            self.burn_in,
        )
        whole = join((*progress.past, chunk))
        edge = (
            net.initial_state(chunk.lanes, like=chunk.inputs)
            if progress.edge is None
            else progress.edge
        )
        if not objective.counts(chunk):
            with torch.no_grad():
                run = run_window(net, whole, edge, plan).detached()
            return nothing(objective, chunk, run.state, run.outputs), _progress(
                run, whole, plan, progress
            )
        made = whole_update(net, whole, chunk, edge, plan, objective)
        if made is None:
            run = run_window(net, whole, edge, plan)
            loss, run = run.backward(objective, chunk), run.detached()
        else:
            loss, run = made.loss, made.run
        if objective.scaler is None and (made is None or not made.finite):
            check_finite(net, chunk, source.position, loss, everywhere=made is not None)
        update = Update(
            loss, chunk.valid, run.state, run.outputs, chunk, weight=objective.weight(chunk)
        )
        return update, _progress(run, whole, plan, progress)


def _progress(run: Run, steps: Chunk, plan: schedule.Window, before: Progress) -> Progress:
    if plan.keep == plan.stop:
        return Progress(run.state, run.state)
    edge = before.edge if plan.keep == 0 else run.kept
    return Progress(run.state, edge, (steps[plan.keep : plan.stop],))
