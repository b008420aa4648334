"""The laws of carrying a state, checked on a module in float64.

whole     uneven chunks with the state carried give what one forward call gives
reset     a lane that is reset continues as if its recording started there; no gradient crosses
lanes     the inputs of one lane change no other lane
value     a forward call does not change the state that it gets

Shapes: `T` steps, `B` lanes, `D` input features.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from throughtime import state as trees
from throughtime.carry.carried import Carried, carry
from throughtime.errors import LawError, ModelError
from throughtime.state import State


@dataclass(frozen=True)
class Law:
    """A law that was checked: the largest deviation measured, and the deviation allowed."""

    name: str
    deviation: float
    tolerance: float


def check_carry(
    net: nn.Module,
    inputs: Tensor | None = None,
    *,
    chunks: tuple[int, ...] = (1, 7, 2, 13, 5),
    tolerance: float = 1e-12,
) -> list[Law]:
    """Check that a module computes the same in chunks, with the state carried, as in one call.

    Works on a copy in float64 and evaluation mode; the module is not changed.

    Args:
        net: a module, or the result of `tt.carry`.
        inputs: `(T, B, D)`, T the sum of `chunks`, at least 2 lanes; default: random, with the
            number of features of the module's first layer. Needed if no layer declares it.
        chunks: lengths of the chunks.
        tolerance: largest deviation allowed, absolute.

    Returns:
        The laws, each with its largest deviation.

    Raises:
        LawError: a law is broken; the message says which, by how much and the usual cause.

    Cost: five forward passes and one backward pass over T steps.

    Example:
        >>> import torch, throughtime as tt
        >>> [law.name for law in tt.testing.check_carry(torch.nn.LSTM(3, 8))]
        ['whole', 'reset', 'lanes', 'value']
    """
    carried = copy.deepcopy(carry(net)).double().eval()
    if inputs is None:
        inputs = _random_inputs(carried, sum(chunks))
    x = inputs.double() if inputs.is_floating_point() else inputs
    laws = [
        Law("whole", _check_whole(carried, x, chunks), tolerance),
        Law("reset", _check_reset(carried, x), tolerance),
        Law("lanes", _check_lanes(carried, x), tolerance),
        Law("value", _check_value(carried, x), 0.0),
    ]
    broken = [law for law in laws if not law.deviation <= law.tolerance]
    if broken:
        raise LawError(
            "; ".join(
                f"{law.name}: {_CAUSES[law.name]} (deviation {law.deviation:.2g}, allowed"
                f" {law.tolerance:.2g})"
                for law in broken
            )
        )
    return laws


_CAUSES = {
    "whole": (
        "chunks with the carried state do not give what one forward call gives. Does the module"
        " look ahead, normalise over time, convolve over steps without keeping them in its state,"
        " or keep a state that it does not return? A convolution must be causal and carry its last"
        " steps: see docs/loop.md."
    ),
    "reset": (
        "a lane that is reset does not continue as a new recording would, or a gradient crosses the"
        " reset. Does the module keep a state outside the one it returns?"
    ),
    "lanes": (
        "the inputs of one lane change another lane. Does the module mix its lanes: normalise over"
        " the batch, reshape time into it?"
    ),
    "value": "forward changes the state that it gets, in place. Return a new state instead.",
}


def _random_inputs(net: Carried, steps: int, lanes: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Embedding):
            return torch.randint(module.num_embeddings, (steps, lanes), generator=generator)
        features = getattr(module, "input_size", None) or getattr(module, "in_features", None)
        if isinstance(features, int):
            shape = (steps, lanes, features)
            return torch.randn(shape, generator=generator, dtype=torch.float64)
    raise ModelError(
        "no layer of the module declares how many features it takes; give check_carry some inputs"
        " (T, B, D)"
    )


def _run_chunks(net: Carried, x: Tensor, *chunks: int) -> tuple[Tensor, State]:
    """Outputs and final state; one chunk unless their lengths are given."""
    state = net.initial_state(x.shape[1], like=x)
    outputs: list[Tensor] = []
    for part in x.split(chunks or (len(x),)):
        y, state = net(part, state)
        outputs.append(y)
    return torch.cat(outputs), state


def _deviation(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item() if a.numel() else 0.0


def _state_deviation(a: State, b: State) -> float:
    pairs = zip(trees.tensors(a), trees.tensors(b), strict=True)
    return max((_deviation(p, q) for p, q in pairs), default=0.0)


def _check_whole(net: Carried, x: Tensor, chunks: tuple[int, ...]) -> float:
    with torch.no_grad():
        y, state = _run_chunks(net, x, *chunks)
        expected, end = _run_chunks(net, x)
    return max(_deviation(y, expected), _state_deviation(state, end))


def _check_reset(net: Carried, x: Tensor) -> float:
    """Reset the first lane in the middle: outputs as from a start there, zero gradient before."""
    middle = len(x) // 2
    resets = torch.zeros(x.shape[:2], dtype=torch.bool)
    resets[middle, 0] = True
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x
    y, _ = net(leaf, net.initial_state(x.shape[1], like=x), resets)
    with torch.no_grad():
        restarted, _ = _run_chunks(net, x[middle:])
        without_reset, _ = _run_chunks(net, x)
    crossing = 0.0
    if leaf.requires_grad:
        grads = torch.autograd.grad(y[middle:, 0].sum(), leaf)[0]
        crossing = grads[:middle].abs().max().item()
    first_lane = _deviation(y[middle:, 0], restarted[:, 0])
    return max(first_lane, _deviation(y[:, 1:], without_reset[:, 1:]), crossing)


def _check_lanes(net: Carried, x: Tensor) -> float:
    other = x.clone()
    other[:, 0] = x[:, 0].flip(0)
    with torch.no_grad():
        y, changed = _run_chunks(net, x)[0], _run_chunks(net, other)[0]
    return _deviation(y[:, 1:], changed[:, 1:])


def _check_value(net: Carried, x: Tensor) -> float:
    with torch.no_grad():
        _, state = _run_chunks(net, x)
        before = trees.map_leaves(torch.clone, state)
        net(x, state)
    return _state_deviation(state, before)
