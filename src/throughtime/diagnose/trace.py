"""The gradient of each state and gate at every step, from the backward pass that runs anyway.

It is the total gradient, dL/dh[t] through every path to the loss, not only through the output of
step t. A hook runs layers and cells once more, beside their own forward pass:

    forward:    the results of the layer itself, with the graph of `kernels/reference.py`
    backward:   through the reference, step by step; hooks keep the gradient of each state and gate

So outputs are those of the untraced net, to the bit, and gradients agree to rounding.

A pass is one run of autograd's engine, with the runs inside it: a segment of `tt.Exact` or
`tt.rollout`, or a reentrant checkpoint, runs again in the backward pass, and then backward in a run
of its own. What a layer computes there belongs to the pass in which it was computed.

    vanishes at t     |a_s| < VANISHED * max|a|  for every s <= t      a_t: gradient at step t
                      zeros of a gate before its first gradient do not count: it scales a state of
                      zero there
    explodes at t     |a_t| > EXPLODED * (steps from t to the end) * max|a| of the last tenth
                      more than so many losses of that size, carried back without growth
    edge              |gradient of the state entering the first step| / max|a|
    time constant     tau = -1 / log(mean retention gate): steps until 1/e is left

References: S. Hochreiter, Y. Bengio, P. Frasconi and J. Schmidhuber, Gradient flow in recurrent
nets (2001), for vanishing and exploding; C. Tallec and Y. Ollivier, Can recurrent neural networks
warp time?, ICLR 2018, for gates as time constants.

Shapes: `T` steps, `B` lanes (rows of the batch), `H` hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import Variable, forward_ad
from torch.nn.modules import module as torch_modules
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.rnn import PackedSequence, pad_sequence
from torch.utils._pytree import tree_leaves, tree_map

from throughtime._device import real_type
from throughtime.carry.carried import Carried
from throughtime.diagnose._slice import CreditGate
from throughtime.diagnose._trace_summary import (
    BackwardRecord,
    GradientSummary,
    Timescale,
    TraceSummary,
)
from throughtime.errors import ConfigError, ModelError, RunError, listed
from throughtime.gradient.window import check_whole
from throughtime.kernels import reference
from throughtime.kernels.cells import CELLS, Cell, Weights, cell_of
from throughtime.kernels.dispatch import AUTOCAST_TYPES, transforms
from throughtime.kernels.reference import States
from throughtime.nn.layers import Recurrent, layer_weights, run_layers

OUTSIDE = -1  # torch's task id outside of a backward pass
ENTERING = -1  # the step of the state that enters a call
OPEN = set[nn.Module]()  # traced now
FORWARDS = {
    Recurrent.forward,
    *(kind.forward for cell in CELLS.values() for kind in (cell.layer, cell.step)),
}


def trace(
    net: nn.Module,
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    keep: int = 1,
) -> "Trace":
    """Trace a net inside `with tt.trace(net) as trace:`, around any loop.

    Use it to find where along time a gradient vanishes or explodes. `tt.reach` measures the same of
    single losses, by lag; `tt.audit` measures what a truncation costs. Outputs are those of the
    untraced net, and gradients too, up to rounding.

    Args:
        net: any module with layers or cells of torch.nn or `tt.nn` inside, carried by `tt.carry` or
            not. Weights and modes stay as they are.
        names: your own cells, called once per step, by their path in the net (`""` is the net): a
            name for each tensor that they return, in order, `"_"` to skip one:
            `names={"cell": ("h", "c")}`. Lanes come first.
        keep: the number of passes kept, at least 1. Each holds the gradient of every state and gate
            at every step, less than half of what its graph took.

    Returns:
        A `Trace`: `trace["layer0.c"][17]` for norms, `(B,)`, `print(trace)` for a table. It keeps
        its records after the block, and may be entered again.

    Raises:
        ModelError: the net has nothing to trace, or a layer with a forward of its own. Inside the
            block, a layer gets a packed sequence, or has dropout between its layers while training.
        AttributeError: the net has no module of a path in `names`.
        ConfigError: `keep` is below 1. On entering, the net is traced already.

    Cost: a traced pass runs each layer once more, step by step, with the graph of all its steps
        (docs/how-to/trace.md). Outside of the block, nothing; inside, updates of other nets are not
        fused either.

    Example:
        >>> import torch, throughtime as tt
        >>> lstm = torch.nn.LSTM(3, 8)
        >>> with tt.trace(lstm) as trace:
        ...     y, _ = lstm(torch.randn(20, 2, 3))
        ...     y[-1].square().sum().backward()
        >>> trace["layer0.f"].shape, trace["layer0.c"][17].shape  # norms per lane
        (torch.Size([20, 2]), torch.Size([2]))
        >>> bool(trace["layer0.c"][0].max() < trace["layer0.c"][19].max())
        True

    References: Hochreiter, Bengio, Frasconi & Schmidhuber, Gradient flow in recurrent nets (2001).
    """
    check_whole("keep", keep, 1)
    module, own = net.module if isinstance(net, Carried) else net, names or {}
    kinds = nn.RNNBase, nn.RNNCellBase
    paths = {part: name for name, part in module.named_modules() if isinstance(part, kinds)}
    paths |= {module.get_submodule(name): name for name in own}
    if not paths:
        raise ModelError(
            f"{type(module).__name__} has no recurrent layer or cell of torch.nn inside. For a cell"
            " of your own, say what it is called and what it returns:"
            ' tt.trace(net, names={"cell": ("h", "c")})'
        )
    for part, name in paths.items():
        if name not in own and type(part).forward not in FORWARDS:
            raise ModelError(
                f"module '{name}' is a {type(part).__name__}, whose forward is not that of torch:"
                " its steps are unknown. Let it call a layer of torch.nn or tt.nn inside"
            )
    return Trace(paths, own, keep)


# One run of the engine: of each call, the last one first, what is kept by leaf and step.
EngineRun: TypeAlias = dict["TracedCall", dict[tuple[str, int], Tensor]]


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One call of a layer in one direction, or of a cell.

    Attributes:
        name: `layer0`, `lstm.layer1_reverse`, `cell`.
        steps: of the call.
        zeros: by leaf, the gradient of a step that gets none.
        gates: the retention gate of every step and lane, `(N, H)`.
        run: to which it belongs if it was computed in a backward pass.
    """

    name: str
    steps: int
    zeros: Mapping[str, Tensor]
    gates: Tensor | None
    run: EngineRun | None


class Trace:
    """The result of `tt.trace`: the last backward passes of a net that is traced in a `with` block.

    Names are `layer0.c`, `lstm.layer1.f`, `cell.h`: the path of the module, the layer, the state or
    gate.

    Attributes:
        count: backward passes traced so far.
        passes: the last ones, at most `keep`, the oldest first. The tuple is never changed, so
            another thread may read it.

    Example:
        >>> import torch, throughtime as tt
        >>> net = torch.nn.GRU(3, 8)
        >>> with tt.trace(net) as trace:
        ...     net(torch.randn(20, 2, 3))[0].square().mean().backward()
        >>> trace.names, trace["layer0.h"].shape
        (('layer0.h', 'layer0.r', 'layer0.z', 'layer0.n'), torch.Size([20, 2]))
    """

    def __init__(
        self,
        paths: Mapping[nn.Module, str],
        names: Mapping[str, Sequence[str]],
        keep: int,
    ) -> None:
        self._paths, self._names, self._keep = paths, names, keep
        self.count = 0
        self.passes: tuple[BackwardRecord, ...] = ()
        self._running: dict[int, EngineRun] = {}

    def __enter__(self) -> Self:
        if not OPEN.isdisjoint(self._paths):
            raise ConfigError(
                "this net is traced already: leave the first `with` before you enter the second"
            )
        OPEN.update(self._paths)
        # Not hooks of the modules: those of `tt.carry` would come first, and copies have them too.
        self._handle = register_module_forward_hook(self._replace, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        OPEN.difference_update(self._paths)
        self._handle.remove()
        # torch forgets this one
        torch_modules._global_forward_hooks_with_kwargs.pop(self._handle.id, None)

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
        """Every state and gate of the last pass: `layer0.h`, `layer0.c`, `layer0.f` and so on."""
        return tuple(self.last.norms)

    def __getitem__(self, name: str) -> Tensor:
        """Gradient norms of the last pass per lane, `(T, B)`.

        Raises:
            ConfigError: no such name.
        """
        if name not in self.last.norms:
            raise ConfigError(
                f"no gradient of '{name}' was recorded; recorded are {', '.join(self.names)}"
            )
        return self.last.norms[name]

    def summary(self) -> TraceSummary:
        """Where the gradient of the last pass vanishes or explodes, and how long gates remember."""
        return TraceSummary(
            tuple(GradientSummary.from_pass(self.last, name) for name in self.names),
            tuple(Timescale.from_mean(*scale) for scale in self.last.retention.items()),
        )

    def __str__(self) -> str:
        return str(self.summary())

    def _replace(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The output of a module, with the gradient of the reference; None if it stays."""
        path = self._paths.get(module)
        if path is None:
            return None
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # torch.func and forward-mode differentiation do not take our node
        transformed = transforms() is not None or forward_ad._current_level >= 0
        if transformed or not any(tensor.requires_grad for tensor in results):
            return None
        if path in self._names:
            self._watch_results(path, results)
            return None
        run = self._run_cell if isinstance(module, nn.RNNCellBase) else self._run_layer
        again = tree_leaves(run(path, module, *args, **kwargs))
        sources = [other.view_as(own) for other, own in zip(again, results, strict=True)]
        values = iter(CreditGate.apply(results, None, *sources))
        return tree_map(lambda _: next(values), output)

    def _run_layer(
        self,
        path: str,
        module: Any,
        input: Any,  # noqa: A002  # torch's name
        hx: Any = None,
        resets: Tensor | None = None,
    ) -> Any:
        """nn.LSTM, nn.GRU, nn.RNN and those of `tt.nn`, by the reference."""
        dropout = module.dropout and module.training and module.num_layers > 1
        if dropout or isinstance(input, PackedSequence):
            raise ModelError(
                f"{path or type(module).__name__} has a packed sequence or dropout between its"
                " layers, which a trace cannot run again: pad the sequences, and leave the rest out"
                " of the loss; trace in eval() mode, or put nn.Dropout between single layers"
            )
        prefix, ends = f"{path}." if path else "", ("", "_reverse")[: 1 + module.bidirectional]
        names = iter([f"{prefix}layer{k}{end}" for k in range(module.num_layers) for end in ends])

        def run(*call: Any) -> tuple[Tensor, States]:
            return self._run_steps(next(names), *call)

        return run_layers(module, run, input, hx, resets, layer_weights(module))

    def _run_cell(
        self,
        path: str,
        module: Any,
        input: Tensor,  # noqa: A002  # torch's name
        hx: Any = None,
    ) -> States:
        """nn.LSTMCell, nn.GRUCell, nn.RNNCell: a layer of one step."""
        cell: Any = cell_of(module)
        x, hidden = input.reshape(1, -1, module.input_size), module.hidden_size
        if hx is None:
            hx = [x.new_zeros(x.shape[1], hidden)] * len(cell.states)
        own = module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh
        return self._run_steps(
            path or "cell", cell, x, tree_leaves(hx), Weights(*own, hr=None), None
        )[1]

    def _run_steps(
        self,
        name: str,
        cell: Cell,
        x: Tensor,
        states: Sequence[Tensor],
        weights: Weights,
        resets: Tensor | None,
    ) -> tuple[Tensor, States]:
        """One layer in one direction by the reference, with a hook on each state and gate.

        Steps of a backward direction come from the last to the first.
        """
        device, dtype, rounded = x.device.type, weights.ih.dtype, None
        if torch.is_autocast_enabled(device) and dtype in AUTOCAST_TYPES:
            rounded = torch.get_autocast_dtype(device)
        wide = torch.promote_types(dtype, torch.float32)
        states = [leaf.reshape(-1, leaf.shape[-1]) for leaf in states]
        # the other sources: an edge is computed wherever the gradient of a weight is
        entering = CreditGate.apply([leaf.to(wide) for leaf in states], None, *states, x, *weights)
        with torch.autocast(device, enabled=False):
            own: Any = (w if w is None else w.to(wide) for w in weights)
            results = [*reference.steps(cell, x.to(wide), entering, Weights(*own), resets, rounded)]
        steps = [dict(zip(cell.states, step.states, strict=True)) | step.gates for step in results]
        reverse = name.endswith("_reverse")
        call = self._watch(name, steps[::-1] if reverse else steps, cell.retention_gate)
        for leaf, tensor in () if reverse else zip(cell.states, entering, strict=True):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, call, leaf, ENTERING))
        return torch.stack([step["h"] for step in steps]), results[-1].states

    def _watch_results(self, path: str, results: Sequence[Tensor]) -> None:
        """What a user's cell returns, by the names that the user has given."""
        leaves, name = self._names[path], path or "cell"
        if len(results) != len(leaves):
            raise ModelError(
                f"'{name}' returns {len(results)} tensors, names has {len(leaves)}:"
                f" {listed(leaves, quoted=True)}. Name each, in order, with '_' for one that is not"
                " traced"
            )
        step = dict(zip(leaves, results, strict=True))
        step.pop("_", None)
        self._watch(name, [step])

    def _watch(
        self, name: str, steps: Sequence[Mapping[str, Tensor]], gate: str | None = None
    ) -> TracedCall:
        """Keep the gradients of every step of a call, `(B, H)` by leaf, whenever there are any."""
        gates = None if gate is None else torch.cat([step[gate].detach() for step in steps])
        zeros = {leaf: torch.zeros_like(t) for leaf, t in steps[0].items()}
        outside = backward_task() == OUTSIDE
        call = TracedCall(name, len(steps), zeros, gates, None if outside else self._run())
        for number, step in enumerate(steps):
            for leaf, tensor in step.items():
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._note, call, leaf, number))
        return call

    def _note(self, call: TracedCall, leaf: str, step: int, gradient: Tensor | None) -> None:
        # rows of a Jacobian (`is_grads_batched`) are not the gradient of a loss
        if gradient is not None and not is_legacy_batchedtensor(gradient):
            run = self._run() if call.run is None else call.run
            run.setdefault(call, {})[leaf, step] = gradient.detach()

    def _run(self) -> EngineRun:
        """The engine's present run."""
        task = backward_task()
        if task not in self._running:
            self._running = {task: {}}  # a pass that failed leaves nothing behind
            engine: Any = Variable._execution_engine  # as DistributedDataParallel does
            engine.queue_callback(partial(self._finish, self._running[task]))
        return self._running[task]

    def _finish(self, run: EngineRun) -> None:
        """Record a run that has ended; calls of one name are consecutive steps."""
        layers: dict[str, list[TracedCall]] = {}
        for call in reversed(run):
            layers.setdefault(call.name, []).append(call)
        record = BackwardRecord({}, {}, {}, {})
        for layer, calls in layers.items():
            for leaf in calls[0].zeros:
                rows = [
                    run[call].get((leaf, step), call.zeros[leaf])
                    for call in calls
                    for step in range(call.steps)
                ]
                name, values = f"{layer}.{leaf}", pad_sequence(rows, batch_first=True)
                record.gradients[name], record.norms[name] = values, vector_norms(values, 2)
                edge = run[calls[0]].get((leaf, ENTERING))
                if edge is not None:
                    record.edges[name] = vector_norms(edge, 1)
            gates = [call.gates for call in calls if call.gates is not None]
            if gates:
                record.retention[layer] = torch.cat(gates).mean(0)
        run.clear()
        if record.norms:
            self.count, self.passes = self.count + 1, (*self.passes, record)[-self._keep :]


def vector_norms(gradient: Tensor, dims: int) -> Tensor:
    """The norm over all but the first `dims` dimensions.

    In double precision where the device has it, since squares of small numbers vanish in single.
    """
    flat = gradient.unsqueeze(-1).flatten(dims)
    kind = torch.complex128 if flat.is_complex() else real_type(flat)
    return torch.linalg.vector_norm(flat, dim=dims, dtype=kind)


def backward_task() -> int:
    """The number of the engine's present run; torch has no public name for it."""
    return torch._C._current_graph_task_id()
