"""Layers and cells under a trace: step by step through `kernels/reference.py`, under autograd.

    forward:    the results of the layer itself, and those of the reference with a graph
    backward:   through the reference; hooks on its states and gates record their gradients

So outputs are those of the untraced net, to the bit, and gradients agree to rounding. The forward
of a module is replaced in its instance while a pass is traced. A layer of torch.nn runs its own
forward, with all its checks; only the kernel that it calls at the end is replaced, by a torch
function mode. A cell of the user's runs unchanged, with a hook on each named tensor.

Cost of a traced pass: that of the layer's forward pass, and that of the reference, some thirty
calls of torch for each step. Memory: its graph.

Shapes: `T` steps, `B` lanes (rows of the batch), `D` input features, `H` hidden, `P` = `H` or the
size of a projection.
"""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode, handle_torch_function

from throughtime import state as trees
from throughtime._device import cudnn_rules, generators, set_generators
from throughtime.diagnose._trace_record import ENTERING, History, TracedCall, Track, backward_task
from throughtime.errors import ConfigError, ModelError, listed
from throughtime.kernels import reference
from throughtime.kernels.cells import CELLS, Cell, Weights
from throughtime.kernels.dispatch import AUTOCAST_TYPES, transforms
from throughtime.kernels.reference import States
from throughtime.nn.layers import Recurrent, Run, layer_weights, run_layers

# torch names its kernels as the table names its cells
KERNELS: dict[Any, Cell] = {
    getattr(torch, f"{name}{kind}"): cell for name, cell in CELLS.items() for kind in ("", "_cell")
}


class TracedSteps(torch.autograd.Function):
    """`TracedSteps.apply(values, *sources)`: values, each with the gradient of its source.

    Sources beyond the values get none. They let the engine come here for their sake.
    """

    @staticmethod
    def forward(ctx: Any, values: Sequence[Tensor], *sources: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.others = len(sources) - len(values)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *grads, *[None] * ctx.others


def substituted(own: Callable[[], Any], other: Callable[[], Any], *inputs: Any) -> Any:
    """The results of `own`, with the gradients of `other`, which computes the same.

    Args:
        own: is called without a graph, unless none of the inputs requires a gradient.
        other: is called with a graph.
        inputs: tensors of both; the first one may be empty, which the reference does not take.
    """
    if not any(t is not None and t.requires_grad for t in inputs) or inputs[0].numel() == 0:
        return own()
    with torch.no_grad():
        results = own()
    values = iter(TracedSteps.apply(tensors_in(results), *tensors_in(other())))
    return trees.map_tensors(lambda _: next(values), results)


def run_reference(
    track: Track,
    cell: Cell,
    x: Tensor,
    states: States,
    weights: Weights,
    resets: Tensor | None = None,
    active: Tensor | None = None,
    order: Tensor | None = None,
) -> tuple[Tensor, States]:
    """One layer in one direction, or one step of a cell, with a hook on each state and gate.

    Args:
        track: of the call.
        cell: of the layer.
        x: `(T, B, D)`, from the last step to the first in the backward direction.
        states: entering the first step, `(B, P)` and `(B, H)`.
        weights: of this direction.
        resets: `(T, B)`, where the state entering the step becomes zeros.
        active: `(T, B)` of packed data, the lanes that each step has, in time.
        order: puts packed lanes back into the caller's order.

    Returns:
        Outputs, and the states after the last step.
    """
    device, dtype, rounded = x.device.type, weights.ih.dtype, None
    if torch.is_autocast_enabled(device) and dtype in AUTOCAST_TYPES:
        rounded = torch.get_autocast_dtype(device)
    wide = torch.promote_types(dtype, torch.float32)
    active = active.flip(0) if track.reverse and active is not None else active
    # the other sources: an edge is computed wherever the gradient of a weight is
    entering = TracedSteps.apply([leaf.detach().to(wide) for leaf in states], *states, x, *weights)
    with torch.autocast(device, enabled=False):
        own: Any = (w if w is None else w.to(wide) for w in weights)
        pairs = list(
            reference.steps(cell, x.to(wide), entering, Weights(*own), resets, rounded, active)
        )
    steps = [step.gates | dict(zip(cell.states, step.states, strict=True)) for step, _ in pairs]
    call = TracedCall(track, len(steps), {leaf: steps[0][leaf] for leaf in cell.values}, order)
    if cell.retention_gate is not None:
        gates = torch.stack([step[cell.retention_gate].detach() for step in steps])
        call.gates = gates.flatten(0, 1) if active is None else gates[active]
    for t, step in enumerate(steps):
        for leaf, tensor in step.items():
            call.watch(leaf, t, tensor)
    for leaf, tensor in () if track.reverse else zip(cell.states, entering, strict=True):
        call.watch(leaf, ENTERING, tensor)
    return torch.stack([step["h"] for step in steps]), pairs[-1][1]


class TracedForward:
    """The forward of one module, in its instance, until the trace is closed.

    Args:
        module: to trace.
        run: called with the module's own forward, as a function without arguments, and its inputs.
        history: decides whether a pass is traced.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any], history: History) -> None:
        self.module, self._run, self._history = module, run, history
        previous = module.__dict__.get("forward")
        if isinstance(previous, TracedForward) and previous.open:
            raise ConfigError(
                f"this {type(module).__name__} is traced already; close the first trace before the"
                " second: trace.close()"
            )
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
        call = partial(self._inner, *args, **kwargs)
        if not self.open or not torch.is_grad_enabled():
            return call()
        if self._history.decide():
            return self._run(call, args[0] if args else kwargs.get("input"))
        result = call()
        for tensor in tensors_in(result):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._history.note_backward, backward_task()))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or saved net is not traced."""
        if self._previous is not None:
            return partial, (self._previous,)
        return getattr, (self.module, "forward")


def traced_module(
    name: str, module: nn.Module, leaves: Sequence[str] | None, history: History
) -> TracedForward:
    """Replace the forward of a module; `leaves` names what a user's cell returns."""
    if leaves is not None:
        run = partial(_run_named_cell, Track(name or "cell", history), tuple(leaves))
    elif isinstance(module, nn.RNNCellBase):
        run = partial(_run_torch_cell, Track(name or "cell", history))
    elif isinstance(module, nn.RNNBase):
        path = f"{name}." if name else ""
        ends = ("", "_reverse") if module.bidirectional else ("",)
        tracks = [
            Track(f"{path}layer{k}{end}", history, bool(end), True)
            for k in range(module.num_layers)
            for end in ends
        ]
        play = _run_fused_layer if isinstance(module, Recurrent) else _run_torch_layer
        run = partial(play, module, tracks)
    else:
        raise ModelError(
            f"module '{name}' is a {type(module).__name__}, which is not a recurrent layer or cell"
            " of torch.nn; name what it returns, tt.trace(net, names={...})"
        )
    return TracedForward(module, run, history)


class KernelIntercept(TorchFunctionMode):
    """Replace calls of torch's recurrent kernels; every other function of torch is unchanged."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if kwargs or func not in KERNELS or _transformed():
            return func(*args, **(kwargs or {}))
        run = update_wrapper(partial(self._run, func, KERNELS[func]), func)
        # another mode, as that of tt.doctor, gets one call
        return handle_torch_function(run, (), *args) if _len_torch_function_stack() else run(*args)


def _transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active; neither takes our node."""
    return transforms() is not None or forward_ad._current_level >= 0


def _run_torch_cell(track: Track, forward: Callable[[], Any], _: Any) -> Any:
    """nn.LSTMCell, nn.GRUCell, nn.RNNCell."""

    def call(func: Any, cell: Cell, x: Tensor, state: Any, *weights: Any) -> Any:
        states = tuple(tensors_in(state))
        inputs = x.unsqueeze(0), states, Weights(*weights, hr=None)
        return substituted(
            partial(func, x, state, *weights),
            lambda: run_reference(track, cell, *inputs)[1],
            *(x, *states, *weights),
        )

    with KernelIntercept(call):
        return forward()


def _run_torch_layer(
    module: nn.RNNBase, tracks: Sequence[Track], forward: Callable[[], Any], inputs: Any
) -> Any:
    """nn.LSTM, nn.GRU, nn.RNN; `tracks` are those of each layer and direction."""
    order = inputs.unsorted_indices if isinstance(inputs, PackedSequence) else None

    def call(func: Any, cell: Cell, x: Tensor, *rest: Any) -> Any:
        del cell
        packed = not isinstance(rest[2], bool)  # then the number of lanes of each step comes first
        hx, weights, each = rest[packed], layer_weights(module), iter(tracks)
        dropout = module.dropout if module.training and module.num_layers > 1 else 0.0
        random = generators(x.device) if dropout else {}

        def again() -> Any:
            if dropout and (packed or cudnn_rules(x)):
                raise ModelError(
                    f"dropout={dropout:g} between the layers from '{tracks[0].name}' on: for packed"
                    " sequences, and on a GPU, torch draws it inside its kernel, so a trace cannot"
                    " repeat it. Trace in eval() mode or with dropout=0, or put nn.Dropout between"
                    " single layers"
                )
            if dropout:
                set_generators(random, x.device)  # the same numbers
            if not packed:
                run: Run = lambda *args: run_reference(next(each), *args)  # noqa: E731
                return run_layers(module, run, x, hx, None, weights)
            sequence = PackedSequence(x, rest[0])
            padded, lengths = pad_packed_sequence(sequence, module.batch_first)
            steps = torch.arange(len(rest[0]), device="cpu").unsqueeze(1)
            active = (steps < lengths).to(x.device)
            run = lambda *args: run_reference(next(each), *args, active=active, order=order)  # noqa: E731
            y, after = run_layers(module, run, padded, hx, None, weights)
            return pack_padded_sequence(y, lengths, module.batch_first).data, after

        return substituted(partial(func, x, *rest), again, x, *tensors_in(hx), *chain(*weights))

    with KernelIntercept(call):
        return forward()


def _run_fused_layer(
    module: Recurrent, tracks: Sequence[Track], forward: Callable[[], Any], inputs: Any
) -> Any:
    """tt.nn.LSTM, tt.nn.GRU, tt.nn.RNN, wherever in a subclass's forward the layer runs."""

    def run(backend: str) -> Run:
        own, each = Recurrent._run(module, backend), iter(tracks)

        def traced(
            cell: Cell, x: Tensor, states: States, weights: Weights, resets: Tensor | None
        ) -> Any:
            call = cell, x, states, weights, resets
            again = partial(run_reference, next(each), *call)
            return substituted(partial(own, *call), again, x, *states, *weights)

        return own if _transformed() else traced

    def by_torch(*args: Any) -> Any:
        return _run_torch_layer(module, tracks, partial(Recurrent._by_torch, module, *args), inputs)

    own = module.__dict__
    own["_run"], own["_by_torch"] = run, by_torch
    try:
        return forward()
    finally:
        own.pop("_run", None)
        own.pop("_by_torch", None)


def _run_named_cell(track: Track, leaves: Sequence[str], forward: Callable[[], Any], _: Any) -> Any:
    """A user's module that is called once per step, with names for the tensors that it returns."""
    result = forward()
    tensors = tensors_in(result)
    if len(tensors) != len(leaves):
        raise ModelError(
            f"'{track.name}' returns {len(tensors)} tensors, names has {len(leaves)}:"
            f" {listed(leaves, quoted=True)}. Name each, in order, with '_' for one that is not"
            " traced"
        )
    returned = {leaf: tensor for leaf, tensor in zip(leaves, tensors, strict=True) if leaf != "_"}
    call = TracedCall(track, 1, returned)
    for leaf, tensor in returned.items():
        call.watch(leaf, 0, tensor)
    return result


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of a nesting, in order; everything else is skipped."""
    return [tensor for _, tensor in trees.named_tensors(tree)]
