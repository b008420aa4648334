"""Layers and cells under a trace: forward by the layer itself, backward by the reference.

Each call of a layer is one node of the autograd graph (`_traced_call.py`), so outputs are those of
the untraced net. The forward of a module is replaced in its instance while a pass is traced. A
layer of torch.nn runs its own forward, with all its checks; only the kernel that it calls at the
end is replaced, by a torch function mode. A cell of the user's runs unchanged, with a hook on each
named tensor.

Cost of a traced pass: the layer's forward pass, and that of the reference with its backward pass,
some thirty calls of torch for each step. Memory: the graph of one call at a time.

Shapes: `T` steps, `B` lanes (rows of the batch), `D` input features.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, handle_torch_function

from throughtime._device import cudnn_rules
from throughtime.diagnose._trace_record import History, Track, TrackRecord, is_batched
from throughtime.diagnose._traced_call import PackedLayout, TracedCall
from throughtime.errors import ConfigError, ModelError, listed
from throughtime.kernels.cells import CELLS, Cell, Weights
from throughtime.kernels.dispatch import autocast_applies, product_type
from throughtime.kernels.reference import States
from throughtime.nn.layers import Recurrent, Run

# torch names its kernels as the table names its cells
LAYER_KERNELS: dict[Any, Cell] = {getattr(torch, name): cell for name, cell in CELLS.items()}
CELL_KERNELS: dict[Any, Cell] = {
    getattr(torch, f"{name}_cell"): cell for name, cell in CELLS.items()
}


def traced_module(
    name: str, module: nn.Module, leaves: Sequence[str] | None, history: History
) -> "TracedForward":
    """Replace the forward of a module; `leaves` names what a user's cell returns."""
    if leaves is not None:
        run = partial(_run_named_cell, Track(name or "cell", history), tuple(leaves))
    elif isinstance(module, nn.RNNCellBase):
        run = partial(_run_torch_cell, Track(name or "cell", history))
    elif isinstance(module, nn.RNNBase):
        path = f"{name}." if name else ""
        ends = ("", "_reverse") if module.bidirectional else ("",)
        tracks = [
            Track(f"{path}layer{k}{end}", history, all_edges=True)
            for k in range(module.num_layers)
            for end in ends
        ]
        run = partial(_run_torch_layer, tracks)
        if isinstance(module, Recurrent):
            run = partial(_run_fused_layer, module, tracks)
    else:
        raise ModelError(
            f"module '{name}' is a {type(module).__name__}, which is not a recurrent layer or cell"
            " of torch.nn; name what it returns, tt.trace(net, names={...})"
        )
    return TracedForward(module, run, history)


class TracedForward:
    """The forward of one module, in its instance, until the trace is closed.

    Args:
        module: to trace.
        run: called with the module's own forward and its arguments.
        history: decides whether a pass is traced.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], history: History) -> None:
        self.module, self._run, self._sampler = module, run, history.sampler
        previous = module.__dict__.get("forward")
        if isinstance(previous, TracedForward) and previous.open:
            raise ConfigError(
                f"this {type(module).__name__} is traced already; close the first trace before the"
                " second: trace.close()"
            )
        self.open = False
        self.install()

    def install(self) -> None:
        """Replace the module's forward."""
        self._previous: Callable[..., Any] | None = self.module.__dict__.get("forward")
        self._inner: Callable[..., Any] = self.module.forward
        update_wrapper(self, self._inner)
        self.open = True
        self.module.forward = self

    def remove(self) -> bool:
        """Restore the module's forward, unless a wrapper was put around this one."""
        own = self.module.__dict__
        if own.get("forward") is not self:
            return False
        del own["forward"]
        if self._previous is not None:
            own["forward"] = self._previous
        return True

    def close(self) -> None:
        """Stop tracing; a wrapper that was put around this forward calls the original one."""
        self.open = False
        self.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.open or not torch.is_grad_enabled():
            return self._inner(*args, **kwargs)
        if self._sampler.decide():
            return self._run(self._inner, *args, **kwargs)
        result = self._inner(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(self._note_backward)
        return result

    def _note_backward(self, gradient: Tensor | None) -> None:
        if not is_batched([gradient]):
            self._sampler.note_backward()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the net is not traced."""
        if self._previous is not None:
            return deepcopy(self._previous, memo)
        return MethodType(type(self.module).forward, memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        """A saved net is not traced either."""
        return getattr, (self.module, "forward")


class KernelIntercept(TorchFunctionMode):
    """Replace calls of torch's recurrent kernels; every other function of torch is unchanged."""

    def __init__(self, cells: Mapping[Any, Cell], run: Callable[..., Any]) -> None:
        super().__init__()
        self._cells, self._run = cells, run

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        cell = None if kwargs or _transformed() else self._cells.get(func)
        if cell is None:
            return func(*args, **(kwargs or {}))
        run = partial(self._run, func, cell)
        if not _len_torch_function_stack():
            return run(*args)
        # Another mode, as that of tt.doctor, sees one call of the kernel.
        return handle_torch_function(_ReplacedOnce(func, run), (), *args)


class _ReplacedOnce:
    """A kernel under its own name whose first call is replaced."""

    def __init__(self, kernel: Callable[..., Any], run: Callable[..., Any]) -> None:
        self._kernel, self._next, self.__name__ = kernel, run, kernel.__name__

    def __call__(self, *args: Any) -> Any:
        run, self._next = self._next, self._kernel
        return run(*args)


def _transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active; neither takes our node."""
    return maybe_current_level() is not None or forward_ad._current_level >= 0


def _run_torch_cell(track: Track, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell."""

    def call(func: Any, cell: Cell, x: Tensor, state: Any, *weights: Tensor | None) -> Any:
        states = (state,) if isinstance(state, Tensor) else tuple(state)
        if not _needs_grad(x, *states, *weights):
            return func(x, state, *weights)

        with torch.no_grad():
            ends = func(x, state, *weights)
        ends = (ends,) if isinstance(ends, Tensor) else ends
        own = Weights(*weights, hr=None)  # pyright: ignore[reportArgumentType]
        outputs = ends[0].unsqueeze(0).clone(), *ends
        _, ends = TracedCall(cell, track)(outputs, x.unsqueeze(0), states, own)
        return _one_or_all(ends)

    with KernelIntercept(CELL_KERNELS, call):
        return forward(*args, **kwargs)


def _run_torch_layer(
    tracks: Sequence[Track], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """nn.LSTM, nn.GRU, nn.RNN: a node for each layer and direction; `tracks` are in that order."""
    inputs = args[0] if args else kwargs.get("input")
    packing = PackedLayout(inputs) if isinstance(inputs, PackedSequence) else None
    with KernelIntercept(LAYER_KERNELS, partial(_call_torch_layers, tracks, packing)):
        return forward(*args, **kwargs)


def _call_torch_layers(
    tracks: Sequence[Track],
    packing: PackedLayout | None,
    func: Any,
    cell: Cell,
    x: Tensor,
    *rest: Any,
) -> Any:
    """Replace one call of torch's kernel, with dropout between the layers as torch draws it."""
    sizes = () if packing is None else rest[:1]
    hx, weights, biases, layers, dropout, train, both, *first = rest[len(sizes) :]
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if not _needs_grad(x, *states, *weights):
        return func(x, *rest)
    dropout = dropout if train and layers > 1 else 0.0
    if dropout and cudnn_rules(x):
        raise ModelError(
            f"dropout={dropout:g} between the layers from '{tracks[0].name}' on: cuDNN"
            " draws it inside its kernel, so a trace cannot repeat it. Trace in eval() mode or"
            " with dropout=0, or put nn.Dropout between single layers"
        )

    def in_reverse(x: Tensor) -> Tensor:
        return x.flip(0) if packing is None else packing.reversed(x)

    count, per, ends = 1 + both, len(weights) // len(tracks), list[States]()
    swapped = any(first)
    x = x.transpose(0, 1) if swapped else x
    for k in range(layers):
        x = torch.dropout(x, dropout, True) if k and dropout else x
        rows = slice(count * k, count * (k + 1))
        own = weights[per * rows.start : per * rows.stop]
        entering = [leaf[rows] for leaf in states]
        options = [_one_or_all(entering), own, biases, 1, 0.0, train, both]
        with torch.no_grad():
            y, *after = func(x, *sizes, *options, *[False] * len(first))
        outputs: list[Tensor] = []
        for d, (part, track) in enumerate(zip(y.chunk(count, -1), tracks[rows], strict=True)):
            call = TracedCall(cell, track, packing, reverse=d > 0)
            output, end = call(
                [in_reverse(part) if d else part, *(leaf[d] for leaf in after)],
                in_reverse(x) if d else x,
                tuple(leaf[d] for leaf in entering),
                _named(own[per * d : per * (d + 1)], biases),
            )
            outputs.append(in_reverse(output) if d else output)
            ends.append(end)
        x = torch.cat(outputs, -1)
    after = [torch.stack(leaf) for leaf in zip(*ends, strict=True)]
    return (x.transpose(0, 1) if swapped else x, *after)


def _run_fused_layer(
    module: Recurrent,
    tracks: Sequence[Track],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """tt.nn.LSTM, tt.nn.GRU, tt.nn.RNN, wherever in a subclass's forward the layer runs."""

    def run(backend: str) -> Run:
        layer_run = Recurrent._run(module, backend)
        order = enumerate(tracks)
        return layer_run if _transformed() else partial(_run_traced, module, order, layer_run)

    def by_torch(*args: Any) -> Any:
        return _run_torch_layer(tracks, partial(Recurrent._by_torch, module), *args)

    own = module.__dict__
    own["_run"], own["_by_torch"] = run, by_torch
    try:
        return forward(*args, **kwargs)
    finally:
        own.pop("_run", None)
        own.pop("_by_torch", None)


def _run_traced(
    module: Recurrent,
    tracks: Iterator[tuple[int, Track]],
    run: Run,
    cell: Cell,
    x: Tensor,
    states: States,
    weights: Weights,
    resets: Tensor | None,
) -> tuple[Tensor, States]:
    """One layer in one direction, by `run`; the backward direction gets its inputs reversed."""
    row, track = next(tracks)
    if not len(x) or not _needs_grad(x, *states, *weights):
        return run(cell, x, states, weights, resets)

    with torch.no_grad():
        y, ends = run(cell, x, states, weights, resets)
    backward = module.bidirectional and row % 2 == 1
    products = product_type(weights.ih.dtype, x.shape[1]) if autocast_applies(weights.ih) else None
    call = TracedCall(cell, track, resets=resets, reverse=backward, products=products)
    return call([y, *ends], x, states, weights)


def _needs_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _one_or_all(leaves: Sequence[Tensor]) -> Any:
    """A state as torch passes it: a tensor, or a pair."""
    return leaves[0] if len(leaves) == 1 else tuple(leaves)


def _named(weights: Sequence[Tensor], biases: bool) -> Weights:
    """The weights of one direction, in the order in which torch passes them to its kernels."""
    b_ih, b_hh = weights[2:4] if biases else (None, None)
    rest = weights[4 if biases else 2 :]
    return Weights(weights[0], weights[1], b_ih, b_hh, rest[0] if rest else None)


def _run_named_cell(
    track: Track, leaves: Sequence[str], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A user's module that is called once per step, with names for the tensors that it returns."""
    result = forward(*args, **kwargs)
    tensors = list(tensors_in(result))
    if len(tensors) != len(leaves):
        raise ModelError(
            f"'{track.name}' returns {len(tensors)} tensors, names has {len(leaves)}:"
            f" {listed(leaves, quoted=True)}. Name each, in order, with '_' for one that is not"
            " traced"
        )
    returned = {leaf: tensor for leaf, tensor in zip(leaves, tensors, strict=True) if leaf != "_"}
    if not _needs_grad(*returned.values()):
        return result
    entering = [
        tensor
        for tensor in tensors_in((args, kwargs))
        if tensor.is_floating_point() or tensor.is_complex()
    ]
    # without graphs: the hooks hold them
    after = {leaf: tensor.detach() for leaf, tensor in returned.items()}
    before, from_graph = [tensor.detach() for tensor in entering], _needs_grad(*entering)
    start = track.begin(1)

    def record(leaf: str, gradient: Tensor | None) -> None:
        if gradient is None or is_batched([gradient]):
            return  # torch calls a hook with None where no gradient arrives
        calls = track.history.calls_of(track)
        if start not in calls:
            zeros = {name: torch.zeros_like(value).unsqueeze(0) for name, value in after.items()}
            states = list(before), list(after.values())
            calls[start] = TrackRecord(start, zeros, {}, *states, from_graph)
        calls[start].gradients[leaf] = gradient.detach().unsqueeze(0)

    for leaf, tensor in returned.items():
        if tensor.requires_grad:
            tensor.register_hook(partial(record, leaf))
    return result


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor of a nesting, in order; everything else is skipped."""
    if isinstance(tree, Tensor):
        yield tree
        return
    branches: Iterable[Any] = ()
    if isinstance(tree, Mapping):
        branches = tree.values()
    elif isinstance(tree, (tuple, list)):
        branches = tree
    elif hasattr(tree, "__dataclass_fields__"):
        branches = (getattr(tree, name) for name in tree.__dataclass_fields__)
    for branch in branches:
        yield from tensors_in(branch)
