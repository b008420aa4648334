"""The linear recurrence, all steps at once: for layers whose gates do not depend on their state.

    h[t] = a[t] * h[t-1] + b[t]        element by element

minGRU, LRU, S5 and RG-LRU are such layers. The gradient is the same recurrence, reversed in time.
With g[t] the gradient of the loss with respect to the output h[t], and l[t] the total gradient:

    l[t] = g[t] + conj(a[t+1]) * l[t+1]
    dL/db[t] = l[t]        dL/da[t] = l[t] * conj(h[t-1])

So the backward pass, its own backward pass, and the forward derivative are scans again.

The steps are cut into blocks. A first pass runs all blocks side by side: it computes the product of
a block's gates, and the state that the block ends in when it starts from zero. These ends are a
recurrence of fewer steps, solved in the same way. A second pass runs all blocks again, each from
the state that enters it. No quotient is taken, so a gate may be 0, and no product is longer than a
block. If a result is not finite, the plain loop over steps runs instead; it is the definition.

Not to be confused with a scan in log space (positive gates only), nor with one by quotients of
cumulative products (which underflow after some hundred steps).

Cost: three multiplications per entry instead of one, and about 3 * 8 * log8(T) calls of torch
instead of T. Doubling, whose steps reach twice as far each time, passes log2(T) times over
everything. From (T, B, H) = (1000, 8, 64) on it takes 12 to 29 times as long as blocks, gradients
included, and two to three times as long if a step is small (benchmarks/linear_scan.py).

Shapes: `T` steps, `B` lanes, `...` any further dimensions: units, heads, matrices.

References: G. E. Blelloch, Prefix sums and their applications, CMU-CS-90-190 (1990). E. Martin and
C. Cundy, Parallelizing linear recurrent neural nets over sequence length, ICLR (2018).
"""

from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor

from throughtime.errors import DataError, StateError

BLOCK = 8  # steps; 8 to 32 are about equally fast, 4 is slower
# entries per step from which the loop is as fast: arithmetic then takes the time, not calls
WIDE = 4096
LONG = 6 * BLOCK  # steps from which blocks are worth their calls


def linear_scan(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
) -> Tensor:
    """The states `h[t] = gates[t] * h[t-1] + inputs[t]` of all steps.

    The last one, `h[-1]`, is the state to carry on. Use it instead of a loop over steps when gates
    depend only on the inputs. A gate that depends on the state needs the loop.

    Args:
        gates: `(T, B, ...)`, any real or complex numbers: 0 forgets, above 1 grows.
        inputs: `(T, B, ...)`. Gates and inputs broadcast against each other, as in torch's
            arithmetic, to the shape of the result.
        state: entering the first step, `(B, ...)`; broadcasts to the result without its steps.
        resets: `(T, B)` bool, true where the state entering the step becomes zeros, even if it was
            NaN; no gradient crosses. For loops of your own: `tt.carry` splits the call of a module
            at resets.

    Returns:
        `(T, B, ...)`, of the widest type of the arguments. It has gradients of any order for gates,
        inputs and state.

    Raises:
        DataError: gates, inputs and resets do not fit each other, or are not floating or complex.
        StateError: the state does not broadcast to the result without its steps.

    Cost: memory for T + 1 states and for the gates; the backward pass needs nothing else.

    Example:
        >>> import torch, throughtime as tt
        >>> gates, inputs = torch.tensor([[0.5], [0.0], [2.0]]), torch.ones(3, 1)
        >>> tt.linear_scan(gates, inputs, torch.tensor([4.0])).flatten()
        tensor([3., 1., 3.])

    References: Martin & Cundy, ICLR (2018).
    """
    tensors = _expanded(gates, inputs, state, resets)
    dtype = reduce(torch.promote_types, [t.dtype for t in tensors])
    if not (dtype.is_floating_point or dtype.is_complex):
        raise DataError(
            f"gates, inputs and state are {dtype}, expected floating or complex numbers:"
            " inputs.float()"
        )
    a, b, h = (t.to(dtype) for t in tensors)
    cut = None if resets is None else resets.view(*resets.shape, *(1,) * (a.dim() - 2))
    return _scan(a, b, h, cut)[1:]


def _expanded(
    gates: Tensor, inputs: Tensor, state: Tensor, resets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates and inputs in the shape of the result, and the state in that of a step; all checked."""
    got = f"gates {tuple(gates.shape)} and inputs {tuple(inputs.shape)}"
    try:
        shape = torch.broadcast_shapes(gates.shape, inputs.shape)
    except RuntimeError as error:
        raise DataError(
            f"{got} do not broadcast against each other; expected (T, B, ...) for both, time first"
        ) from error
    if len(shape) < 2 or shape[0] == 0:
        raise DataError(
            f"{got}: expected (T, B, ...) with at least one step; a single lane is"
            " gates.unsqueeze(1), inputs.unsqueeze(1)"
        )
    if resets is not None and (resets.shape != shape[:2] or resets.dtype != torch.bool):
        raise DataError(
            f"resets are {tuple(resets.shape)} {resets.dtype}, expected {tuple(shape[:2])}"
            " torch.bool: one flag for each step and lane"
        )
    try:
        return gates.expand(shape), inputs.expand(shape), state.expand(shape[1:])
    except RuntimeError as error:
        raise StateError(
            f"state has shape {tuple(state.shape)}, expected {tuple(shape[1:])} or what broadcasts"
            " to it: one state for each lane. The state after a call is the last step of its"
            " result, h[-1]."
        ) from error


class _LinearScan(torch.autograd.Function):
    """`(T + 1, B, ...)`: the entering state, then all others; `backwards`, from end to start.

    `cut` `(T, B, 1...)` marks the steps that ignore the state before them.
    """

    @staticmethod
    def forward(
        gates: Tensor, inputs: Tensor, state: Tensor, cut: Tensor | None, backwards: bool
    ) -> Tensor:
        states = gates.new_empty((len(gates) + 1, *gates.shape[1:]))
        states[-backwards] = state
        gates = gates.resolve_conj()
        narrow = gates[0].numel() < WIDE and len(gates) >= LONG
        if narrow:
            _blocks(_without_cuts(gates, cut), inputs, states, backwards)
        if not narrow or not bool(states.sum().isfinite()):
            _loop(gates, inputs, states, cut, backwards)
        return states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gates, _, _, cut, ctx.backwards = inputs
        ctx.save_for_backward(gates, cut, output)
        ctx.save_for_forward(gates, cut, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (gates, cut, states), backwards = grads, ctx.saved_tensors, ctx.backwards
        direct = _entering(grad, backwards)
        total = _scan(gates.conj(), direct, grad[backwards - 1], cut, not backwards)
        d_inputs, d_gates = _entering(total, not backwards), None
        if ctx.needs_input_grad[0]:
            d_gates = _without_cuts(d_inputs * _entering(states, backwards).conj(), cut)
        return d_gates, d_inputs, total[-backwards], None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        gates, cut, states = ctx.saved_tensors
        d_gates, d_inputs, d_state, *_ = tangents
        direct = d_inputs + _without_cuts(d_gates * _entering(states, ctx.backwards), cut)
        return _scan(gates, direct, d_state, cut, ctx.backwards)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Make the batch the last dimension, one more of `...`."""
        *tensors, cut, backwards = args
        if in_dims[3] is not None:
            raise DataError(
                "resets differ within a vmap; expected the same for the whole batch: they belong to"
                " the stream, not to the model"
            )
        a, b, state = (
            t.unsqueeze(-1).expand(*t.shape, info.batch_size) if dim is None else t.movedim(dim, -1)
            for t, dim in zip(tensors, in_dims, strict=False)
        )
        states = _scan(a, b, state, None if cut is None else cut.unsqueeze(-1), backwards)
        return states, states.dim() - 1


def _scan(
    gates: Tensor, inputs: Tensor, state: Tensor, cut: Tensor | None, backwards: bool = False
) -> Tensor:
    return cast(Tensor, _LinearScan.apply(gates, inputs, state, cut, backwards))


def _entering(states: Tensor, backwards: bool) -> Tensor:
    """For each step the state entering it."""
    return states[1:] if backwards else states[:-1]


def _without_cuts(entries: Tensor, cut: Tensor | None) -> Tensor:
    return entries if cut is None else entries.masked_fill(cut, 0)


def _loop(
    gates: Tensor, inputs: Tensor, states: Tensor, cut: Tensor | None, backwards: bool
) -> None:
    """The definition: fill `states` step by step, from its first (`backwards`, its last) entry."""
    a, b, h = gates.unbind(0), inputs.unbind(0), states.unbind(0)
    cuts = set[int]() if cut is None else {*cut.flatten(1).any(dim=1).nonzero().flatten().tolist()}
    for t in range(len(a))[:: -1 if backwards else 1]:
        before = h[t + backwards]
        if cut is not None and t in cuts:
            before = before.masked_fill(cut[t], 0)
        torch.addcmul(b[t], a[t], before, out=h[t + 1 - backwards])


def _blocks(gates: Tensor, inputs: Tensor, states: Tensor, backwards: bool) -> None:
    """As `_loop`, without cuts, in blocks of steps; the rest, at the end of the scan, is a loop."""
    count = len(gates) // BLOCK
    if count < 2:
        _loop(gates, inputs, states, None, backwards)
        return
    covered = count * BLOCK
    rest = len(gates) - covered
    blocks, left = slice(covered), slice(covered, None)
    if backwards:
        blocks, left = slice(rest, None), slice(rest)
    a, b, h = (
        t[blocks].unflatten(0, (count, BLOCK)).unbind(1)[:: -1 if backwards else 1]
        for t in (gates, inputs, _entering(states, not backwards))
    )
    decay, end = a[0].clone(), b[0].clone()
    for j in range(1, BLOCK):
        decay.mul_(a[j])
        torch.addcmul(b[j], a[j], end, out=end)
    edges = gates.new_empty((count + 1, *gates.shape[1:]))
    edges[-backwards] = states[-backwards]
    _blocks(decay, end, edges, backwards)
    before = _entering(edges, backwards)
    for j in range(BLOCK):
        before = torch.addcmul(b[j], a[j], before, out=h[j])
    if rest:
        ends = states[: rest + 1] if backwards else states[left]
        _loop(gates[left], inputs[left], ends, None, backwards)
