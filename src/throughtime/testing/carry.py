"""The laws of carrying a state, checked on a module in float64: see `throughtime.carry._laws`.

Besides those, a lane that is reset must continue as if its recording started there, and no gradient
may cross the reset. Shapes: `T` steps, `B` lanes, `D` input features.
"""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from throughtime._device import real_type
from throughtime.carry._inside import copy_of, sample_inputs
from throughtime.carry._laws import LAWS, Law, difference, measured
from throughtime.carry.carried import Carried, carry, device_of
from throughtime.errors import LawError, ModelError

RESET_CAUSE = (
    "a lane that is reset does not continue as a new recording would, or a gradient crosses the"
    " reset. Does the module keep a state outside the one it returns?"
)


def check_carry(
    net: nn.Module,
    inputs: Tensor,
    *,
    chunks: tuple[int, ...] = (1, 7, 2, 13, 5),
    tolerance: float = 1e-12,
) -> list[Law]:
    """Check that a module computes the same in chunks, with the state carried, as in one call.

    `tt.carry` measures these laws and others on a few steps, with other weights too. Here they are
    measured on a copy in float64, which is the default dtype meanwhile, in evaluation mode; the
    module is not changed. The copy stays on the module's device, or is on the CPU where that has no
    float64 (MPS).

    Args:
        net: a module, or the result of `tt.carry`.
        inputs: `(T, B, D)` on any device, at least 2 steps; of one lane, rows are drawn from it for
            three.
        chunks: lengths of the chunks, repeated or cut to fill T.
        tolerance: largest deviation allowed, relative to the largest output and at least absolute.

    Returns:
        The laws, each with its largest deviation.

    Raises:
        LawError: a law is broken, or no way of calling the module obeys them all; the message says
            which, by how much and the usual cause.
        ModelError: the module cannot be copied.

    Cost: some fifteen forward passes and three backward passes over T steps.

    Example:
        >>> import torch, throughtime as tt
        >>> laws = tt.testing.check_carry(torch.nn.LSTM(3, 8), torch.randn(28, 2, 3))
        >>> [law.name for law in laws][:4]
        ['repeat', 'value', 'inputs', 'memory']
    """
    twin = copy_of(net)
    if twin is None:
        raise ModelError(
            f"{type(net).__name__} cannot be copied (copy.deepcopy fails), and check_carry works on"
            " a copy"
        )
    carried = carry(twin.eval())
    if real_type(device_of(carried)) != torch.float64:
        carried = carried.cpu()
    x = inputs.to(device_of(carried))
    if x.shape[1] == 1:
        x = sample_inputs(x, 3, len(x))
    try:
        carried.prepare(x)  # in its own dtype, for the rounding that it has there
    except ModelError as refused:
        raise LawError(str(refused)) from refused
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        x = x.double() if x.is_floating_point() else x
        return _measured(carried.double(), x, _fill(chunks, len(x)), tolerance)
    finally:
        torch.set_default_dtype(default)


def _measured(carried: Carried, x: Tensor, chunks: list[int], tolerance: float) -> list[Law]:
    """The laws, on a net and inputs in float64.

    Raises:
        LawError: one is broken.
    """
    laws = [*measured(carried.adapter, carried.module, x, chunks=chunks, tolerance=tolerance)]
    laws.append(Law("reset", _check_reset(carried, x), laws[0].tolerance))
    return obeyed(laws, LAWS | {"reset": RESET_CAUSE})


def obeyed(laws: list[Law], causes: Mapping[str, str]) -> list[Law]:
    """The laws, if all hold.

    Raises:
        LawError: some are broken; it names each with its cause.
    """
    broken = [
        f"{law.name}: {causes[law.name]} ({law.error or f'deviation {law.deviation:.2g}'}, allowed"
        f" {law.tolerance:.2g})"
        for law in laws
        if not law.holds
    ]
    if broken:
        raise LawError("; ".join(broken))
    return laws


def _fill(chunks: tuple[int, ...], steps: int) -> list[int]:
    """Lengths of chunks that add up to the steps: repeated, and cut where they are too many."""
    repeated = chunks * (steps // sum(chunks) + 1)
    ends = [end for end in accumulate(repeated) if end < steps]
    return [stop - start for start, stop in zip([0, *ends], [*ends, steps], strict=True)]


def _check_reset(net: Carried, x: Tensor) -> float:
    """Reset the first lane in the middle: outputs as from a start there, zero gradient before."""
    middle = len(x) // 2
    resets = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    resets[middle, 0] = True
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x
    y, _ = net(leaf, net.initial_state(x.shape[1], like=x), resets)
    with torch.no_grad():
        restarted, _ = net(x[middle:], net.initial_state(x.shape[1], like=x))
        without_reset, _ = net(x, net.initial_state(x.shape[1], like=x))
    crossing = 0.0
    if leaf.requires_grad and y.requires_grad:
        grads = torch.autograd.grad(y[middle:, 0].sum(), leaf)[0]
        crossing = grads[:middle].abs().max().item()
    first_lane = difference(y[middle:, 0], restarted[:, 0])
    return max(first_lane, difference(y[:, 1:], without_reset[:, 1:]), crossing)
