"""Records of traced backward passes, and what they say in numbers and words.

The definitions are those of `trace.py`.

Shapes: `T` steps, `B` lanes (rows of the batch), `H` size of a state or gate.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

VANISHED = 1e-3  # below this share of the largest norm, there and at every step before
EXPLODED = 10.0  # so many times more than the losses after it could add up to without growth


@dataclass(frozen=True, eq=False)
class BackwardRecord:
    """One backward pass: what came to each state and gate, by names such as `layer0.c`.

    Steps are counted from the first one that the pass reached.

    Attributes:
        norms: of the gradient at every step, per lane, `(T, B)`.
        gradients: themselves, `(T, B, H)`.
        edges: the norm of the gradient of the state that entered the first step, per lane, `(B,)`:
            what flows on into the past, or is cut. Gates have none, nor has the backward direction
            of a layer, nor a cell of your own.
        retention: by layer, the mean over steps and lanes of the gate that scales the past, f of an
            LSTM and z of a GRU, `(H,)`.
    """

    norms: dict[str, Tensor]
    gradients: dict[str, Tensor]
    edges: dict[str, Tensor]
    retention: dict[str, Tensor]


@dataclass(frozen=True)
class GradientSummary:
    """The gradient of one state or gate over a pass.

    Attributes:
        name: `layer0.c`.
        largest: its largest norm, over all lanes.
        at: the step of the largest.
        end: the last step that it reaches; lags are counted from there.
        vanished: the latest step at which it has vanished; `None` if it reaches the first step.
        exploded: the latest step at which it has exploded or is not finite; `None` if there is
            none.
        edge: the norm of what flows on into the steps before the pass, relative to the largest;
            above 1 it is still growing. `None` for gates.
    """

    name: str
    largest: float
    at: int
    end: int
    vanished: int | None
    exploded: int | None
    edge: float | None

    @classmethod
    def from_pass(cls, record: BackwardRecord, name: str) -> "GradientSummary":
        """Of one name in a pass."""
        norms = torch.linalg.vector_norm(record.norms[name], dim=1).cpu()
        norms = norms.nan_to_num(math.inf, math.inf)
        largest, at = norms.max(0)
        nonzero, edge = norms.nonzero(), record.edges.get(name)
        end = int(nonzero[-1]) if len(nonzero) else len(norms) - 1
        first = int((norms >= VANISHED * largest).nonzero()[0])
        if edge is None and not norms[:first].any():
            first = 0
        if edge is not None:
            edge = (edge.norm().cpu() / largest).item() if largest else 0.0
        return cls(
            name,
            largest.item(),
            int(at),
            end,
            first - 1 if first else None,
            _explosion(norms[: end + 1]),
            edge,
        )

    @property
    def lifetime(self) -> int:
        """Steps, counted back from its end, before it vanishes."""
        return self.end - (-1 if self.vanished is None else self.vanished) if self.largest else 0


def _explosion(norms: Tensor) -> int | None:
    """The latest step at which the norm is larger than the losses after it could add up to."""
    late = norms[-max(1, len(norms) // 10) :]
    finite = late[late.isfinite()]
    lags = torch.arange(len(norms), 0, -1, device="cpu")
    size = finite.amax() if len(finite) else math.inf
    beyond = ((norms > EXPLODED * lags * size) | norms.isinf()).nonzero()
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
        taus = (1 / mean.double().log()).abs()
        shares = taus.new_tensor([0.1, 0.5, 0.9])
        short, median, long = taus.quantile(shares, interpolation="nearest").tolist()
        return cls(name, short, median, long, tuple(taus.tolist()))


@dataclass(frozen=True)
class TraceSummary:
    """The result of `Trace.summary`; `print` gives a table.

    Attributes:
        rows: one for each state and gate.
        timescales: one for each layer with a retention gate.
    """

    rows: tuple[GradientSummary, ...]
    timescales: tuple[Timescale, ...]

    def __str__(self) -> str:
        """One line for each state and gate, then what the columns mean."""
        width = max(len("gradient of"), *(len(row.name) for row in self.rows))
        header = (
            f"{'gradient of':<{width}} {'largest':>9} {'at step':>8} {'lifetime':>8} {'edge':>7}"
            f" {'vanished':>9} {'exploded':>9}"
        )
        lines = [header]
        for row in self.rows:
            edge = "" if row.edge is None else f"{row.edge:.3f}"
            lines.append(
                f"{row.name:<{width}} {row.largest:>9.3g} {row.at:>8} {row.lifetime:>8} {edge:>7}"
                f" {row.vanished!s:>9} {row.exploded!s:>9}"
            )
        lines += [
            f"{scale.name}: its gates keep 1/e for {scale.median:.3g} steps (median; a tenth under"
            f" {scale.short:.3g}, a tenth over {scale.long:.3g})"
            for scale in self.timescales
        ]
        footnote = (
            f"lifetime: steps back from the end above {VANISHED:g} of the largest; edge:"
            " gradient that flows on into the steps before, relative to the largest;\nvanished and"
            " exploded: the latest step at which it has"
        )
        return "\n".join([*lines, footnote])
