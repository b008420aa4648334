"""A segment of steps as one node of autograd's graph, which runs again in the backward pass.

    forward:    s_0 -> s_1 -> ... -> s_n          the states between segments are kept, no graphs
    backward:   for i = n-1 ... 0:  run segment i again from s_i, with a graph
                (g, a_i) += vector-Jacobian products of its loss, and of s_{i+1} with a_{i+1}

The credit a_i is the gradient of all later losses with respect to s_i. Autograd orders the nodes,
sums the gradients g of the weights over them, and delivers the sum once. It is the gradient of one
graph over all steps, in the memory of one segment and the kept states. Cost per step: two forward
passes and one backward pass (4/3 of plain autograd, if a backward pass costs two forward passes).

References: T. Chen et al., Training deep nets with sublinear memory cost (2016); A. Gruslys et al.,
Memory-efficient backpropagation through time, NeurIPS 2016; A. Griewank and A. Walther, Revolve,
ACM TOMS 26 (2000).

Shapes: `T` steps, `B` lanes, `D` input features, `C` outputs.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from throughtime import state as trees
from throughtime._device import fork_rng, generators, is_accelerator, real_type, set_generators
from throughtime.carry.carried import Carried, pack, require_carried
from throughtime.chunk import Chunk
from throughtime.errors import ModelError
from throughtime.gradient.objective import sizes
from throughtime.gradient.window import Credit, check_whole
from throughtime.state import State

MOST_BYTES = 512_000_000  # of the graph of one segment, where its length is automatic
# On two cores of a Zen 5 graphs of this size run fastest: they stay in cache, and a short pass is
# not run twice.
FAST_BYTES = 8_000_000
NODE_BYTES = 1_000  # of a saved tensor, besides its numbers: objects of autograd and Python
TRIAL_STEPS = 64
HALF = (torch.bfloat16, torch.float16)
Run: TypeAlias = Callable[..., tuple[Tensor, ...]]
Rebuild: TypeAlias = Callable[[Sequence[Tensor]], State]


class Segment(torch.autograd.Function):
    """`run(*inputs) -> tensors` as one node of the graph.

        Segment.apply(run, (begin, stop), replay, gate, count, *tensors)

    The tensors are the `count` inputs, such as the state that enters the segment, and then the
    weights of `replay`, which `run` uses without being given them. `gate` maps the credit of the
    inputs on its way out, or is None. The steps `begin` to before `stop` are for messages.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        span: tuple[int, int],
        replay: "Replay",
        gate: Any,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.span, ctx.replay, ctx.gate, ctx.index = run, span, replay, gate, replay.mark()
        ctx.save_for_backward(*tensors[:count])
        results = [t.detach() for t in run(*tensors[:count])]
        # of a view, not the rest of its storage: it would be kept with the state
        results = [
            t if t.untyped_storage().nbytes() <= 2 * t.nbytes else t.clone() for t in results
        ]
        replay.mark(after=True)
        ctx.sums = replay.sums(results)
        whole = [t for t in results if not (t.is_floating_point() or t.is_complex())]
        ctx.mark_non_differentiable(*whole)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        replay: Replay = ctx.replay
        replay.check_use()
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[5:], strict=False)  # weights follow
        inputs = [t.detach().requires_grad_(wanted) for t, wanted in pairs]
        with replay.at(ctx.index), torch.enable_grad():
            results = ctx.run(*inputs)
        replay.compare(ctx, results)
        pairs = zip(results, cotangents, strict=True)
        roots = [(t, credit) for t, credit in pairs if credit is not None and t.requires_grad]
        sources = [t for t in (*inputs, *replay.weights) if t.requires_grad]
        grads = iter(replay.gradients(roots, sources))
        credit: Credit = [next(grads) if t.requires_grad else None for t in inputs]
        own = [next(grads) if t.requires_grad else None for t in replay.weights]
        replay.note(ctx.index, [credit for _, credit in roots], credit, own)
        if ctx.gate is not None and any(t is not None for t in credit):
            credit = ctx.gate(credit)
        return None, None, None, None, None, *credit, *own


class _Mark(NamedTuple):
    """Random states; the buffers, with torch's counts of changes; and their values."""

    random: dict[str, Tensor]
    versions: list[tuple[Tensor, int]]
    buffers: list[Tensor]


class Replay:
    """What the segments of one pass need to run again as they ran first.

    Covers torch's generators (dropout), buffers (the vectors of spectral norm), and autocast. Equal
    marks share memory: a net that draws nothing pays one comparison for each segment. Random
    numbers from elsewhere and values in attributes are not covered; the checksum detects them.

    Args:
        net: made by `tt.carry`.
        weights: that get a gradient.
        device: where the net computes.
    """

    def __init__(self, net: nn.Module, weights: Sequence[Tensor], device: torch.device) -> None:
        self.net, self.weights, self.device = net, [*weights], device
        self.reached = False  # whether a weight has received a gradient
        self.notes: list[tuple[int, Tensor]] = []  # sizes of gradients, by segment
        self.arriving = torch.zeros(
            1, device=device
        )  # and of the credit that came to the first to run again
        self._versions = [weight._version for weight in weights]
        self._marks: list[_Mark] = []
        self._buffers = _buffers(net)
        self._kind = real_type(device)
        self._pending: list[tuple[Any, list[Tensor], Any, Tensor]] = []
        self._autocast = torch.is_autocast_enabled(device.type)
        if self._autocast:
            self._autocast_type = torch.get_autocast_dtype(device.type)
            self._cached = torch.is_autocast_cache_enabled()

    @property
    def inputs(self) -> list[Tensor]:
        """The weights as inputs of a segment: half precision would lose digits in their sum."""
        return [w.float() if w.dtype in HALF else w for w in self.weights]

    def mark(self, *, after: bool = False) -> int:
        """Note random states and buffers, unless the segment before has; returns the number."""
        if self._marks and not after:
            return len(self._marks) - 1
        random = generators(self.device)
        buffers = [owner[name] for owner, name in self._buffers]
        versions, values = [(buffer, buffer._version) for buffer in buffers], None
        if self._marks:
            last = self._marks[-1]
            same = [torch.equal(last.random[kind], state) for kind, state in random.items()]
            random = last.random if all(same) else random
            pairs = zip(last.versions, versions, strict=True)
            unchanged = all(a is b and count == now for (a, count), (b, now) in pairs)
            values = last.buffers if unchanged else None
        values = [buffer.detach().clone() for buffer in buffers] if values is None else values
        self._marks.append(_Mark(random, versions, values))
        return len(self._marks) - 1

    @contextmanager
    def at(self, index: int) -> Generator[None]:
        """Inside, random numbers, buffers and autocast are those of a segment's first run."""
        mark, draws, kind = self._marks[index], self._marks[index].random, self.device.type
        context = nullcontext()
        if self._autocast:
            cached = self._cached
            context = torch.autocast(kind, dtype=self._autocast_type, cache_enabled=cached)
        elif torch.is_autocast_enabled(kind):
            context = torch.autocast(kind, enabled=False)
        with context:
            if not self._buffers and draws is self._marks[index + 1].random:
                yield  # nothing to restore
                return
            with preserve_rng_and_buffers(self.net, self.device):
                set_generators(draws, self.device)
                for (owner, name), values in zip(self._buffers, mark.buffers, strict=True):
                    owner[name].data.copy_(values)
                yield

    def check_use(self) -> None:
        """Refuse a second derivative, and weights that have changed."""
        if torch.is_grad_enabled():
            raise ModelError(
                "tt.rollout was asked for a second derivative (create_graph=True): its backward"
                " pass keeps no graph of its own. For gradient penalties and the like call the net"
                " itself, net(x, state, resets), on a stretch that fits in memory."
            )
        if [weight._version for weight in self.weights] != self._versions:
            raise ModelError(
                "weights were changed in place (optimizer.step()?) between the forward pass and"
                " its backward pass, which runs the net again: call backward first"
            )

    def gradients(
        self, roots: Sequence[tuple[Tensor, Tensor]], sources: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The vector-Jacobian product; hooks of weights get the whole gradient at its delivery."""
        if not roots or not sources:
            return [None] * len(sources)
        tensors, cotangents = zip(*roots, strict=True)
        # there is no public way
        hooks = [(h, dict(h)) for weight in self.weights if (h := weight._backward_hooks)]
        for registered, _ in hooks:
            registered.clear()
        try:
            return torch.autograd.grad(tensors, sources, cotangents, allow_unused=True)
        finally:
            for registered, saved in hooks:
                registered.update(saved)

    def note(self, index: int, arriving: Sequence[Tensor], credit: Credit, own: list[Any]) -> None:
        """Note the sizes of a segment's gradients, and whether a weight has one."""
        self.reached = self.reached or own.count(None) < len(own)
        grads = [grad for grad in (*credit, *own) if grad is not None]
        if arriving and not self.notes:
            self.arriving = sizes([*arriving])
        if grads:
            self.notes.append((index, sizes(grads)))

    def compare(self, ctx: Any, results: Sequence[Tensor]) -> None:
        """Refuse a forward pass that does not repeat: gradient and loss would not match.

        An accelerator is waited for once, when the first segment has run again.
        """
        sizes = self.sums([(tensor.detach() * tolerance([tensor])).abs() for tensor in results])
        allowed = sizes.clamp(min=tolerance(results))

        def differs(sums: Tensor) -> Tensor:
            return ctx.sums.isfinite() & ~((ctx.sums - sums).abs() <= allowed)

        self._pending.append((ctx, [*ctx.saved_tensors], differs, differs(self.sums(results))))
        if ctx.index and is_accelerator(self.device):
            return
        pending, self._pending = self._pending, []
        if not any(torch.cat([flags for *_, flags in pending]).tolist()):
            return
        for segment, inputs, differs, _ in pending:
            # kernels that keep a graph may round differently, and a chaotic net amplifies that
            with self.at(segment.index), torch.no_grad():
                flags = differs(self.sums(segment.run(*inputs))).tolist()
            if any(flags):
                part, (begin, stop) = flags.index(True), segment.span
                where = f"leaf {part - 1} of the state" if part else "the loss or the outputs"
                raise ModelError(
                    f"the forward pass does not repeat: run again, steps {begin} to {stop - 1}"
                    f" differ in {where}. Something they depend on has changed in between: random"
                    " numbers from Python or NumPy (draw them from torch), a counter or cache in an"
                    " attribute (keep it in the state or in a buffer), data that read differently,"
                    " or cuDNN's own dropout between layers (use nn.Dropout)."
                )

    def sums(self, tensors: Sequence[Tensor]) -> Tensor:
        """A checksum of each, in double precision where the device has it."""
        kind = self._kind
        return torch.stack(
            [t.detach().sum(dtype=torch.promote_types(t.dtype, kind)) for t in tensors]
        )


def tolerance(tensors: Sequence[Tensor]) -> float:
    """The relative difference that rounding may cause between two runs of one kernel.

    The memory of the two runs may be aligned differently.
    """
    kinds = [t.dtype for t in tensors if trees.differentiable(t)] or [torch.float64]
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        kinds.append(torch.get_autocast_dtype(device))
    return max(torch.finfo(kind).eps for kind in kinds) ** 0.5


@contextmanager
def preserve_rng_and_buffers(net: nn.Module, device: torch.device) -> Generator[None]:
    """Restore random generators and buffers at the end of the block.

    All of them: the kernels of BatchNorm write running statistics, and torch counts no change.
    Without counting one here, which would make graphs that have saved a buffer useless.
    """
    buffers = [(own, name, own[name], own[name].detach().clone()) for own, name in _buffers(net)]
    try:
        with fork_rng(device):
            yield
    finally:
        for own, name, buffer, values in buffers:
            buffer.data.copy_(values)
            own[name] = buffer  # a module may have set another one


def _buffers(net: nn.Module) -> list[tuple[Any, str]]:
    """Where a net has its buffers: modules may set others there."""
    modules = [module._buffers for module in net.modules()]
    return [(own, name) for own in modules for name, value in own.items() if value is not None]


def lane_norms(credit: Credit) -> Tensor | None:
    """The norm of each lane over all leaves, `(B,)`; `None` without any gradient."""
    norm = torch.linalg.vector_norm
    norms = [norm(leaf.reshape(len(leaf), -1), dim=1) for leaf in credit if leaf is not None]
    return norm(torch.stack(norms), dim=0) if norms else None


def automatic_chunk(steps: int, step_bytes: float) -> int:
    """Steps per segment: 1,000, the root of all, or a graph of `FAST_BYTES` if that is longer.

    Example:
        >>> from throughtime.gradient.segment import automatic_chunk
        >>> [automatic_chunk(4_000_000, size) for size in (1e3, 1e5, 1e6)]
        [8000, 2000, 512]
    """
    longest = max(1000, math.isqrt(steps), int(FAST_BYTES / step_bytes))
    count = math.ceil(steps / max(1, min(longest, int(MOST_BYTES / step_bytes))))
    return math.ceil(steps / count)  # of equal length: the last one does not run again


def graph_bytes(net: nn.Module, first: Chunk, run: Callable[[], object]) -> float:
    """The size of a graph, by a trial, for each step.

    Args:
        net: made by `tt.carry`.
        first: the first few steps.
        run: builds their graph.
    """
    known = [*net.parameters(), *net.buffers(), first.inputs, first.targets]
    ignored = {t.untyped_storage().data_ptr() for t in known if t is not None}
    saved = list[tuple[int, int]]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            saved.append((storage.data_ptr(), storage.nbytes()))
        return tensor.detach()  # a graph that held its own output would never be freed

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with preserve_rng_and_buffers(net, first.inputs.device), torch.enable_grad(), hooks:
        run()
    return (sum(dict(saved).values()) + NODE_BYTES * len(saved) + 1) / first.steps


def rollout(
    net: Carried,
    x: Tensor,
    state: State = None,
    *,
    resets: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Any, State]:
    """Outputs for all steps and the state after them, with the graph of one segment at a time.

    Same call as `net(x, state, resets)` and the same gradients, to inputs, state and parameters.
    Use it for losses of the final state or of several nets, or as part of a larger graph. For
    others, of steps or of whole sequences, `tt.updates` with `tt.Exact` and a `tt.SequenceLoss`
    needs no loop of your own.

    Args:
        net: made by `tt.carry`.
        x: `(T, B, D)`, or `(T, B)` integers for a module that embeds them.
        state: the state entering the first step; default: the initial state.
        resets: `(T, B)` bool, true where the state entering the step is the initial state.
        chunk: steps per segment; default: automatic, see `tt.Exact`.

    Returns:
        `y` `(T, B, C)`, and the state after step T.

    Raises:
        ConfigError: `chunk` is below 1.
        DataError: inputs that are not `(T, B, ...)` with at least one step.
        ModelError: the forward pass does not repeat, weights changed before the backward pass, or a
            second derivative (`create_graph=True`) was asked for.

    Cost: two forward passes and one backward pass per step; outputs and their gradient in memory.

    Example:
        >>> import torch, throughtime as tt
        >>> net = tt.carry(torch.nn.GRU(3, 8))
        >>> y, _ = tt.rollout(net, torch.randn(4096, 1, 3))
        >>> torch.fft.rfft(y[:, 0, 0]).abs()[10].backward()  # one bin of a spectrum
        >>> net.module.weight_hh_l0.grad.shape
        torch.Size([24, 8])

    References: T. Chen et al., Training deep nets with sublinear memory cost (2016).
    """
    require_carried(net)
    if chunk is not None:
        check_whole("chunk", chunk, 1)
    steps = Chunk.from_tensors(x, resets=resets)
    state = net.initial_state(steps.lanes, like=x) if state is None else state
    few = steps[:TRIAL_STEPS]
    length = chunk or automatic_chunk(
        len(x), graph_bytes(net, few, lambda: net(few.inputs, trees.detach(state)))
    )
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    replay, outputs = Replay(net, weights, x.device), list[Tensor]()
    weights = replay.inputs
    # one node for all parts of x: the gradient of each slice would be as large as x
    leaves, rebuild = flatten(state)
    leaves, after = [leaf.clone() for leaf in leaves], [rebuild]
    for i, rows in enumerate(x.split(length)):
        part = steps[i * length : (i + 1) * length]

        def run(
            rows: Tensor, *leaves: Tensor, part: Chunk = part, rebuild: Rebuild = after[0]
        ) -> tuple[Tensor, ...]:
            y, state = net(rows, rebuild(leaves), part.resets if part.any_reset else None)
            results, after[0] = flatten(state)
            return pack(y), *results

        span, inputs = (part.start, part.stop), (rows, *leaves)
        y, *leaves = Segment.apply(run, span, replay, None, len(inputs), *inputs, *weights)
        outputs.append(y)
    y, unpack = torch.cat(outputs), net.adapter.unpack
    return (unpack(y) if unpack else y), after[0](leaves)


def flatten(state: State) -> tuple[Sequence[Tensor], Rebuild]:
    """The leaves of a state, and what builds such a state from others."""
    leaves, structure = tree_flatten(state)
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return leaves, structure.unflatten

    def rebuild(leaves: Sequence[Tensor]) -> State:
        rest = iter(leaves)
        return trees.map_leaves(lambda _: next(rest), state)

    return trees.tensors(state), rebuild  # None, or a container that pytree does not know
