"""What a pass says in words: where its gradient dies or blows up, what crosses the edge, how long
the gates remember.

    dies at t       |a_s| < vanished * max|a|  for every s <= t                       a_t: total
    gradient at step t, over all lanes
    blows up at t   |a_t| > exploded * (steps from t to its end) * largest |a| of the last tenth:
                    more than as many losses of that size add up to, carried back without growth
    crosses         |adjoint of the state entering the first step| / max|a|
    remembers       tau = -1 / log(mean of the gate that keeps the past), steps after which 1/e is
    left

References: S. Hochreiter, Y. Bengio, P. Frasconi and J. Schmidhuber, Gradient flow in recurrent
nets (2001), for vanishing and exploding; C. Tallec and Y. Ollivier, Can recurrent neural networks
warp time?, ICLR 2018, for gates as time constants.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from throughtime.diagnose.trace.passes import Pass
from throughtime.errors import ConfigError

FADED = 1e-12  # of the largest norm: what is smaller has no place in a histogram of logarithms


@dataclass(frozen=True)
class Thresholds:
    """Where a gradient counts as dead, and as blown up."""

    vanished: float
    exploded: float

    def __post_init__(self) -> None:
        if not 0 < self.vanished < 1:
            raise ConfigError(
                f"vanished={self.vanished}: expected a share of the largest gradient, between 0 and"
                " 1, such as 1e-3"
            )
        if not self.exploded >= 1:
            raise ConfigError(
                f"exploded={self.exploded}: expected a factor of at least 1, such as 10: without"
                " growth there is no explosion"
            )


@dataclass(frozen=True)
class Row:
    """The gradient of one state or gate over a pass.

    Attributes:
        name: `layer0.c`.
        steps: T.
        largest: its largest norm, over all lanes.
        at: the step of the largest.
        end: the last step that it reaches; lags are counted from there.
        last: its norm at that step.
        vanished: the step at which it has died, seen from the end; `None` if it lives to the first
            step.
        exploded: the latest step at which it has blown up, or is not finite; `None` if there is
            none.
        edge: the norm of what flows on into the steps before the pass, relative to the largest;
            above 1 it grows still. `None` for gates.
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

    @property
    def lived(self) -> int:
        """Steps, counted back from its end, that it lives."""
        return self.end - (-1 if self.vanished is None else self.vanished) if self.largest else 0

    def in_words(self) -> str:
        """What became of it."""
        if not self.largest:
            return "no gradient reaches it"
        if self.exploded is not None:
            return f"blows up at step {self.exploded}, lag {self.end - self.exploded}"
        if self.vanished is not None:
            return f"dies at step {self.vanished}, lag {self.end - self.vanished}"
        return "lives to the first step"


@dataclass(frozen=True)
class Timescale:
    """How long the gates of a layer remember, in steps: `tau = -1 / log(mean gate)`, one for each
    unit.

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
    def of(cls, name: str, mean: Tensor) -> "Timescale":
        """From the mean of the gate, `(H,)`."""
        taus = (1 / mean.double().log()).abs().cpu()
        ranks = taus.sort().values
        short, median, long = (
            ranks[round(share * (len(ranks) - 1))].item() for share in (0.1, 0.5, 0.9)
        )
        return cls(name, short, median, long, tuple(taus.tolist()))


@dataclass(frozen=True)
class Found:
    """What `Trace.found` says.

    Attributes:
        rows: one for each state and gate.
        paces: one for each layer with a gate that keeps the past.
        thresholds: what counts as dead and as blown up.
    """

    rows: tuple[Row, ...]
    paces: tuple[Timescale, ...]
    thresholds: Thresholds

    @classmethod
    def of(cls, seen: Pass, thresholds: Thresholds) -> "Found":
        """The figures of a pass."""
        rows = tuple(_row(seen, name, thresholds) for name in seen.names)
        return cls(
            rows, tuple(Timescale.of(name, mean) for name, mean in seen.kept().items()), thresholds
        )

    def as_dict(self) -> dict[str, float]:
        """Plain numbers by `layer0.c/lived` and the like.

        What is not finite, or is not there, is left out.
        """
        found: dict[str, float] = {}
        for row in self.rows:
            told = {
                "largest": row.largest,
                "last": row.last,
                "edge": row.edge,
                "lived": row.lived,
                "exploded": row.exploded is not None,
            }
            found |= {
                f"{row.name}/{key}": float(value)
                for key, value in told.items()
                if value is not None
            }
        for pace in self.paces:
            found |= {
                f"{pace.name}/tau_{key}": getattr(pace, key) for key in ("short", "median", "long")
            }
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def spreads(self, seen: Pass) -> dict[str, Tensor]:
        """What is told as a distribution: the logarithm (base 10) of the norms of all steps, and the time constants."""
        found: dict[str, Tensor] = {}
        for row in self.rows:
            norms = seen.norms(row.name).cpu()
            alive = norms[norms.isfinite() & (norms > FADED * row.largest)]
            found |= {f"{row.name}/log10_norm": alive.log10()} if len(alive) else {}
        for pace in self.paces:
            taus = torch.tensor(pace.taus, dtype=torch.float64)
            found |= {f"{pace.name}/tau": taus[taus.isfinite()]} if taus.isfinite().any() else {}
        return found

    def table(self) -> str:
        """The figures as text, one line for each state and gate, then what they mean."""
        wide = max(len("gradient of"), *(len(row.name) for row in self.rows))
        lines = [
            f"{'gradient of':<{wide}} {'largest':>9} {'at step':>8} {'at the end':>10} {'lives':>8}"
            f" {'edge':>7}  "
        ]
        for row in self.rows:
            edge = "" if row.edge is None else f"{row.edge:.3f}"
            lines.append(
                f"{row.name:<{wide}} {row.largest:>9.3g} {row.at:>8} {row.last:>10.3g}"
                f" {row.lived:>8} {edge:>7}  {row.in_words()}"
            )
        lines += [
            f"{pace.name}: its gates keep 1/e for {pace.median:.3g} steps (median; a tenth under"
            f" {pace.short:.3g}, a tenth over {pace.long:.3g})"
            for pace in self.paces
        ]
        return "\n".join([*(line.rstrip() for line in lines), self._foot()])

    def _foot(self) -> str:
        return (
            f"lives: steps back from the end above {self.thresholds.vanished:g} of the largest;"
            " edge: what flows on into the steps before, of the largest"
        )

    def __str__(self) -> str:
        return self.table()


def _row(seen: Pass, name: str, thresholds: Thresholds) -> Row:
    norms = seen.norms(name).cpu()
    norms = torch.where(norms.isnan(), math.inf, norms)
    largest, at = norms.max(0)
    reached, edge = norms.nonzero(), seen.edges(name).get(0)
    end = int(reached[-1]) if len(reached) else len(norms) - 1
    alive = (norms >= thresholds.vanished * largest).nonzero()
    return Row(
        name,
        len(norms),
        largest.item(),
        int(at),
        end,
        norms[end].item(),
        int(alive[0]) - 1 if int(alive[0]) else None,
        _blown_up(norms[: end + 1], thresholds.exploded),
        None if edge is None else edge / largest.item() if largest else 0.0,
    )


def _blown_up(norms: Tensor, factor: float) -> int | None:
    """The latest step at which the norm is more than the losses after it could add up to."""
    late = norms[-max(1, len(norms) // 10) :]
    size = late[late.isfinite()].max().item() if late.isfinite().any() else math.inf
    lags = torch.arange(len(norms), 0, -1, dtype=norms.dtype, device=norms.device)
    beyond = ((norms > factor * lags * size) | norms.isinf()).nonzero()
    return int(beyond[-1]) if len(beyond) else None
