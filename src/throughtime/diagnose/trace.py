"""The gradient of each state and gate at every step, from the backward pass that runs anyway.

It is the total gradient, dL/dh[t] through every path to the loss, not only through the output of
step t.

    vanishes at t     |a_s| < vanished * max|a|  for every s <= t      a_t: gradient at step t
                      a zero of a gate that scales a state of zero, as at the start, does not count
    explodes at t     |a_t| > exploded * (steps from t to the end) * max|a| of the last tenth
                      more than so many losses of that size, carried back without growth
    edge              |gradient of the state entering the first step| / max|a|
    time constant     tau = -1 / log(mean retention gate): steps until 1/e is left

References: S. Hochreiter, Y. Bengio, P. Frasconi and J. Schmidhuber, Gradient flow in recurrent
nets (2001), for vanishing and exploding; C. Tallec and Y. Ollivier, Can recurrent neural networks
warp time?, ICLR 2018, for gates as time constants.

Shapes: `T` steps, `B` lanes (rows of the batch), `H` hidden.
"""

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self
from weakref import ref

import torch
from torch import Tensor, nn

from throughtime.carry.carried import Carried
from throughtime.diagnose._trace_record import BackwardRecord, History, PassSampler
from throughtime.diagnose._traced_layers import TracedForward, traced_module
from throughtime.errors import ConfigError, ModelError, RunError, listed
from throughtime.gradient.schedule import check_whole

__all__ = ["BackwardRecord", "Trace", "TraceSummary", "trace", "traced_update"]

NEGLIGIBLE = 1e-12  # smaller shares of the largest norm are left out of logarithmic histograms


class ScalarWriter(Protocol):
    """The methods used of a `SummaryWriter`, of torch or tensorboardX."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """One number."""
        ...

    def add_histogram(self, tag: str, values: Any, step: int, /) -> Any:
        """A distribution."""
        ...


def trace(
    net: nn.Module,
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    tensors: bool = False,
    keep: int = 1,
    every: int = 1,
    vanished: float = 1e-3,
    exploded: float = 10.0,
) -> "Trace":
    """Trace a net until the trace is closed: `with tt.trace(net) as trace:` around any loop.

    Use it to find where along time a gradient vanishes or explodes. `tt.reach` measures the same of
    single losses, by lag; `tt.audit` measures what a truncation costs. Outputs are those of the
    untraced net, and gradients too, up to rounding.

    Args:
        net: any module with layers or cells of torch.nn or `tt.nn` inside, carried by `tt.carry` or
            not. Weights and modes stay as they are.
        names: your own cells, called once per step, by their path in the net (`""` is the net): a
            name for each tensor that they return, in order, `"_"` to skip one:
            `names={"cell": ("h", "c")}`. Lanes come first.
        tensors: keep the gradients themselves, not only their norms. Each pass needs about as much
            memory as its graph.
        keep: the number of passes kept, at least 1.
        every: trace the first of so many backward passes; in `tt.updates`, of so many updates. The
            others run at full speed.
        vanished: a gradient has vanished where it is below this share of its largest step, there
            and at every step before; in (0, 1).
        exploded: it has exploded where it is so many times larger than the losses after it could
            add up to without any growth.

    Returns:
        A `Trace`: `trace["layer0.c[17]"]` for norms, `(B,)`, `print(trace)` for a table. It keeps
        its records after it is closed.

    Raises:
        ModelError: the net has nothing to trace, or no module of a path in `names`.
        ConfigError: a number out of range, or the net is traced already.

    Cost: a traced pass runs each layer forward once more, step by step, and the backward pass step
        by step (docs/how-to/trace.md). A pass that is not traced costs a check.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.diagnose.trace import trace
        >>> lstm = torch.nn.LSTM(3, 8)
        >>> with trace(lstm) as lstm_trace:
        ...     y, _ = lstm(torch.randn(20, 2, 3))
        ...     y[-1].square().sum().backward()
        >>> lstm_trace["layer0.c[17]"].shape, lstm_trace["layer0.f"].shape  # norms per lane
        (torch.Size([2]), torch.Size([20, 2]))
        >>> bool(lstm_trace["layer0.c[0]"].max() < lstm_trace["layer0.c[19]"].max())
        True

    References: Hochreiter, Bengio, Frasconi & Schmidhuber, Gradient flow in recurrent nets (2001).
    """
    check_whole("keep", keep, 1)
    check_whole("every", every, 1)
    thresholds = Thresholds(vanished, exploded)
    module = net.module if isinstance(net, Carried) else net
    history = History(keep, tensors, PassSampler(every))
    forwards: list[TracedForward] = []
    try:
        for name, part, leaves in _traced_parts(module, names or {}):
            forwards.append(traced_module(name, part, leaves, history))
    except (ConfigError, ModelError):
        for forward in forwards:
            forward.close()
        raise
    return Trace(forwards, history, thresholds)


def _traced_parts(
    net: nn.Module, names: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, nn.Module, Sequence[str] | None]]:
    """The modules to trace, by their path in the net."""
    modules = dict(net.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ModelError(
            f"names has '{unknown[0]}', the net only {listed(sorted(modules), quoted=True)};"
            " give the path that net.named_modules() has"
        )
    own = {name for name, part in modules.items() if isinstance(part, (nn.RNNBase, nn.RNNCellBase))}
    if not own and not names:
        raise ModelError(
            f"{type(net).__name__} has no recurrent layer or cell of torch.nn inside. For a cell of"
            " your own, say what it is called and what it returns:"
            ' tt.trace(net, names={"cell": ("h", "c")})'
        )
    for name, part in modules.items():
        if name in own or name in names:
            yield name, part, names.get(name)


class Trace:
    """The result of `tt.trace`: a traced net, and its last backward passes.

    Names are `layer0.c`, `lstm.layer1.f`, `cell.h`: the path of the module, the layer, the state or
    gate; `layer0.c[17]` is one step of the pass.

    Example:
        >>> import torch
        >>> from throughtime.diagnose.trace import trace
        >>> net = torch.nn.GRU(3, 8)
        >>> with trace(net) as records:
        ...     net(torch.randn(20, 2, 3))[0].square().mean().backward()
        >>> records["layer0.h"].shape, records["layer0.h[0]"].shape
        (torch.Size([20, 2]), torch.Size([2]))
    """

    def __init__(
        self, forwards: Sequence[TracedForward], history: History, thresholds: "Thresholds"
    ) -> None:
        self._forwards, self._history, self._thresholds = forwards, history, thresholds
        if history.sampler.every > 1:
            key = id(self)
            SAMPLED[key] = ref(self, lambda _: SAMPLED.pop(key, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore the net's forward; the records stay."""
        SAMPLED.pop(id(self), None)
        for forward in reversed(self._forwards):
            forward.close()

    @property
    def count(self) -> int:
        """Backward passes traced so far."""
        return self._history.count

    @property
    def passes(self) -> tuple[BackwardRecord, ...]:
        """The last ones, at most `keep`, the oldest first."""
        return self._history.passes()

    @property
    def last(self) -> BackwardRecord:
        """The last pass.

        Raises:
            RunError: no pass was traced yet.
        """
        passes = self.passes
        if not passes:
            raise RunError(
                "no backward pass was traced yet: run loss.backward() (or an update of tt.updates)"
                " on outputs that the net computed while traced"
            )
        return passes[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """Every state and gate of the last pass."""
        return self.last.names

    def __getitem__(self, name: str) -> Tensor:
        """Norms of the last pass, per lane: `(T, B)` for `layer0.c`, `(B,)` for `layer0.c[17]`."""
        return self.last[name]

    def tensor(self, name: str) -> Tensor:
        """Gradients of the last pass: `(T, B, H)` for `layer0.c`, `(B, H)` for `layer0.c[17]`."""
        return self.last.tensor(name)

    def summary(self) -> "TraceSummary":
        """Where the gradient of the last pass vanishes or explodes, and how long gates remember."""
        return TraceSummary.from_pass(self.last, self._thresholds)

    def as_dict(self) -> dict[str, float]:
        """The summary as plain numbers, for any logger; without values that are not finite."""
        return self.summary().as_dict()

    def to_tensorboard(
        self, writer: ScalarWriter, step: int | None = None, *, prefix: str = "trace"
    ) -> None:
        """Write the last pass: the numbers of `as_dict`, and distributions.

        The distributions are those of the norms of all steps and of the time constants.

        Args:
            writer: anything with `add_scalar` and `add_histogram`.
            step: on the horizontal axis; default: the passes traced so far.
            prefix: of every tag.
        """
        summary, at = self.summary(), self.count if step is None else step
        for name, value in summary.as_dict().items():
            writer.add_scalar(f"{prefix}/{name}", value, at)
        for name, values in summary.distributions(self.last).items():
            writer.add_histogram(f"{prefix}/{name}", values, at)

    def __str__(self) -> str:
        return str(self.summary())

    @contextmanager
    def _sampled_update(self, modules: set[nn.Module]) -> Generator[None]:
        """Decide on one update of a net with these modules."""
        if not any(forward.module in modules for forward in self._forwards):
            yield
            return
        sampler = self._history.sampler
        active = sampler.begin_update()
        removed = [f for f in self._forwards if not active and f.open and f.remove()]
        complete = False  # an epoch ends with a call that makes no update
        try:
            yield
            complete = True
        finally:
            for forward in removed:
                if forward.open:  # the trace may have been closed meanwhile
                    forward.install()
            sampler.end_update(complete)


# Open traces with `every` above 1, by `id`. Every update asks whether there is one, and a dict is
# faster than a WeakSet.
SAMPLED: dict[int, ref[Trace]] = {}


@contextmanager
def traced_update(net: nn.Module) -> Generator[None]:
    """Run one update of `tt.updates`, traced or not, as each open trace of the net decides.

    While an update is not traced, the net has its own forward, so the fused step may run it.
    """
    modules = set(net.modules())
    with ExitStack() as stack:
        for one in [trace() for trace in SAMPLED.values()]:
            if one is not None:
                stack.enter_context(one._sampled_update(modules))
        yield


@dataclass(frozen=True)
class Thresholds:
    """Where a gradient counts as vanished, and as exploded."""

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
        cls, record: BackwardRecord, name: str, thresholds: Thresholds
    ) -> "GradientSummary":
        """Of one name in a pass."""
        norms = _finite_or_inf(record, name)
        largest, at = norms.max(0)
        nonzero, edge = norms.nonzero(), record.edges(name).get(0)
        end = int(nonzero[-1]) if len(nonzero) else len(norms) - 1
        alive = norms >= thresholds.vanished * largest
        if edge is None and len(nonzero):
            alive |= (norms == 0) & _reaches_a_state(record, name, thresholds.vanished)
        above = int(alive.nonzero()[0])
        return cls(
            name,
            len(norms),
            largest.item(),
            int(at),
            end,
            norms[end].item(),
            above - 1 if above else None,
            _explosion(norms[: end + 1], thresholds.exploded),
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


def _finite_or_inf(record: BackwardRecord, name: str) -> Tensor:
    norms = record.norms(name).cpu()
    return torch.where(norms.isnan(), math.inf, norms)


def _reaches_a_state(record: BackwardRecord, gate: str, vanished: float) -> Tensor:
    """The steps at which the gradient of a state of the gate's layer has not vanished, `(T,)`.

    A gate without a gradient there scales a state of zero. Its gradient has not vanished on the
    path from the loss.
    """
    layer = gate.rpartition(".")[0]
    names = [n for n in record.names if n.rpartition(".")[0] == layer and record.edges(n)]
    alive = torch.zeros(len(record.norms(gate)), dtype=torch.bool, device="cpu")
    for norms in (_finite_or_inf(record, name) for name in names):
        alive |= (norms >= vanished * norms.max()) & (norms > 0)
    return alive


def _explosion(norms: Tensor, factor: float) -> int | None:
    """The latest step at which the norm is larger than the losses after it could add up to."""
    late = norms[-max(1, len(norms) // 10) :]
    size = late[late.isfinite()].max().item() if late.isfinite().any() else math.inf
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
        taus = (1 / mean.double().log()).abs().cpu()
        ranks = taus.sort().values
        short, median, long = (
            ranks[round(share * (len(ranks) - 1))].item() for share in (0.1, 0.5, 0.9)
        )
        return cls(name, short, median, long, tuple(taus.tolist()))


@dataclass(frozen=True)
class TraceSummary:
    """The result of `Trace.summary`.

    Attributes:
        rows: one for each state and gate.
        timescales: one for each layer with a retention gate.
        thresholds: where a gradient counts as vanished, and as exploded.
    """

    rows: tuple[GradientSummary, ...]
    timescales: tuple[Timescale, ...]
    thresholds: Thresholds

    @classmethod
    def from_pass(cls, record: BackwardRecord, thresholds: Thresholds) -> "TraceSummary":
        """The summary of one pass."""
        means = record.mean_retention_gate()
        return cls(
            tuple(GradientSummary.from_pass(record, name, thresholds) for name in record.names),
            tuple(Timescale.from_mean(name, mean) for name, mean in means.items()),
            thresholds,
        )

    def as_dict(self) -> dict[str, float]:
        """Plain numbers by `layer0.c/lifetime` and the like; without values that are not finite."""
        values: dict[str, float | None] = {}
        for row in self.rows:
            values |= {
                f"{row.name}/largest": row.largest,
                f"{row.name}/last": row.last,
                f"{row.name}/edge": row.edge,
                f"{row.name}/lifetime": row.lifetime,
                f"{row.name}/exploded": row.exploded is not None,
            }
        for scale in self.timescales:
            values |= {
                f"{scale.name}/tau_short": scale.short,
                f"{scale.name}/tau_median": scale.median,
                f"{scale.name}/tau_long": scale.long,
            }
        return {
            name: float(value)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }

    def distributions(self, record: BackwardRecord) -> dict[str, Tensor]:
        """The logarithm (base 10) of the norms of all steps, and the time constants."""
        values: dict[str, Tensor] = {}
        for row in self.rows:
            norms = record.norms(row.name).cpu()
            norms = norms[norms.isfinite() & (norms > NEGLIGIBLE * row.largest)]
            values |= {f"{row.name}/log10_norm": norms.log10()} if len(norms) else {}
        for scale in self.timescales:
            taus = torch.tensor(scale.taus, dtype=torch.float64, device="cpu")
            values |= {f"{scale.name}/tau": taus[taus.isfinite()]} if taus.isfinite().any() else {}
        return values

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
            f"lifetime: steps back from the end above {self.thresholds.vanished:g} of the largest;"
            " edge: gradient that flows on into the steps before, relative to the largest"
        )
        return "\n".join([*lines, footnote])

    def __str__(self) -> str:
        return self.table()
