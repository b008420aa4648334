"""Where a traced gradient vanishes or explodes, and how long gates remember, in numbers and words.

The definitions are those of `trace.py`.

Shapes: `T` steps, `H` hidden.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from throughtime.diagnose._trace_record import BackwardRecord

NEGLIGIBLE = 1e-12  # smaller shares of the largest norm are left out of logarithmic histograms


@dataclass(frozen=True)
class GradientSummary:
    """The gradient of one state or gate over a pass.

    Attributes:
        name: `layer0.c`.
        steps: T.
        largest: its largest norm, over all lanes.
        at: the step of the largest.
        end: the last step that it reaches; lags are counted from there.
        last: its norm at that step.
        vanished: the latest step at which it has vanished; `None` if it reaches the first step.
        exploded: the latest step at which it has exploded or is not finite; `None` if there is
            none.
        edge: the norm of what flows on into the steps before the pass, relative to the largest;
            above 1 it is still growing. `None` for gates.
    """

    name: str
    steps: int
    largest: float
    at: int
    end: int
    last: float
    vanished: int | None
    exploded: int | None
    edge: float | None

    @classmethod
    def from_pass(
        cls, record: BackwardRecord, name: str, vanished: float, exploded: float
    ) -> "GradientSummary":
        """Of one name in a pass, with the thresholds of `tt.trace`."""
        norms = _norms(record, name)
        largest, at = norms.max(0)
        nonzero, edge = norms.nonzero(), record.edges(name).get(0)
        end = int(nonzero[-1]) if len(nonzero) else len(norms) - 1
        alive = norms >= vanished * largest
        if edge is None and len(nonzero):
            # a gate without a gradient scales a state of zero; where the gradient of a state of its
            # layer has not vanished, that of the gate has not on the path from the loss
            layer = name.rpartition(".")[0]
            for other in record.names:
                if other.rpartition(".")[0] == layer and record.edges(other):
                    state = _norms(record, other)
                    alive |= (norms == 0) & (state > 0) & (state >= vanished * state.max())
        first = int(alive.nonzero()[0])
        return cls(
            name,
            len(norms),
            largest.item(),
            int(at),
            end,
            norms[end].item(),
            first - 1 if first else None,
            _explosion(norms[: end + 1], exploded),
            None if edge is None else edge / largest.item() if largest else 0.0,
        )

    @property
    def lifetime(self) -> int:
        """Steps, counted back from its end, before it vanishes."""
        return self.end - (-1 if self.vanished is None else self.vanished) if self.largest else 0

    def in_words(self) -> str:
        """Where it ends."""
        if not self.largest:
            return "no gradient arrives"
        if self.exploded is not None:
            return f"explodes at step {self.exploded}, lag {self.end - self.exploded}"
        if self.vanished is not None:
            return f"vanishes at step {self.vanished}, lag {self.end - self.vanished}"
        return "reaches the first step"


def _norms(record: BackwardRecord, name: str) -> Tensor:
    """Norms over all lanes, `(T,)`, on the host; infinite where they are not a number."""
    return record.norms(name).cpu().nan_to_num(math.inf, math.inf)


def _explosion(norms: Tensor, factor: float) -> int | None:
    """The latest step at which the norm is larger than the losses after it could add up to."""
    late = norms[-max(1, len(norms) // 10) :]
    size = max((norm for norm in late.tolist() if norm < math.inf), default=math.inf)
    lags = torch.arange(len(norms), 0, -1, dtype=norms.dtype, device="cpu")
    beyond = ((norms > factor * lags * size) | norms.isinf()).nonzero()
    return int(beyond[-1]) if len(beyond) else None


@dataclass(frozen=True)
class Timescale:
    """How many steps the gates of a layer remember: `tau = -1 / log(mean gate)`, for each unit.

    Attributes:
        name: `layer0`.
        short: the tenth percentile.
        median: half of the units remember longer.
        long: the ninetieth percentile.
        taus: of every unit.
    """

    name: str
    short: float
    median: float
    long: float
    taus: tuple[float, ...]

    @classmethod
    def from_mean(cls, name: str, mean: Tensor) -> "Timescale":
        """From the mean of the retention gate, `(H,)`."""
        taus = (1 / mean.double().log()).abs().tolist()
        ranks = sorted(taus)
        short, median, long = (ranks[round(q * (len(ranks) - 1))] for q in (0.1, 0.5, 0.9))
        return cls(name, short, median, long, tuple(taus))


@dataclass(frozen=True)
class TraceSummary:
    """The result of `Trace.summary`.

    Attributes:
        rows: one for each state and gate.
        timescales: one for each layer with a retention gate.
        threshold: the share of the largest norm below which a gradient has vanished.
    """

    rows: tuple[GradientSummary, ...]
    timescales: tuple[Timescale, ...]
    threshold: float

    @classmethod
    def from_pass(cls, record: BackwardRecord, vanished: float, exploded: float) -> "TraceSummary":
        """The summary of one pass, with the thresholds of `tt.trace`."""
        return cls(
            tuple(GradientSummary.from_pass(record, n, vanished, exploded) for n in record.names),
            tuple(Timescale.from_mean(*pair) for pair in record.mean_retention_gate().items()),
            vanished,
        )

    def as_dict(self) -> dict[str, float]:
        """Plain numbers by `layer0.c/lifetime` and the like; without values that are not finite."""
        values: dict[str, float | None] = {}
        for row in self.rows:
            for key in ("largest", "last", "edge", "lifetime"):
                values[f"{row.name}/{key}"] = getattr(row, key)
            values[f"{row.name}/exploded"] = row.exploded is not None
        for scale in self.timescales:
            for key in ("short", "median", "long"):
                values[f"{scale.name}/tau_{key}"] = getattr(scale, key)
        return {n: float(v) for n, v in values.items() if v is not None and math.isfinite(v)}

    def distributions(self, record: BackwardRecord) -> dict[str, Tensor]:
        """The logarithm (base 10) of the norms of all steps, and the time constants."""
        values: dict[str, Tensor] = {}
        for row in self.rows:
            norms = _norms(record, row.name)
            values[f"{row.name}/log10_norm"] = norms[norms > NEGLIGIBLE * row.largest].log10()
        for scale in self.timescales:
            values[f"{scale.name}/tau"] = torch.tensor(scale.taus, device="cpu")
        finite = {name: some[some.isfinite()] for name, some in values.items()}
        return {name: some for name, some in finite.items() if len(some)}

    def table(self) -> str:
        """A text table, one line for each state and gate, then what the columns mean."""
        width = max(len("gradient of"), *(len(row.name) for row in self.rows))
        header = (
            f"{'gradient of':<{width}} {'largest':>9} {'at step':>8} {'at the end':>10}"
            f" {'lifetime':>8} {'edge':>7}"
        )
        lines = [header]
        for row in self.rows:
            edge = "" if row.edge is None else f"{row.edge:.3f}"
            lines.append(
                f"{row.name:<{width}} {row.largest:>9.3g} {row.at:>8} {row.last:>10.3g}"
                f" {row.lifetime:>8} {edge:>7}  {row.in_words()}"
            )
        lines += [
            f"{scale.name}: its gates keep 1/e for {scale.median:.3g} steps (median; a tenth under"
            f" {scale.short:.3g}, a tenth over {scale.long:.3g})"
            for scale in self.timescales
        ]
        footnote = (
            f"lifetime: steps back from the end above {self.threshold:g} of the largest; edge:"
            " gradient that flows on into the steps before, relative to the largest"
        )
        return "\n".join([*lines, footnote])

    def __str__(self) -> str:
        return self.table()
