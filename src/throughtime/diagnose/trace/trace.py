"""The trace: the gradient of each state and gate at every step, seen in the backward pass that is
made anyway.

It is the total gradient, dL/dh[t] through every path to the loss, not what reaches h[t] from its
own output alone.

Shapes: `T` steps, `B` lanes, `H` hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn

from throughtime.carry.carried import Carried
from throughtime.diagnose.trace.found import Found, Thresholds
from throughtime.diagnose.trace.passes import History, Pass
from throughtime.diagnose.trace.watch import Watched, watch
from throughtime.errors import ConfigError, ModelError, RunError
from throughtime.gradient.schedule import check_whole


class Writer(Protocol):
    """What figures are written to: a `SummaryWriter`, of torch or tensorboardX."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """One number."""
        ...

    def add_histogram(self, tag: str, values: Any, step: int, /) -> Any:
        """Many numbers, as their distribution."""
        ...


def trace(
    net: nn.Module,
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    tensors: bool = False,
    keep: int = 1,
    vanished: float = 1e-3,
    exploded: float = 10.0,
) -> "Trace":
    """The net under watch, until the trace is closed: `with tt.trace(net) as trace:` around any
    loop.

    Use it to see where along time a gradient dies or blows up; `tt.reach` measures the same of
    single losses, by lag, and `tt.audit` what a truncation costs. Loss, outputs and gradients stay
    what they are. Every backward pass is seen, and the last `keep` are kept.

    Args:
        net: any module with layers or cells of torch.nn or `tt.nn` inside, carried by `tt.carry` or
            not; weights and modes are not touched.
        names: cells of your own, called once per step, by their path in the net (`""` is the net):
            a name for each tensor that they return, in order, `"_"` for one that is not wanted:
            `names={"cell": ("h", "c")}`. Lanes come first.
        tensors: keep the gradients themselves, not their norms alone; of each pass about as much
            memory as its graph.
        keep: how many passes are kept, at least 1.
        vanished: a gradient has died where it is below this share of its largest step, there and at
            every step before; in (0, 1).
        exploded: it has blown up where it is so many times larger than what the losses after it
            could add up to without any growth.

    Returns:
        A `Trace`: `trace["layer0.c[17]"]` for norms, `(B,)`, `print(trace)` for a table in words.
        What was seen stays after it is closed.

    Raises:
        ModelError: nothing in the net can be traced, or a module in `names` is not there.
        ConfigError: a number out of range, or the net is traced already.

    Cost: layers of tt.nn 1.02 to 1.14 of the time of an untraced step, cells 1.4 to 1.8, nn.GRU and
        nn.RNN on a CPU no more than untraced, nn.LSTM in float32 3 to 4 (docs/trace.md): the
        kernels of tt.nn tell the norms; of torch.nn, a layer's kernel plays the forward pass, a
        recurrence in plain PyTorch the backward one. Second derivatives through a traced layer of
        torch.nn are refused.

    Example:
        >>> import torch, throughtime as tt
        >>> from throughtime.diagnose.trace import trace
        >>> lstm = torch.nn.LSTM(3, 8)
        >>> with trace(lstm) as seen:
        ...     y, _ = lstm(torch.randn(20, 2, 3))
        ...     y[-1].square().sum().backward()
        >>> seen["layer0.c[17]"].shape, seen["layer0.f"].shape  # norms: one for each lane
        (torch.Size([2]), torch.Size([20, 2]))
        >>> bool(seen["layer0.c[0]"].max() < seen["layer0.c[19]"].max())
        True

    References: Hochreiter, Bengio, Frasconi & Schmidhuber, Gradient flow in recurrent nets (2001).
    """
    check_whole("keep", keep, 1)
    thresholds = Thresholds(vanished, exploded)
    module = net.module if isinstance(net, Carried) else net
    history = History(keep)
    watched: list[Watched] = []
    try:
        for name, part, leaves in _parts(module, names or {}):
            watched.append(watch(name, part, leaves, history, tensors))
    except (ConfigError, ModelError):
        for one in watched:
            one.close()
        raise
    return Trace(watched, history, thresholds)


def _parts(
    net: nn.Module, names: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, nn.Module, Sequence[str] | None]]:
    """What is to be watched, by its path in the net."""
    modules = dict(net.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ModelError(
            f"names has '{unknown[0]}', the net only {sorted(modules)}; give the path that"
            " net.named_modules() has"
        )
    own = {name for name, part in modules.items() if isinstance(part, (nn.RNNBase, nn.RNNCellBase))}
    if not own and not names:
        raise ModelError(
            f"{type(net).__name__} has no recurrent layer or cell of torch.nn inside. For a cell of"
            ' your own, say where it is and what it returns: tt.trace(net, names={"cell": ("h",'
            ' "c")})'
        )
    for name, part in modules.items():
        if name in own or name in names:
            yield name, part, names.get(name)


class Trace:
    """What `tt.trace` returns: the net under watch, and the last passes seen.

    Names are `layer0.c`, `lstm.layer1.f`, `cell.h`: the path of the module, the layer, the state or
    gate; `layer0.c[17]` is one step of the pass.
    """

    def __init__(
        self, watched: Sequence[Watched], history: History, thresholds: Thresholds
    ) -> None:
        self._watched, self._history, self._thresholds = watched, history, thresholds

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
        """Gives the net its forward back; what was seen stays."""
        for one in reversed(self._watched):
            one.close()

    @property
    def count(self) -> int:
        """Backward passes seen so far."""
        return self._history.count

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The last ones, at most `keep`, the oldest first."""
        return self._history.passes()

    @property
    def last(self) -> Pass:
        """The last pass.

        Raises:
            RunError: there was none.
        """
        passes = self.passes
        if not passes:
            raise RunError(
                "no backward pass was seen yet: run loss.backward() (or an update of tt.updates) on"
                " outputs that the net made while traced"
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

    def found(self) -> Found:
        """Where the gradient of the last pass dies or blows up, what crosses its edge, and how long the gates remember."""
        return Found.of(self.last, self._thresholds)

    def as_dict(self) -> dict[str, float]:
        """The same as plain numbers, for any logger.

        What is not finite, or is not there, is left out.
        """
        return self.found().as_dict()

    def to_tensorboard(
        self, writer: Writer, step: int | None = None, *, prefix: str = "trace"
    ) -> None:
        """Writes the last pass: each number of `as_dict`, the norms of all steps and the time
        constants as distributions.

        Args:
            writer: anything with `add_scalar` and `add_histogram`.
            step: on the horizontal axis; default: the passes seen so far.
            prefix: of every tag.
        """
        found, at = self.found(), self.count if step is None else step
        for name, value in found.as_dict().items():
            writer.add_scalar(f"{prefix}/{name}", value, at)
        for name, values in found.spreads(self.last).items():
            writer.add_histogram(f"{prefix}/{name}", values, at)

    def __str__(self) -> str:
        return str(self.found())
