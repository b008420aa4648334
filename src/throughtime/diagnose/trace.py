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

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self, TypeVar
from weakref import ref

from torch import Tensor, nn

from throughtime.carry.carried import Carried
from throughtime.diagnose._trace_record import OUTSIDE, BackwardRecord, History
from throughtime.diagnose._trace_summary import GradientSummary, Timescale, TraceSummary
from throughtime.diagnose._traced_layers import TracedForward, traced_module
from throughtime.errors import ConfigError, ModelError, RunError, listed
from throughtime.gradient.window import check_whole

__all__ = [
    "BackwardRecord",
    "GradientSummary",
    "Timescale",
    "Trace",
    "TraceSummary",
    "trace",
    "traced_update",
]

Result = TypeVar("Result")


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

    Cost: a traced pass runs each layer once more, step by step, with the graph of all its steps
        (docs/how-to/trace.md). A pass that is not traced costs a check.

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
    if not 0 < vanished < 1:
        raise ConfigError(
            f"vanished={vanished}: expected a share of the largest gradient, between 0 and 1, such"
            " as 1e-3"
        )
    if not exploded >= 1:
        raise ConfigError(
            f"exploded={exploded}: expected a factor of at least 1, such as 10: without growth"
            " there is no explosion"
        )
    module, own = net.module if isinstance(net, Carried) else net, names or {}
    modules = dict(module.named_modules())
    unknown = [name for name in own if name not in modules]
    if unknown:
        raise ModelError(
            f"names has '{unknown[0]}', the net only {listed(sorted(modules), quoted=True)};"
            " give the path that net.named_modules() has"
        )
    kinds = nn.RNNBase, nn.RNNCellBase
    parts = {n: part for n, part in modules.items() if n in own or isinstance(part, kinds)}
    if not parts:
        raise ModelError(
            f"{type(module).__name__} has no recurrent layer or cell of torch.nn inside. For a cell"
            " of your own, say what it is called and what it returns:"
            ' tt.trace(net, names={"cell": ("h", "c")})'
        )
    history, forwards = History(keep, tensors, every), list[TracedForward]()
    with ExitStack() as opened:
        for name, part in parts.items():
            forwards.append(traced_module(name, part, own.get(name), history))
            opened.callback(forwards[-1].close)
        opened.pop_all()
    return Trace(forwards, history, vanished, exploded)


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
        self,
        forwards: Sequence[TracedForward],
        history: History,
        vanished: float,
        exploded: float,
    ) -> None:
        self._forwards, self._history, self._limits = forwards, history, (vanished, exploded)
        if history.every > 1:
            key = id(self)
            SAMPLED[key] = ref(self, lambda _: SAMPLED.pop(key, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        return self._history.passes

    @property
    def last(self) -> BackwardRecord:
        """The last pass.

        Raises:
            RunError: no pass was traced yet.
        """
        if not self.passes:
            raise RunError(
                "no backward pass was traced yet: run loss.backward() (or an update of tt.updates)"
                " on outputs that the net computed while traced"
            )
        return self.passes[-1]

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

    def summary(self) -> TraceSummary:
        """Where the gradient of the last pass vanishes or explodes, and how long gates remember."""
        return TraceSummary.from_pass(self.last, *self._limits)

    def as_dict(self) -> dict[str, float]:
        """The summary as plain numbers, for any logger; without values that are not finite."""
        return self.summary().as_dict()

    def to_tensorboard(
        self, writer: Any, step: int | None = None, *, prefix: str = "trace"
    ) -> None:
        """Write the last pass: the numbers of `as_dict`, and distributions.

        The distributions are those of the norms of all steps and of the time constants.

        Args:
            writer: a `SummaryWriter` of torch or tensorboardX, or anything else with
                `add_scalar(tag, value, step)` and `add_histogram(tag, values, step)`.
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


# Open traces with `every` above 1, by `id`. Every update asks whether there is one, and a dict is
# faster than a WeakSet.
SAMPLED: dict[int, ref[Trace]] = {}


def traced_update(net: nn.Module, run: Callable[[], Result | None]) -> Result | None:
    """Run one update of `tt.updates`, traced or not, as each open trace of the net decides.

    While an update is not traced, the net has its own forward, so the fused step may run it.

    Args:
        net: that is updated.
        run: makes the update, or returns None at the end of the epoch.
    """
    modules, active, removed = set(net.modules()), list[History](), list[TracedForward]()
    for one in [known() for known in SAMPLED.values()]:
        if one is not None and any(forward.module in modules for forward in one._forwards):
            history = one._history
            if not history.decide():
                removed += [f for f in one._forwards if f.open and f.remove()]
            history.fixed = True
            active.append(history)
    result = None
    try:
        result = run()
    finally:
        for forward in removed:
            if forward.open:  # the trace may have been closed meanwhile
                forward.install()
        for history in active:
            history.fixed, history.ended = False, None if result is None else OUTSIDE
    return result
