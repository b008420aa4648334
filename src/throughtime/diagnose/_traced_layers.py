"""Layers and cells under a trace: forward by the layer itself, backward by the reference.

    forward:    y, s_T = layer(x, s_0)                        as untraced, without a graph
    backward:   run `kernels/reference.py` on x and s_0 step by step, with a graph;
                (dx, ds_0, dW, dh_t, dc_t, dgate_t) = one vector-Jacobian product of y and s_T

One autograd node stands for one call of one layer, so outputs are those of the untraced net. The
forward of a module is replaced in its instance while a pass is traced. A layer of torch.nn runs its
own forward, with all its checks; only the kernel that it calls at the end is replaced, by a torch
function mode. A cell of the user's runs unchanged, with a hook on each named tensor.

Cost of a traced pass: the layer's forward pass, and that of the reference with its backward pass,
some thirty calls of torch for each step. Memory: the graph of one call at a time.

Shapes: `T` steps, `B` lanes, `D` input features, `H` hidden, `P` = `H` or the size of a projection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode, handle_torch_function

from throughtime.diagnose._trace_record import CallRecord, History, Track, is_batched
from throughtime.errors import ConfigError, ModelError
from throughtime.kernels import reference
from throughtime.kernels.cells import CELLS, Cell, Weights
from throughtime.kernels.dispatch import autocast_applies, product_type
from throughtime.kernels.reference import States, Step
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
            [Track(f"{path}layer{k}{end}", history, all_edges=True) for end in ends]
            for k in range(module.num_layers)
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

        def kernel(x: Tensor, directions: Sequence[Direction]) -> Sequence[Tensor]:
            (own,) = directions
            ends = func(x[0], _one_or_all(own.states), *own.weights[:4])
            ends = (ends,) if isinstance(ends, Tensor) else ends
            return ends[0].unsqueeze(0).clone(), *ends

        own = Direction(states, Weights(*weights, hr=None))  # pyright: ignore[reportArgumentType]
        _, (ends,) = TracedCall(cell, kernel, [track])(x.unsqueeze(0), own)
        return _one_or_all(ends)

    with KernelIntercept(CELL_KERNELS, call):
        return forward(*args, **kwargs)


def _run_torch_layer(
    tracks: Sequence[Sequence[Track]], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """nn.LSTM, nn.GRU, nn.RNN: a node for each layer, with dropout between them as torch draws it.

    `tracks` are by layer and direction.
    """
    inputs = args[0] if args else kwargs.get("input")
    order = inputs.unsorted_indices if isinstance(inputs, PackedSequence) else None
    with KernelIntercept(LAYER_KERNELS, partial(_call_torch_layers, tracks, order)):
        return forward(*args, **kwargs)


def _call_torch_layers(
    tracks: Sequence[Sequence[Track]],
    order: Tensor | None,
    func: Any,
    cell: Cell,
    x: Tensor,
    *rest: Any,
) -> Any:
    sizes, rest = (rest[0], rest[1:]) if isinstance(rest[2], (list, tuple)) else (None, rest)
    hx, weights, biases, layers, dropout, train, both, *first = rest
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    if not _needs_grad(x, *states, *weights):
        return func(x, *([] if sizes is None else [sizes]), *rest)
    dropout = dropout if train and layers > 1 else 0.0
    if dropout and x.is_cuda:
        raise ModelError(
            f"dropout={dropout:g} between the layers from '{tracks[0][0].name}' on: cuDNN"
            " draws it inside its kernel, so a trace cannot repeat it. Trace in eval() mode or"
            " with dropout=0, or put nn.Dropout between single layers"
        )

    def kernel(x: Tensor, directions: Sequence[Direction]) -> Sequence[Tensor]:
        """Run torch's kernel for one layer, time first."""
        leaves = [torch.stack(leaf) for leaf in zip(*(d.states for d in directions), strict=True)]
        flat = [weight for d in directions for weight in d.weights if weight is not None]
        options = [flat, biases, 1, 0.0, train, both]
        if sizes is None:
            y, *ends = func(x, _one_or_all(leaves), *options, False)
        else:
            y, *ends = func(x, sizes, _one_or_all(leaves), *options)
        return y, *(leaf[d] for d in range(len(directions)) for leaf in ends)

    rows, per = len(states[0]), len(weights) // len(states[0])
    directions = [
        Direction(
            tuple(leaf[row] for leaf in states),
            _named(weights[per * row : per * (row + 1)], biases),
        )
        for row in range(rows)
    ]
    swapped = bool(first and first[0])
    y, ends = x.transpose(0, 1) if swapped else x, list[States]()
    for k, pair in enumerate(tracks):
        y = torch.dropout(y, dropout, True) if k and dropout else y
        call = TracedCall(cell, kernel, pair, sizes=sizes, order=order)
        y, after = call(y, *directions[len(pair) * k : len(pair) * (k + 1)])
        ends += after
    after = [torch.stack(leaf) for leaf in zip(*ends, strict=True)]
    return (y.transpose(0, 1) if swapped else y, *after)


def _run_fused_layer(
    module: Recurrent,
    tracks: Sequence[Sequence[Track]],
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """tt.nn.LSTM, tt.nn.GRU, tt.nn.RNN, wherever in a subclass's forward the layer runs."""

    def run(backend: str) -> Run:
        layer_run = Recurrent._run(module, backend)
        if _transformed():
            return layer_run
        order = iter([(track, d > 0) for pair in tracks for d, track in enumerate(pair)])
        return partial(_run_traced, order, layer_run)

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
    tracks: Iterator[tuple[Track, bool]],
    run: Run,
    cell: Cell,
    x: Tensor,
    states: States,
    weights: Weights,
    resets: Tensor | None,
) -> tuple[Tensor, States]:
    """One layer in one direction, by `run`; the backward direction gets its inputs reversed."""
    track, backward = next(tracks)
    if not len(x) or not _needs_grad(x, *states, *weights):
        return run(cell, x, states, weights, resets)

    def kernel(x: Tensor, directions: Sequence[Direction]) -> Sequence[Tensor]:
        y, ends = run(cell, x, *directions[0], resets)
        return y, *ends

    products = product_type(weights.ih.dtype, x.shape[1]) if autocast_applies(weights.ih) else None
    call = TracedCall(cell, kernel, [track], resets=resets, reverse=backward, products=products)
    y, (ends,) = call(x, Direction(states, weights))
    return y, ends


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


class Direction(NamedTuple):
    """The entering states, `(B, P)` and `(B, H)`, and the weights of one direction of a layer."""

    states: States
    weights: Weights


@dataclass(eq=False)
class TracedCall:
    """One call of one layer, both directions.

    Attributes:
        cell: of the layer.
        kernel: computes the outputs, then the last states of each direction.
        tracks: one for each direction.
        sizes: of packed data, the lanes of each step, longest first.
        order: puts packed lanes back into the caller's order.
        resets: `(T, B)`, where the state entering the step becomes zeros.
        reverse: whether the data run from the last step to the first.
        products: the type to which factors of products are rounded; None: autocast's, if it is on.
    """

    cell: Cell
    kernel: Callable[[Tensor, Sequence[Direction]], Sequence[Tensor]]
    tracks: Sequence[Track]
    sizes: Tensor | None = None
    order: Tensor | None = None
    resets: Tensor | None = None
    reverse: bool = False
    products: torch.dtype | None = None

    def __call__(self, x: Tensor, *directions: Direction) -> tuple[Tensor, list[States]]:
        """Outputs, and the states after the last step of each direction.

        Args:
            x: `(T, B, D)`, or packed.
            directions: one for each track.
        """
        steps = len(x) if self.sizes is None else len(self.sizes)
        self.starts = [track.begin(steps) for track in self.tracks]
        device, dtype = x.device.type, directions[0].weights.ih.dtype
        if self.products is None and torch.is_autocast_enabled(device):
            floating = dtype in (torch.float32, torch.float16, torch.bfloat16)
            self.products = torch.get_autocast_dtype(device) if floating else None
        flat = chain.from_iterable((*states, *weights) for states, weights in directions)
        y, *ends = TracedSteps.apply(self, x, *flat)
        count = len(self.cell.states)
        return y, [tuple(ends[i : i + count]) for i in range(0, len(ends), count)]

    def directions(self, flat: Sequence[Any]) -> list[Direction]:
        """The arguments of the node after `x`, or their gradients, by direction."""
        count = len(self.cell.states)
        size = count + len(Weights._fields)
        rows = [flat[i : i + size] for i in range(0, len(flat), size)]
        return [Direction(tuple(row[:count]), Weights(*row[count:])) for row in rows]

    def pull(
        self,
        tensors: Sequence[Tensor | None],
        cotangents: Sequence[Tensor | None],
        needed: Sequence[bool],
        create_graph: bool,
    ) -> list[Tensor | None]:
        """The gradients of `tensors`, the inputs of the call; records those of each step."""
        leaves: list[Any] = [  # None for a weight that the layer lacks
            None
            if tensor is None
            else tensor.view_as(tensor)
            if create_graph and tensor.requires_grad
            else tensor.detach().requires_grad_(need)
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        before = self.directions(leaves[1:])
        for leaf in chain.from_iterable(direction.states for direction in before):
            leaf.requires_grad_()
        wide = torch.promote_types(before[0].weights.ih.dtype, torch.float32)
        promoted: list[Any] = [leaf if leaf is None else leaf.to(wide) for leaf in leaves]
        x, *flat = promoted
        directions = self.directions(flat)
        active = self._active(directions[0].states[0])
        if active is not None:
            x = x.new_zeros(*active.shape, x.shape[1]).index_put((active,), x)
        runs = [self._run(x, active, own, bool(d), wide) for d, own in enumerate(directions)]
        y = torch.cat([torch.stack([step.states[0] for step in run.steps]) for run in runs], -1)
        outputs = [y if active is None else y[active]]
        outputs += chain.from_iterable(run.ends for run in runs)
        pairs = [
            (output, cotangent.to(wide))
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if cotangent is not None
        ]
        values = [run.values(self.cell) for run in runs]
        differentiable = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        gradients = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                [*chain.from_iterable(chain(*values)), *differentiable],
                [cotangent for _, cotangent in pairs],
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        by_step = [[[next(gradients) for _ in leaf] for leaf in value] for value in values]
        by_leaf = [
            next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves
        ]
        if not is_batched(cotangents):
            from_graph = any(any(own.states) for own in self.directions(needed[1:]))
            grads = self.directions(by_leaf[1:])
            with torch.no_grad():
                for d, run in enumerate(runs):
                    states = [leaf.detach() for leaf in before[d].states]
                    ends = [leaf.detach() for leaf in run.ends]
                    gate_sum, gate_count = run.retention(self.cell, active)
                    gradients, edges = self._in_time_order(by_step[d], grads[d].states, d)
                    self.tracks[d].record(
                        CallRecord(
                            self.starts[d],
                            gradients,
                            edges,
                            states,
                            ends,
                            from_graph,
                            gate_sum,
                            gate_count,
                        )
                    )
        return [leaf if need else None for leaf, need in zip(by_leaf, needed, strict=True)]

    def _active(self, like: Tensor) -> Tensor | None:
        """`(T, B)`, the lanes that each step of packed data has."""
        if self.sizes is None:
            return None
        return (torch.arange(len(like)) < self.sizes.unsqueeze(1)).to(like.device)

    def _run(
        self, x: Tensor, active: Tensor | None, own: Direction, backward: bool, wide: torch.dtype
    ) -> "DirectionRun":
        """One direction; packed lanes end early, and in the backward direction start late."""
        products = None if self.products is wide else self.products
        sums = reference.input_sums(x, own.weights, products)
        steps, now = list[Step](), own.states
        times = range(len(sums))
        for t in reversed(times) if backward else times:
            if self.resets is not None:
                now = reference.reset(now, self.resets[t])
            steps.append(reference.step(self.cell, sums[t], now, own.weights, products))
            pairs = zip(steps[-1].states, now, strict=True)
            now = (
                steps[-1].states
                if active is None
                else tuple(torch.where(active[t].unsqueeze(1), new, old) for new, old in pairs)
            )
        return DirectionRun(steps[::-1] if backward else steps, now)

    def _in_time_order(
        self, gradients: Sequence[list[Tensor]], entering: States, index: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of the steps and of the entering state by leaf, lanes in the caller's order."""
        lanes = slice(None) if self.order is None else self.order
        rows = [torch.stack(leaf[::-1] if self.reverse else leaf).detach() for leaf in gradients]
        edges = [] if self.reverse or index else [leaf.detach()[lanes] for leaf in entering]
        return (
            {leaf: steps[:, lanes] for leaf, steps in zip(self.cell.values, rows, strict=True)},
            dict(zip(self.cell.states, edges, strict=False)),
        )


class DirectionRun(NamedTuple):
    """One direction of a call, run step by step with a graph.

    Attributes:
        steps: in the order of the data.
        ends: the state after the last step, `(B, P)` and `(B, H)`.
    """

    steps: list[Step]
    ends: States

    def values(self, cell: Cell) -> list[list[Tensor]]:
        """States and gates of all steps, in the order of `Cell.values`."""
        named = [
            step.gates | dict(zip(cell.states, step.states, strict=True)) for step in self.steps
        ]
        return [[values[leaf] for values in named] for leaf in cell.values]

    def retention(self, cell: Cell, active: Tensor | None) -> tuple[Tensor | None, int]:
        """The retention gate summed over steps and lanes, and the number of its values."""
        if cell.retention_gate is None:
            return None, 0
        gates = torch.stack([step.gates[cell.retention_gate].detach() for step in self.steps])
        gates = gates.flatten(0, 1) if active is None else gates[active]
        return gates.sum(0), len(gates)


class TracedSteps(torch.autograd.Function):
    """A traced call as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, call: TracedCall, x: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *rest)
        return tuple(call.kernel(x, call.directions(rest)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        tensors = ctx.saved_tensors  # read once: a checkpoint returns them once
        if all(gradient is None for gradient in grads):
            return (None,) * (1 + len(tensors))
        with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return None, *ctx.call.pull(tensors, grads, ctx.needs_input_grad[1:], create_graph)


def _run_named_cell(
    track: Track, leaves: Sequence[str], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A user's module that is called once per step, with names for the tensors that it returns."""
    result = forward(*args, **kwargs)
    tensors = list(tensors_in(result))
    if len(tensors) != len(leaves):
        raise ModelError(
            f"'{track.name}' returns {len(tensors)} tensors, names has {len(leaves)}:"
            f" {list(leaves)}. Name each, in order, with '_' for one that is not traced"
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
            calls[start] = CallRecord(
                start, zeros, {}, list(before), list(after.values()), from_graph
            )
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
