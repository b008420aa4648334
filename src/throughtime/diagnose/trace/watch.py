"""How a module is put under watch: its forward is stood in for, in the instance, until the trace is
closed.

A layer or cell of torch.nn runs its own forward, checks and all; only the kernel that it calls at
the end is taken over. A cell of the user's runs as it is, and each named tensor that it returns
tells its gradient.

Shapes: `T` steps, `B` lanes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, handle_torch_function

from throughtime.diagnose.trace.fused import captured, stretched
from throughtime.diagnose.trace.passes import History
from throughtime.diagnose.trace.played import Call
from throughtime.diagnose.trace.reel import Reel
from throughtime.diagnose.trace.stepped import Copied, Inside, Step
from throughtime.diagnose.trace.track import Track
from throughtime.errors import ConfigError, ModelError
from throughtime.kernels import recurrent
from throughtime.nn.layers import WATCHES, Recurrent, Run

LAYERS = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
}
CELLS = {
    torch.lstm_cell: "lstm",
    torch.gru_cell: "gru",
    torch.rnn_tanh_cell: "rnn_tanh",
    torch.rnn_relu_cell: "rnn_relu",
}


class Watched:
    """Stands in for the forward of one module."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._module, self._run = module, run
        self._before: Callable[..., Any] | None = module.__dict__.get("forward")
        if isinstance(self._before, Watched) and self._before.open:
            raise ConfigError(
                f"this {type(module).__name__} is traced already; close the first trace before the"
                " second: trace.close()"
            )
        self._inner: Callable[..., Any] = module.forward
        update_wrapper(self, self._inner)
        self.open = True
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.open and torch.is_grad_enabled():
            return self._run(self._inner, *args, **kwargs)
        return self._inner(*args, **kwargs)

    def close(self) -> None:
        """Puts the forward back; where somebody has wrapped this one since, it only passes on."""
        self.open = False
        if self._module.__dict__.get("forward") is self:
            del self._module.forward
            if self._before is not None:
                self._module.forward = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the net is not watched."""
        if self._before is not None:
            return deepcopy(self._before, memo)
        return MethodType(type(self._module).forward, memo.get(id(self._module), self._module))

    def __reduce__(self) -> tuple[Any, ...]:
        """Nor is one that was saved."""
        return getattr, (self._module, "forward")


def watch(
    name: str, module: nn.Module, leaves: Sequence[str] | None, history: History, tensors: bool
) -> Watched:
    """The module under watch; `leaves` names what a user's cell returns."""
    if leaves is not None:
        return Watched(module, OwnCell(Track(name or "cell", history, tensors), leaves))
    if isinstance(module, nn.RNNCellBase):
        return Watched(module, Cell(Track(name or "cell", history, tensors)))
    if isinstance(module, nn.RNNBase):
        path = f"{name}." if name else ""
        ends = ("", "_reverse") if module.bidirectional else ("",)
        layer = Layer(
            [
                [Track(f"{path}layer{k}{end}", history, tensors) for end in ends]
                for k in range(module.num_layers)
            ]
        )
        return (
            WatchedFused(module, Fused(layer, tensors))
            if isinstance(module, Recurrent)
            else Watched(module, layer)
        )
    raise ModelError(
        f"module '{name}' is a {type(module).__name__}, which torch.nn does not know as a recurrent"
        " layer or cell; name what it returns, tt.trace(net, names={...})"
    )


class Taking(TorchFunctionMode):
    """Takes one call of a kernel over; everything else of torch is as ever."""

    def __init__(self, kernels: Mapping[Any, str], play: Callable[..., Any]) -> None:
        super().__init__()
        self._kernels, self._play = kernels, play

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kind = None if kwargs else self._kernels.get(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        if not _len_torch_function_stack():
            return self._play(func, kind, *args)
        return handle_torch_function(
            _Once(func, partial(self._play, func, kind)), (), *args
        )  # a tt.doctor looks on as well


class _Once:
    """A kernel that is taken over once, as whoever looks on knows it.

    Who calls it again gets the kernel itself.
    """

    def __init__(self, kernel: Callable[..., Any], play: Callable[..., Any]) -> None:
        self._kernel, self._next, self.__name__ = kernel, play, kernel.__name__

    def __call__(self, *args: Any) -> Any:
        play, self._next = self._next, self._kernel
        return play(*args)


class Cell:
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell."""

    def __init__(self, track: Track) -> None:
        self._track, self._weights = track, Copied()

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with Taking(CELLS, self._play):
            return forward(*args, **kwargs)

    def _play(self, func: Any, kind: str, x: Tensor, state: Any, *given: Tensor | None) -> Any:
        result = func(x, state, *given)
        found = (result,) if isinstance(result, Tensor) else tuple(result)
        if found[0].requires_grad:
            states = tuple(s.detach() for s in ((state,) if isinstance(state, Tensor) else state))
            inside = Inside(
                kind,
                x.detach(),
                states,
                self._weights.of([weight for weight in given if weight is not None]),
            )
            returned = dict(zip("hc", found, strict=False))
            values = {leaf: tensor.detach() for leaf, tensor in returned.items()}
            Step(self._track, self._track.begin(1), values, [states[0]], inside).watch(returned)
        return result


class Layer:
    """nn.LSTM, nn.GRU, nn.RNN: each layer a call of its own, as torch's kernels play them on a CPU, dropout between them."""

    def __init__(self, tracks: Sequence[Sequence[Track]]) -> None:
        self.tracks = tracks

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("input")
        lanes = given.unsorted_indices if isinstance(given, PackedSequence) else None
        with Taking(LAYERS, partial(self._play, lanes)):
            return forward(*args, **kwargs)

    def _play(self, lanes: Tensor | None, func: Any, kind: str, x: Tensor, *rest: Any) -> Any:
        sizes, rest = (rest[0], rest[1:]) if isinstance(rest[2], (list, tuple)) else (None, rest)
        hx, weights, biases, layers, dropout, train, both, *first = rest
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if not any(t.requires_grad for t in (x, *states, *weights)):
            return func(x, *([] if sizes is None else [sizes]), *rest)
        drop = dropout if train and layers > 1 else 0.0
        if drop and x.is_cuda:
            raise ModelError(
                f"dropout={drop:g} between the layers of '{self.tracks[0][0].name}' and those after"
                " it: cuDNN draws it inside its kernel, where nothing can see it. Trace in eval()"
                " mode or with dropout=0, or put nn.Dropout between layers of one each"
            )
        turned = bool(first and first[0])

        kernel = partial(_one_layer, func, sizes, biases, train, both)
        per, ways = len(weights) // layers, 2 if both else 1
        y, ends = x.transpose(0, 1) if turned else x, list[tuple[Tensor, ...]]()
        for k, tracks in enumerate(self.tracks):
            y = torch.dropout(y, drop, True) if k and drop else y
            starts = [track.begin(len(y) if sizes is None else len(sizes)) for track in tracks]
            call = Call(kind, kernel, tracks, starts, biases, sizes, lanes)
            y, *after = call(
                y,
                tuple(s[ways * k : ways * (k + 1)] for s in states),
                weights[per * k : per * (k + 1)],
            )
            ends.append(tuple(after))
        after = ends[0] if layers == 1 else [torch.cat(leaf) for leaf in zip(*ends, strict=True)]
        return (y.transpose(0, 1) if turned else y, *after)


class Fused:
    """tt.nn.LSTM, tt.nn.GRU, tt.nn.RNN: the kernel tells the norms; what torch.nn plays is seen as
    there.

    They are asked by the layer itself, wherever in a forward of the user's it is that it plays.
    """

    def __init__(self, layer: Layer, tensors: bool) -> None:
        self.layer, self.tensors = layer, tensors
        self._turns = [
            (track, bool(back)) for tracks in layer.tracks for back, track in enumerate(tracks)
        ]

    @property
    def history(self) -> History:
        """Of the trace."""
        return self._turns[0][0].history

    def over(self, run: Run) -> Run:
        """The kernel, or what computes the same, with a look at every layer and direction."""
        turns = iter(self._turns)
        return (
            partial(stretched, turns, run)
            if self.tensors or run is not recurrent.run
            else partial(captured, turns)
        )

    def by_torch(self, play: Callable[..., Any], *given: Any) -> Any:
        """As a layer of torch.nn."""
        return self.layer(play, *given) if torch.is_grad_enabled() else play(*given)


class WatchedFused(Watched):
    """A layer of tt.nn under watch; that its forward is stood in for shows that it is, to whoever
    would go past it.

    An update in one call may: what its kernel captures is all that norms are made of.
    """

    def __init__(self, module: Recurrent, watch: Fused) -> None:
        super().__init__(module, _as_it_is)
        self._watch = watch
        WATCHES[module] = watch

    @property
    def together(self) -> History:
        """What passes are kept in."""
        return self._watch.history

    @property
    def tracks(self) -> Sequence[str]:
        """By layer, in one direction."""
        return [track.name for track, *_ in self._watch.layer.tracks]

    def captures(self, calls: Sequence[tuple[str, recurrent.Call]]) -> Reel:
        """Memory that is used again and again."""
        return Reel(self.together, calls)

    def close(self) -> None:
        """Also takes the watch away."""
        super().close()
        WATCHES.pop(self._module, None)


def _as_it_is(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _one_layer(
    func: Any,
    sizes: Tensor | None,
    biases: bool,
    train: bool,
    both: bool,
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: list[Tensor],
) -> tuple[Tensor, ...]:
    """The kernel of a layer by itself, time first."""
    entering = states if len(states) == 2 else states[0]
    if sizes is None:
        return func(x, entering, weights, biases, 1, 0.0, train, both, False)
    return func(x, sizes, entering, weights, biases, 1, 0.0, train, both)


class OwnCell:
    """A user's module that is called once per step: the gradient of each named tensor that it returns, as autograd has it."""

    def __init__(self, track: Track, leaves: Sequence[str]) -> None:
        self._track, self._leaves = track, tuple(leaves)

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        found = list(_tensors(result))
        if len(found) != len(self._leaves):
            raise ModelError(
                f"'{self._track.name}' returns {len(found)} tensors, names says"
                f" {len(self._leaves)}: {list(self._leaves)}. Name each, in order, with '_' for one"
                " that is not wanted"
            )
        returned = {
            leaf: tensor for leaf, tensor in zip(self._leaves, found, strict=True) if leaf != "_"
        }
        if any(tensor.requires_grad for tensor in returned.values()):
            came = [
                t.detach()
                for t in _tensors((args, kwargs))
                if t.is_floating_point() or t.is_complex()
            ]
            values = {leaf: tensor.detach() for leaf, tensor in returned.items()}
            Step(self._track, self._track.begin(1), values, came).watch(returned)
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a nesting, in order; all else is passed over."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for branch in tree.values():
            yield from _tensors(branch)
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from _tensors(branch)
    elif hasattr(tree, "__dataclass_fields__"):
        for name in tree.__dataclass_fields__:
            yield from _tensors(getattr(tree, name))
