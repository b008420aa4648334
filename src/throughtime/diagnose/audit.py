"""The audit: the bias of each truncation, against the exact gradient at the same weights.

    bias(h)   = |g_h - g| / |g|           cosine(h) = <g_h, g> / (|g_h| |g|)

g is the exact gradient of the mean loss of a stretch, g_h the sum over the updates of a truncation
at horizon h of that stretch, each loss weighing the same in both. All come from one sweep
(`gradient/bias.py`). The audit compares gradients at fixed weights: in training, a truncation also
makes more updates, which `updates` counts.

Near a minimum g is small, and a relative bias says little. To know when, the losses are split into
two interleaved halves, with gradients g_a + g_b = g:

    noise = |g_a - g_b| / |g|             the standard error of g over its length, if blocks are
                                          independent


References: C. Aicher, N. Foti and E. Fox, Adaptively truncating backpropagation through time to
control gradient bias, UAI 2019, for the relative bias and what it costs: a relative bias of d takes
1 / (1 - d) times the steps.

Shapes: `B` lanes (rows of the batch).
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from throughtime.carry.carried import Carried
from throughtime.chunk import Readable
from throughtime.diagnose._slice import StreamSlice, get_axes, json_safe
from throughtime.errors import ConfigError, RunError, counted
from throughtime.gradient import LossFn, Objective, schedule
from throughtime.gradient._backward import norm
from throughtime.gradient._bias import BiasProbe, Comparison
from throughtime.gradient._memory import MemoryBudget, Offload
from throughtime.gradient._segments import Verify, check_verify, wide
from throughtime.gradient.objective import trainable_weights
from throughtime.state import State

BLOCKS = 16  # of steps; every other one is in the same half
NOISY = math.sqrt(0.5)  # from here on, half of `|g|^2` or more is sampling noise
WIDTH = 80  # characters of a line of text under the table
SHORTER_STRIDE = (
    "A shorter stride with the same horizon usually has less bias, makes more updates and takes"
    " more passes."
)
NOISE = (
    "|g| is small against its sampling noise ({:.2g} times |g|), as near a minimum: these relative"
    " biases are noise. Audit more steps, or the weights of an earlier update."
)
UNEQUAL_DATA = (
    "An update reads as many steps as its stride, one of tt.Exact() all of them. Compared after"
    " equal numbers of updates, rows have read unequal amounts of data."
)
HORIZONS = (50, 200, 800, 3200)  # the default, those shorter than the slice


@dataclass(frozen=True)
class Truncation:
    """One row of an audit.

    Attributes:
        horizon: steps that credit may flow back.
        stride: steps between two updates.
        bias: `|g_h - g| / |g|`, over all parameters.
        cosine: of the angle between g_h and g.
        norm: `|g_h| / |g|`.
        updates: updates in the stretch; a stride without a step that counts makes none.
        by_parameter: the bias of each parameter by itself, by its name.
    """

    horizon: int
    stride: int
    bias: float
    cosine: float
    norm: float
    updates: int
    by_parameter: dict[str, float]


@dataclass(frozen=True)
class Audit:
    """The result of `tt.audit`.

    Attributes:
        steps: audited steps of every lane.
        lanes: B.
        loss: mean loss of the stretch.
        norm: `|g|`, the norm of the exact gradient.
        rows: one for each horizon, the shortest first.
        noise: sampling noise of g relative to `|g|`; see `is_noisy`.
    """

    steps: int
    lanes: int
    loss: float
    norm: float
    rows: tuple[Truncation, ...]
    noise: float = 0.0

    def suggest(self, tolerance: float = 0.1) -> int | None:
        """The shortest horizon from which on no audited one has a bias above `tolerance`.

        It is a horizon at the stride of its row, by default `tt.Truncated(horizon)`. With a
        shorter stride, credit of every loss flows back at least horizon - stride steps: the bias is
        usually smaller, updates are more, and an update costs horizon / stride times the passes.

        `None` if even the longest audited horizon has a bias above `tolerance`: audit longer ones,
        or train with `tt.Exact()`.
        """
        shortest = None
        for row in reversed(self.rows):
            if not row.bias <= tolerance:
                break
            shortest = row.horizon
        return shortest

    def table(self) -> str:
        """The figures as text: a line for each horizon, then how to read them.

        `worst parameter` is the one whose gradient is most wrong.
        """
        head = (
            f"{'horizon':>9} {'stride':>8} {'updates':>8} {'bias':>8} {'cosine':>8} {'norm':>7} "
            " worst parameter"
        )
        lines = [_line(row) for row in self.rows]
        exact = f"{'exact':>9} {self.steps:>8} {1:>8} {0:>8.3f} {1:>8.3f} {1:>7.2f}"
        foot = (
            f"over {counted(self.steps, 'step')} of {counted(self.lanes, 'lane')}, at fixed"
            f" weights; loss {self.loss:.4g}, |g| {self.norm:.3g}"
        )
        remarks = [line for remark in self.remarks() for line in textwrap.wrap(remark, WIDTH)]
        return "\n".join([head, *lines, exact, foot, *remarks])

    def remarks(self, tolerance: float = 0.1) -> list[str]:
        """How to read the rows for the choice of a truncation, in sentences."""
        row = next((row for row in self.rows if row.horizon == self.suggest(tolerance)), None)
        if row is None:
            choice = (
                f"No audited horizon is suggested: the longest, {self.rows[-1].horizon}, has a bias"
                f" above {tolerance:g}. Audit longer ones, or train with tt.Exact()."
            )
        else:
            choice = (
                f"Bias within {tolerance:g} from horizon {row.horizon} on:"
                f" tt.Truncated(stride={row.stride}, horizon={row.horizon}). {SHORTER_STRIDE}"
            )
        return [choice, *([NOISE.format(self.noise)] if self.is_noisy else []), UNEQUAL_DATA]

    @property
    def is_noisy(self) -> bool:
        """Whether half of `|g|^2` or more is sampling noise, so that relative biases are noise."""
        return self.noise >= NOISY

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for any logger; `None` for what is not finite."""
        return json_safe(asdict(self))

    def plot(self, axes: Any = None) -> Any:
        """Bias and cosine over the horizon; returns matplotlib's axes.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        axes = get_axes(axes)
        horizons = [row.horizon for row in self.rows]
        axes.semilogx(horizons, [row.bias for row in self.rows], marker="o", label="relative bias")
        axes.semilogx(horizons, [row.cosine for row in self.rows], marker="s", label="cosine")
        axes.set_xlabel("horizon (steps)")
        axes.set_ylim(
            min(0.0, *(row.cosine for row in self.rows)),
            max(1.05, *(row.bias for row in self.rows)),
        )
        axes.legend()
        return axes

    def __str__(self) -> str:
        return self.table()


def audit(
    net: Carried,
    stream: Readable,
    loss_fn: LossFn,
    horizons: Sequence[int] | None = None,
    *,
    stride: int | None = None,
    steps: int | None = None,
    state: State = None,
    memory: str | int | float = "512MB",
    chunk: int | Literal["auto"] = "auto",
    offload: Offload = None,
    verify: Verify = "first",
) -> Audit:
    """Measure the bias of truncations: the distance of each horizon's gradient from the exact one.

    Use it before you choose a horizon, and again later in training: it measures the gradient at the
    present weights. In a net that has not learned to remember, little gradient flows far back, and
    every horizon has a small bias; see `tt.reach`.

    Args:
        net: made by `tt.carry`; neither its weights, `.grad`, buffers nor its mode are changed.
        stream: a `tt.Stream`; it is read, not moved.
        loss_fn: as for `tt.updates`.
        horizons: steps, in any order; default: those of 50, 200, 800, 3200 that are shorter than
            the slice.
        stride: steps between two updates, for all horizons; those below it are refused. Default:
            each horizon is its own stride, as in `tt.Truncated(horizon)`. A short stride costs
            about horizon / stride backward passes.
        steps: the number of steps of every lane; default: to the end of the epoch.
        state: the state entering the stream's next step; default: the start of the epoch, and the
            net's initial state.
        memory: see `tt.Exact`.
        chunk: see `tt.Exact`.
        offload: see `tt.Exact`.
        verify: see `tt.Exact`.

    Returns:
        An `Audit`: a row for each horizon; `print(audit)` for a table, `suggest(tolerance)` for the
        shortest horizon within a bias.

    Raises:
        ConfigError: a horizon below 1 or below the stride, or a memory too small.
        DataError: no step to measure.
        RunError: a gradient is not finite.

    Cost: an exact gradient, plus a backward pass for its sampling noise and at most one for each
    horizon.

    Example:
        >>> import torch, throughtime as tt
        >>> data = {"inputs": torch.randn(500, 3), "targets": torch.randn(500)}
        >>> stream = tt.Stream(data, lanes=1, chunk=100)
        >>> net = tt.carry(torch.nn.Sequential(torch.nn.GRU(3, 8), torch.nn.Linear(8, 1)))
        >>> result = tt.audit(net, stream, torch.nn.MSELoss(), horizons=(2, 50))
        >>> result.rows[1].bias < result.rows[0].bias, result.rows[0].updates
        (True, 250)

    References: Aicher, Foti & Fox, UAI 2019.
    """
    objective = Objective(loss_fn)
    section = StreamSlice.of(net, stream, steps, state, objective)
    budget = MemoryBudget(memory, chunk, offload)
    budget.check()
    check_verify(verify)
    selected = _horizons(horizons, stride, section.steps)
    plans = [
        list(schedule.windows(section.steps, stride or horizon, horizon)) for horizon in selected
    ]
    probe = BiasProbe(net, section.read, section.steps, section.state, objective, budget, verify)
    return summary(
        net, probe.compare(plans, _half(section.steps)), selected, stride, plans, section
    )


def _half(steps: int) -> schedule.WindowGroup:
    """Every other block of the steps; nothing cuts their credit."""
    block = max(1, steps // BLOCKS)
    starts = range(0, steps, 2 * block)
    return schedule.WindowGroup(
        tuple((start, min(start + block, steps)) for start in starts), frozenset()
    )


def summary(
    net: Carried,
    comparison: Comparison,
    horizons: Sequence[int],
    stride: int | None,
    plans: Sequence[Sequence[schedule.Window]],
    section: StreamSlice,
) -> Audit:
    """The audit of a comparison."""
    names = list(trainable_weights(net))
    size = norm(comparison.exact)
    if not math.isfinite(size):
        raise RunError(
            "the exact gradient is not finite (NaN or infinite): nothing can be compared with it."
            " tt.updates with tt.Exact() names the chunk and the parameter"
        )
    valid_before = section.valid_before()
    rows = tuple(
        _row(
            horizon,
            stride or horizon,
            sum(valid_before[w.stop] > valid_before[w.counted] for w in plan),
            gradient,
            comparison.exact,
            names,
        )
        for horizon, plan, gradient in zip(horizons, plans, comparison.truncated, strict=True)
    )
    halves = zip(comparison.part or comparison.exact, comparison.exact, strict=True)
    noise = _ratio(norm([2 * part - whole for part, whole in halves]), size)
    return Audit(section.steps, section.stream.lanes, comparison.loss, size, rows, noise)


def _row(
    horizon: int,
    stride: int,
    updates: int,
    gradient: list[Tensor],
    exact: list[Tensor],
    names: list[str],
) -> Truncation:
    differences = [g - e for g, e in zip(gradient, exact, strict=True)]
    biases = {
        name: _ratio(norm([a]), norm([e]))
        for name, a, e in zip(names, differences, exact, strict=True)
    }
    sizes = norm(gradient), norm(exact)
    inner = sum(
        (wide(g).conj() * wide(e)).real.sum().item() for g, e in zip(gradient, exact, strict=True)
    )
    return Truncation(
        horizon,
        stride,
        _ratio(norm(differences), sizes[1]),
        _ratio(inner, sizes[0] * sizes[1]),
        _ratio(*sizes),
        updates,
        biases,
    )


def _ratio(part: float, whole: float) -> float:
    """The quotient; zero of zero is zero, for a parameter without gradient."""
    if whole:
        return part / whole
    return math.inf if part else 0.0


def _line(row: Truncation) -> str:
    worst = max(row.by_parameter, key=lambda name: row.by_parameter[name])
    return (
        f"{row.horizon:>9} {row.stride:>8} {row.updates:>8} {row.bias:>8.3f} {row.cosine:>8.3f}"
        f" {row.norm:>7.2f}  {worst} {row.by_parameter[worst]:.3f}"
    )


def _horizons(requested: Sequence[int] | None, stride: int | None, steps: int) -> list[int]:
    horizons = sorted(set(HORIZONS if requested is None else requested))
    if requested is None:
        horizons = [h for h in horizons if (stride or 1) <= h < steps] or [
            max(stride or 1, steps // 2)
        ]
    if not horizons:
        raise ConfigError("horizons is empty: expected at least one number of steps")
    for horizon in horizons:
        schedule.check_horizon(horizon if stride is None else stride, horizon)
    return horizons
