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

from throughtime.diagnose._trace_record import CallRecord, History, Track, is_batched, padded
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
Kernel = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


def traced_module(
    name: str, module: nn.Module, leaves: Sequence[str] | None, history: History
) -> "TracedForward":
    """Replace the forward of a module; `leaves` names what a user's cell returns."""
    if leaves is not None:
        return TracedForward(module, NamedCell(Track(name or "cell", history), leaves), history)
    if isinstance(module, nn.RNNCellBase):
        return TracedForward(module, TorchCell(Track(name or "cell", history)), history)
    if isinstance(module, nn.RNNBase):
        path = f"{name}." if name else ""
        ends = ("", "_reverse") if module.bidirectional else ("",)
        tracks = [
            [Track(f"{path}layer{k}{end}", history, all_edges=True) for end in ends]
            for k in range(module.num_layers)
        ]
        layer = TorchLayer(tracks)
        run = FusedLayer(module, layer) if isinstance(module, Recurrent) else layer
        return TracedForward(module, run, history)
    raise ModelError(
        f"module '{name}' is a {type(module).__name__}, which is not a recurrent layer or cell of"
        " torch.nn; name what it returns, tt.trace(net, names={...})"
    )


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


class TorchCell:
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell."""

    def __init__(self, track: Track) -> None:
        self._track = track

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with KernelIntercept(CELL_KERNELS, self._call):
            return forward(*args, **kwargs)

    def _call(self, func: Any, cell: Cell, x: Tensor, state: Any, *biased: Tensor | None) -> Any:
        states = (state,) if isinstance(state, Tensor) else tuple(state)
        weights = [weight for weight in biased if weight is not None]
        if not _needs_grad(x, *states, *weights):
            return func(x, state, *biased)

        def kernel(
            x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
        ) -> Sequence[Tensor]:
            entering = [leaf[0] for leaf in states]
            ends = func(x[0], entering if len(entering) > 1 else entering[0], *weights)
            ends = [leaf.unsqueeze(0) for leaf in ([ends] if isinstance(ends, Tensor) else ends)]
            return ends[0].clone(), *ends

        call = TracedCall(
            cell, kernel, [self._track], [self._track.begin(1)], biases=len(weights) > 2
        )
        _, *ends = call(x.unsqueeze(0), [leaf.unsqueeze(0) for leaf in states], weights)
        ends = [leaf.squeeze(0) for leaf in ends]
        return ends[0] if len(ends) == 1 else tuple(ends)


class TorchLayer:
    """nn.LSTM, nn.GRU, nn.RNN: a node for each layer, with dropout between them as torch draws it.

    Args:
        tracks: by layer and direction.
    """

    def __init__(self, tracks: Sequence[Sequence[Track]]) -> None:
        self.tracks = tracks

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else kwargs.get("input")
        order = inputs.unsorted_indices if isinstance(inputs, PackedSequence) else None
        with KernelIntercept(LAYER_KERNELS, partial(self._call, order)):
            return forward(*args, **kwargs)

    def _call(self, order: Tensor | None, func: Any, cell: Cell, x: Tensor, *rest: Any) -> Any:
        sizes, rest = (rest[0], rest[1:]) if isinstance(rest[2], (list, tuple)) else (None, rest)
        hx, weights, biases, layers, dropout, train, both, *first = rest
        states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if not _needs_grad(x, *states, *weights):
            return func(x, *([] if sizes is None else [sizes]), *rest)
        dropout = dropout if train and layers > 1 else 0.0
        if dropout and x.is_cuda:
            raise ModelError(
                f"dropout={dropout:g} between the layers from '{self.tracks[0][0].name}' on: cuDNN"
                " draws it inside its kernel, so a trace cannot repeat it. Trace in eval() mode or"
                " with dropout=0, or put nn.Dropout between single layers"
            )
        swapped = bool(first and first[0])
        kernel = partial(_one_torch_layer, func, sizes, biases, train, both)
        per_layer, directions = len(weights) // layers, 2 if both else 1
        y, ends = x.transpose(0, 1) if swapped else x, list[Sequence[Tensor]]()
        for k, tracks in enumerate(self.tracks):
            y = torch.dropout(y, dropout, True) if k and dropout else y
            starts = [track.begin(len(y) if sizes is None else len(sizes)) for track in tracks]
            call = TracedCall(cell, kernel, tracks, starts, biases=biases, sizes=sizes, order=order)
            own = slice(directions * k, directions * (k + 1))
            y, *after = call(
                y, [leaf[own] for leaf in states], weights[per_layer * k : per_layer * (k + 1)]
            )
            ends.append(after)
        after = [torch.cat(leaf) if layers > 1 else leaf[0] for leaf in zip(*ends, strict=True)]
        return (y.transpose(0, 1) if swapped else y, *after)


def _one_torch_layer(
    func: Any,
    sizes: Tensor | None,
    biases: bool,
    train: bool,
    both: bool,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Sequence[Tensor]:
    """torch's kernel for one layer, time first."""
    hx = list(states) if len(states) > 1 else states[0]
    if sizes is None:
        return func(x, hx, list(weights), biases, 1, 0.0, train, both, False)
    return func(x, sizes, hx, list(weights), biases, 1, 0.0, train, both)


class FusedLayer:
    """tt.nn.LSTM, tt.nn.GRU, tt.nn.RNN, wherever in a subclass's forward the layer runs.

    Args:
        module: the layer.
        layer: traces the calls that tt.nn leaves to torch.nn.
    """

    def __init__(self, module: Recurrent, layer: TorchLayer) -> None:
        self._module, self._layer = module, layer

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = self._module.__dict__
        own["_run"], own["_by_torch"] = self._run, self._by_torch
        try:
            return forward(*args, **kwargs)
        finally:
            own.pop("_run", None)
            own.pop("_by_torch", None)

    def _run(self, backend: str) -> Run:
        run = Recurrent._run(self._module, backend)
        if _transformed():
            return run
        tracks = [
            (track, bool(direction))
            for pair in self._layer.tracks
            for direction, track in enumerate(pair)
        ]
        return partial(_run_traced, iter(tracks), run)

    def _by_torch(self, *args: Any) -> Any:
        return self._layer(partial(Recurrent._by_torch, self._module), *args)


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
    flat = [weight for weight in weights if weight is not None]
    if not len(x) or not _needs_grad(x, *states, *flat):
        return run(cell, x, states, weights, resets)
    biases, lowered = weights.b_ih is not None, autocast_applies(weights.ih)

    def kernel(x: Tensor, states: Sequence[Tensor], flat: Sequence[Tensor]) -> Sequence[Tensor]:
        entering = tuple(leaf[0] for leaf in states)
        y, ends = run(cell, x, entering, _named(flat, biases), resets)
        return y, *(leaf.unsqueeze(0) for leaf in ends)

    call = TracedCall(
        cell,
        kernel,
        [track],
        [track.begin(len(x))],
        biases=biases,
        resets=resets,
        reverse=backward,
        products=product_type(weights.ih.dtype, x.shape[1]) if lowered else None,
    )
    y, *ends = call(x, [leaf.unsqueeze(0) for leaf in states], flat)
    return y, tuple(leaf.squeeze(0) for leaf in ends)


def _needs_grad(*tensors: Tensor) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _named(weights: Sequence[Tensor], biases: bool) -> Weights:
    """The weights of one direction, in the order in which torch passes them to its kernels."""
    b_ih, b_hh = weights[2:4] if biases else (None, None)
    rest = weights[4 if biases else 2 :]
    return Weights(weights[0], weights[1], b_ih, b_hh, rest[0] if rest else None)


class Direction(NamedTuple):
    """One direction of a call, run step by step with a graph.

    Attributes:
        steps: in the order in which they ran; a packed step has only the lanes that reach it.
        ends: the state after the last step, `(B, P)` and `(B, H)`.
    """

    steps: list[Step]
    ends: list[Tensor]


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One call of one layer, both directions.

    Attributes:
        cell: of the layer.
        kernel: computes outputs and last states from inputs, states and weights.
        tracks: one for each direction.
        starts: the first step of the call in each track.
        biases: whether the weights include them.
        sizes: of packed data, the lanes of each step, longest first.
        order: puts packed lanes back into the caller's order.
        resets: `(T, B)`, where the state entering the step becomes zeros.
        reverse: whether the data run from the last step to the first.
        products: the type to which factors of products are rounded; None: autocast's, if it is on.
    """

    cell: Cell
    kernel: Kernel
    tracks: Sequence[Track]
    starts: Sequence[int]
    biases: bool
    sizes: Tensor | None = None
    order: Tensor | None = None
    resets: Tensor | None = None
    reverse: bool = False
    products: torch.dtype | None = None

    def __call__(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Outputs and the states after the last step.

        Args:
            x: `(T, B, D)`, or packed.
            states: `(directions, B, P)` and `(directions, B, H)`.
            weights: of all directions.
        """
        return TracedSteps.apply(self, x, *states, *weights)

    def pull(
        self,
        tensors: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        needed: Sequence[bool],
        create_graph: bool,
        products: torch.dtype | None,
    ) -> list[Tensor | None]:
        """The gradients of `tensors`, the inputs of the call; records those of each step."""
        count = len(self.cell.states)
        leaves = [
            tensor.view_as(tensor)
            if create_graph and tensor.requires_grad
            else tensor.detach().requires_grad_(need or 0 < i <= count)
            for i, (tensor, need) in enumerate(zip(tensors, needed, strict=True))
        ]
        wide = torch.promote_types(tensors[-1].dtype, torch.float32)
        x, *rest = [leaf.to(wide) for leaf in leaves]
        per = len(rest[count:]) // len(self.tracks)
        directions = [
            self._run(
                x,
                [leaf[d] for leaf in rest[:count]],
                _named(rest[count + per * d : count + per * (d + 1)], self.biases),
                bool(d),
                None if products is wide else products,
            )
            for d in range(len(self.tracks))
        ]
        outputs = [self._outputs(directions)]
        outputs += [torch.stack(leaf) for leaf in zip(*(d.ends for d in directions), strict=True)]
        pairs = [
            (output, cotangent.to(wide))
            for output, cotangent in zip(outputs, cotangents, strict=True)
            if cotangent is not None
        ]
        values = [self._values(direction) for direction in directions]
        differentiable = [leaf for leaf in leaves if leaf.requires_grad]
        sources = [*chain.from_iterable(chain(*values)), *differentiable]
        gradients = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                sources,
                [cotangent for _, cotangent in pairs],
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        by_step = [[[next(gradients) for _ in leaf] for leaf in value] for value in values]
        by_leaf = [next(gradients) if leaf.requires_grad else None for leaf in leaves]
        if not is_batched(cotangents):
            entering = [leaf for leaf in by_leaf[1 : 1 + count] if leaf is not None]
            from_graph = any(needed[1 : 1 + count])
            with torch.no_grad():
                for d, direction in enumerate(directions):
                    before = [leaf[d].detach() for leaf in leaves[1 : 1 + count]]
                    self._record(
                        d, direction, by_step[d], [leaf[d] for leaf in entering], before, from_graph
                    )
        return [leaf if need else None for leaf, need in zip(by_leaf, needed, strict=True)]

    def _run(
        self,
        x: Tensor,
        states: Sequence[Tensor],
        weights: Weights,
        backward: bool,
        products: torch.dtype | None,
    ) -> Direction:
        """One direction; packed lanes end early, and in the backward direction start late."""
        sums = reference.input_sums(x, weights, products)
        rows = list(sums.unbind(0) if self.sizes is None else sums.split(self.sizes.tolist()))
        entering, now = tuple(states), tuple(states)
        steps: list[Step] = []
        ended: list[tuple[Tensor, ...]] = []
        if backward:
            rows.reverse()
            now = tuple(leaf[: len(rows[0])] for leaf in now)
        for t, row in enumerate(rows):
            lanes = len(now[0])
            if len(row) < lanes:
                ended.append(tuple(leaf[len(row) :] for leaf in now))
                now = tuple(leaf[: len(row)] for leaf in now)
            elif len(row) > lanes:
                more = [leaf[lanes : len(row)] for leaf in entering]
                now = tuple(torch.cat(pair) for pair in zip(now, more, strict=True))
            if self.resets is not None:
                now = reference.reset(now, self.resets[t])
            steps.append(reference.step(self.cell, row, now, weights, products))
            now = steps[-1].states
        ends = [torch.cat(leaf) for leaf in zip(now, *reversed(ended), strict=True)]
        return Direction(steps, ends)

    def _outputs(self, directions: Sequence[Direction]) -> Tensor:
        """h of all steps, `(T, B, directions * P)` or packed, as the layer orders them."""
        join = torch.stack if self.sizes is None else torch.cat
        columns = [
            join([step.states[0] for step in (direction.steps[::-1] if d else direction.steps)])
            for d, direction in enumerate(directions)
        ]
        return columns[0] if len(columns) == 1 else torch.cat(columns, -1)

    def _values(self, direction: Direction) -> list[list[Tensor]]:
        """States and gates of all steps, in the order of `Cell.values`."""
        return [[_value(step, self.cell, leaf) for step in direction.steps] for leaf in self.leaves]

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the states, then of the gates."""
        return self.cell.values

    def _record(
        self,
        index: int,
        direction: Direction,
        gradients: Sequence[Sequence[Tensor]],
        entering: Sequence[Tensor],
        before: list[Tensor],
        from_graph: bool,
    ) -> None:
        """Record the steps of one direction, in the order of time and of the caller's lanes."""
        backward = self.reverse or bool(index)
        lanes = len(before[0])
        by_leaf: dict[str, Tensor] = {}
        for leaf, rows in zip(self.leaves, gradients, strict=True):
            ordered = rows[::-1] if backward else rows
            steps = torch.stack([padded(row.detach(), lanes, 0) for row in ordered])
            by_leaf[leaf] = steps if self.order is None else steps[:, self.order]
        edges: dict[str, Tensor] = {}
        if not backward:
            own = [leaf if self.order is None else leaf[self.order] for leaf in entering]
            edges = {name: leaf.detach() for name, leaf in zip(self.cell.states, own, strict=True)}
        name = self.cell.retention_gate
        gates = [] if name is None else [step.gates[name].detach() for step in direction.steps]
        self.tracks[index].record(
            CallRecord(
                self.starts[index],
                by_leaf,
                edges,
                before,
                [leaf.detach() for leaf in direction.ends],
                from_graph,
                torch.cat(gates).sum(0) if gates else None,
                sum(map(len, gates)),
            )
        )


def _value(step: Step, cell: Cell, leaf: str) -> Tensor:
    if leaf in cell.states:
        return step.states[cell.states.index(leaf)]
    return step.gates[leaf]


class TracedSteps(torch.autograd.Function):
    """A traced call as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, call: TracedCall, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.products = call, call.products
        weight = rest[-1]
        device = x.device.type
        if call.products is None and torch.is_autocast_enabled(device):
            floating = weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
            ctx.products = torch.get_autocast_dtype(device) if floating else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *rest)
        count = len(call.cell.states)
        return tuple(call.kernel(x, rest[:count], rest[count:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        tensors = ctx.saved_tensors  # read once: a checkpoint returns them once
        if all(gradient is None for gradient in grads):
            return (None,) * (1 + len(tensors))
        with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            needed = ctx.needs_input_grad[1:]
            return None, *ctx.call.pull(tensors, grads, needed, create_graph, ctx.products)


class NamedCell:
    """A user's module that is called once per step, with names for the tensors that it returns."""

    def __init__(self, track: Track, leaves: Sequence[str]) -> None:
        self._track, self._leaves = track, tuple(leaves)

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        tensors = list(tensors_in(result))
        if len(tensors) != len(self._leaves):
            raise ModelError(
                f"'{self._track.name}' returns {len(tensors)} tensors, names has"
                f" {len(self._leaves)}: {list(self._leaves)}. Name each, in order, with '_' for one"
                " that is not traced"
            )
        returned = {
            leaf: tensor for leaf, tensor in zip(self._leaves, tensors, strict=True) if leaf != "_"
        }
        if not _needs_grad(*returned.values()):
            return result
        before = [
            tensor
            for tensor in tensors_in((args, kwargs))
            if tensor.is_floating_point() or tensor.is_complex()
        ]
        step = _NamedStep(
            self._track,
            self._track.begin(1),
            {leaf: tensor.detach() for leaf, tensor in returned.items()},
            [tensor.detach() for tensor in before],
            _needs_grad(*before),
        )
        for leaf, tensor in returned.items():
            if tensor.requires_grad:
                tensor.register_hook(partial(step.record, leaf))
        return result


@dataclass(frozen=True, eq=False)
class _NamedStep:
    """One call of a user's cell."""

    track: Track
    start: int
    values: dict[str, Tensor]
    before: list[Tensor]
    from_graph: bool

    def record(self, leaf: str, gradient: Tensor | None) -> None:
        """Take the total gradient of a returned tensor, as a hook."""
        if gradient is None or is_batched([gradient]):
            return  # torch calls a hook with None where no gradient arrives
        calls = self.track.history.calls_of(self.track)
        if self.start not in calls:
            zeros = {name: torch.zeros_like(value) for name, value in self.values.items()}
            calls[self.start] = CallRecord(
                self.start,
                {name: value.unsqueeze(0) for name, value in zeros.items()},
                {},
                list(self.before),
                list(self.values.values()),
                self.from_graph,
            )
        calls[self.start].gradients[leaf] = gradient.detach().unsqueeze(0)


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
