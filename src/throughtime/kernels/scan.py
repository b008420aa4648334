"""The linear recurrence, all steps at once: minGRU, LRU, S5, RG-LRU and every other layer whose
gates do not see its state.

    h[t] = a[t] * h[t-1] + b[t]        element by element

Credit is the same recurrence from the end, with l the sum of all that a loss blames h[t] for:

    l[t] = g[t] + conj(a[t+1]) * l[t+1]        dL/db[t] = l[t]        dL/da[t] = l[t] * conj(h[t-1])

so its backward pass, the one after that, and its forward derivative are scans again.

In blocks of steps: all blocks run side by side, once for the product of their gates and the state
that each ends in from zero; the ends are a recurrence a block's length shorter, solved in the same
way; then all blocks run once more from the state that truly enters them. No quotient is taken, so a
gate may be 0, and no product is longer than a block. Where a result is not finite, the plain loop
over steps, which defines what is right, runs instead. To be confused neither with a scan in log
space (positive gates only) nor with one by quotients of cumulative products (which underflow after
some hundred steps). Cost: three multiplications per entry instead of one, and about 3 * 8 * log8(T)
calls of torch instead of T. Doubling, whose steps reach twice as far each time, passes log2(T)
times over everything: 12 to 29 times the time of blocks, gradients included, from (T, B, H) =
(1000, 8, 64) on, and twice to three times where a step holds little (benchmarks/linear_scan.py).

Shapes: `T` steps, `B` lanes, `...` anything behind them: units, heads, matrices.

References: G. E. Blelloch, Prefix sums and their applications, CMU-CS-90-190 (1990). E. Martin and
C. Cundy, Parallelizing linear recurrent neural nets over sequence length, ICLR (2018).
"""

from typing import Any, cast

import torch
from torch import Tensor

from throughtime.errors import DataError, StateError

BLOCK = 8  # steps; 8 to 32 are about equally fast, 4 is slower
# entries per step from which the loop is as fast: arithmetic, no longer calls, is what takes the
# time
WIDE = 4096
LONG = 6 * BLOCK  # steps from which blocks are worth their calls


def linear_scan(
    gates: Tensor,
    inputs: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
    *,
    initial: Tensor | None = None,
) -> Tensor:
    """The states `h[t] = gates[t] * h[t-1] + inputs[t]` of all steps; the last, `h[-1]`, is the
    state to carry on.

    For layers whose gates depend on the inputs only, in place of a loop over steps. A gate that
    depends on the state needs the loop.

    Args:
        gates: `(T, B, ...)`, any real or complex numbers: 0 forgets, above 1 grows.
        inputs: `(T, B, ...)`. Gates and inputs broadcast against each other, as in torch's
            arithmetic, to the shape of the result.
        state: entering the first step, `(B, ...)`; broadcasts to the result without its steps.
        resets: `(T, B)` bool, true where the state entering the step is the initial one, whatever
            the state before it, NaN included; no gradient crosses. A module that `tt.carry` carries
            is given them where its forward has a parameter `resets`; where it has none, the call is
            split at resets.
        initial: what recordings start from, `(B, ...)` or what broadcasts to it; default: zeros.
            Only resets use it.

    Returns:
        `(T, B, ...)`, of the widest type given. It has gradients of any order for gates, inputs,
        state and initial.

    Raises:
        DataError: gates, inputs and resets that do not fit, or are no floating or complex numbers.
        StateError: a state or initial state that does not broadcast to the result without its
            steps.

    Cost: memory for T + 1 states, and for the gates; they are all that is kept for the backward
    pass.

    Example:
        >>> import torch, throughtime as tt
        >>> tt.linear_scan(torch.tensor([[0.5], [0.0], [2.0]]), torch.ones(3, 1), torch.tensor([4.0])).flatten()
        tensor([3., 1., 3.])

    References: Martin & Cundy, ICLR (2018).
    """
    shape = _shape(gates, inputs, resets)
    starts = [
        _start(name, tensor, shape[1:])
        for name, tensor in (("state", state), ("initial", initial))
        if tensor is not None
    ]
    dtype = _dtype(gates, inputs, *starts)
    a, b, *starts = [
        tensor.to(dtype) for tensor in (gates.expand(shape), inputs.expand(shape), *starts)
    ]
    if resets is None:
        return _states(a, b, starts[0], None)
    if initial is not None:
        at = resets.nonzero(as_tuple=True)
        b = b.index_put(at, a[at] * starts[1][at[1]], accumulate=True)
    return _states(a, b, starts[0], resets.view(*shape[:2], *(1,) * (len(shape) - 2)))


def _shape(gates: Tensor, inputs: Tensor, resets: Tensor | None) -> torch.Size:
    """The shape of the result, after checking that everything fits."""
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
    return shape


def _start(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError as error:
        raise StateError(
            f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} or what broadcasts to"
            " it: one state for each lane. The state after a call is the last step of what it"
            " returned, h[-1]."
        ) from error


def _dtype(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        raise DataError(
            f"gates, inputs and state are {dtype}, expected floating or complex numbers:"
            " inputs.float()"
        )
    return dtype


def _states(gates: Tensor, inputs: Tensor, state: Tensor, cut: Tensor | None) -> Tensor:
    return cast(Tensor, _Scan.apply(gates, inputs, state, cut, False))[1:]


class _Scan(torch.autograd.Function):
    """`(T + 1, B, ...)`: the state that enters, then all others; from the end to the start where
    `backwards`.

    `cut` `(T, B, 1...)` marks the steps that count nothing of the state before them.
    """

    @staticmethod
    def forward(
        gates: Tensor, inputs: Tensor, state: Tensor, cut: Tensor | None, backwards: bool
    ) -> Tensor:
        states = gates.new_empty((len(gates) + 1, *gates.shape[1:]))
        states[-1 if backwards else 0] = state
        gates = gates.resolve_conj()
        narrow = gates[0].numel() < WIDE and len(gates) >= LONG
        if narrow:
            _blocks(gates if cut is None else gates.masked_fill(cut, 0), inputs, states, backwards)
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
        (grad,) = grads
        gates, cut, states = ctx.saved_tensors
        here, first = (grad[1:], grad[0]) if ctx.backwards else (grad[:-1], grad[-1])
        blame = cast(Tensor, _Scan.apply(gates.conj(), here, first, cut, not ctx.backwards))
        to_inputs, to_state = (blame[:-1], blame[-1]) if ctx.backwards else (blame[1:], blame[0])
        to_gates = (
            _uncut(to_inputs * _before(states, ctx.backwards).conj(), cut)
            if ctx.needs_input_grad[0]
            else None
        )
        return to_gates, to_inputs, to_state, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        gates, cut, states = ctx.saved_tensors
        of_gates, of_inputs, of_state, *_ = tangents
        moved = of_inputs + _uncut(of_gates * _before(states, ctx.backwards), cut)
        return cast(Tensor, _Scan.apply(gates, moved, of_state, cut, ctx.backwards))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """The batch becomes the last dimension: one more `...`."""
        *tensors, cut, backwards = args
        if in_dims[3] is not None:
            raise DataError(
                "resets differ within a vmap; expected the same for all of it: they belong to the"
                " stream, not to the model"
            )
        rows = [
            (
                t.movedim(dim, -1)
                if dim is not None
                else t.unsqueeze(-1).expand(*t.shape, info.batch_size)
            )
            for t, dim in zip(tensors, in_dims[:3], strict=True)
        ]
        states = cast(
            Tensor, _Scan.apply(*rows, None if cut is None else cut.unsqueeze(-1), backwards)
        )
        return states, states.dim() - 1


def _before(states: Tensor, backwards: bool) -> Tensor:
    """For each step the state that entered it."""
    return states[1:] if backwards else states[:-1]


def _uncut(entries: Tensor, cut: Tensor | None) -> Tensor:
    return entries if cut is None else entries.masked_fill(cut, 0)


def _loop(
    gates: Tensor, inputs: Tensor, states: Tensor, cut: Tensor | None, backwards: bool
) -> None:
    """The definition: step by step into `states`, whose first one (the last, where `backwards`) is given."""
    a, b, h = gates.unbind(0), inputs.unbind(0), states.unbind(0)
    cuts = (
        set[int]() if cut is None else set(cut.flatten(1).any(dim=1).nonzero().flatten().tolist())
    )
    for t in reversed(range(len(a))) if backwards else range(len(a)):
        before, after = (h[t + 1], h[t]) if backwards else (h[t], h[t + 1])
        if cut is not None and t in cuts:
            before = before.masked_fill(cut[t], 0)
        torch.addcmul(b[t], a[t], before, out=after)


def _blocks(gates: Tensor, inputs: Tensor, states: Tensor, backwards: bool) -> None:
    """As `_loop`, without cuts, in blocks of steps."""
    count = len(gates) // BLOCK
    if count < 2:
        _loop(gates, inputs, states, None, backwards)
        return
    rest = len(gates) - count * BLOCK  # at the end of the way
    inside = slice(rest, None) if backwards else slice(count * BLOCK)
    a, b = (
        gates[inside].unflatten(0, (count, BLOCK)).unbind(1),
        inputs[inside].unflatten(0, (count, BLOCK)).unbind(1),
    )
    h = (
        (states[rest:-1] if backwards else states[1 : count * BLOCK + 1])
        .unflatten(0, (count, BLOCK))
        .unbind(1)
    )
    way = range(BLOCK - 1, -1, -1) if backwards else range(BLOCK)
    decay, end = a[way[0]].clone(), b[way[0]].clone()
    for j in way[1:]:
        decay.mul_(a[j])
        torch.addcmul(b[j], a[j], end, out=end)
    edges = gates.new_empty((count + 1, *gates.shape[1:]))
    edges[-1 if backwards else 0] = states[-1 if backwards else 0]
    _blocks(decay, end, edges, backwards)
    before = _before(edges, backwards)
    for j in way:
        before = torch.addcmul(b[j], a[j], before, out=h[j])
    left, over = (
        (slice(rest), slice(rest + 1))
        if backwards
        else (slice(count * BLOCK, None), slice(count * BLOCK, None))
    )
    _loop(gates[left], inputs[left], states[over], None, backwards)
