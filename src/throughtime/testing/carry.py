"""The laws of carrying a state, checked on a module in float64.

whole     uneven chunks with the state carried give what one forward call gives
reset     a lane that is reset goes on as if its recording started there, and no gradient crosses
lanes     what one lane is given changes no other lane
value     a forward call leaves the state that it was given as it was

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
    """A law that was checked: the largest deviation found, and what was allowed."""

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
    """Proves that a module may be carried: in chunks it computes what it computes as a whole.

    Works on a copy in float64 and evaluation mode; the module is not touched.

    Args:
        net: a module, or what `tt.carry` made of it.
        inputs: `(T, B, D)`, T the sum of `chunks`, at least 2 lanes; default: random, D as the
            module's first weight wants it. Needed for modules whose first layer does not tell.
        chunks: lengths of the chunks.
        tolerance: largest deviation allowed, absolute.

    Returns:
        The laws and how far each was from being broken.

    Raises:
        LawError: a law is broken; the message says which, by how much and what usually breaks it.

    Cost: five forward passes and one backward pass over T steps.

    Example:
        >>> import torch, throughtime as tt
        >>> [law.name for law in tt.testing.check_carry(torch.nn.LSTM(3, 8))]
        ['whole', 'reset', 'lanes', 'value']
    """
    carried = copy.deepcopy(net if isinstance(net, Carried) else carry(net)).double().eval()
    x = (
        _inputs(carried, sum(chunks))
        if inputs is None
        else (inputs.double() if inputs.is_floating_point() else inputs)
    )
    laws = [
        Law("whole", _whole(carried, x, chunks), tolerance),
        Law("reset", _reset(carried, x), tolerance),
        Law("lanes", _lanes(carried, x), tolerance),
        Law("value", _value(carried, x), 0.0),
    ]
    broken = [law for law in laws if not law.deviation <= law.tolerance]
    if broken:
        raise LawError(
            "; ".join(
                f"{law.name}: {_MEANING[law.name]} (deviation {law.deviation:.2g}, allowed"
                f" {law.tolerance:.2g})"
                for law in broken
            )
        )
    return laws


_MEANING = {
    "whole": (
        "chunks with the carried state do not give what one forward call gives. Does the module"
        " look ahead, normalise over time, convolve over steps without keeping them in its state,"
        " or keep a state that it does not return? A convolution must be causal and carry its last"
        " steps: see docs/loop.md."
    ),
    "reset": (
        "a lane that is reset does not go on as a new recording would, or a gradient crosses the"
        " reset. Does the module keep a state outside the one it returns?"
    ),
    "lanes": (
        "what one lane is given changes another. Does the module mix its lanes: normalise over the"
        " batch, reshape time into it?"
    ),
    "value": "forward changes the state that it is given, in place. Return a new state instead.",
}


def _inputs(net: Carried, steps: int, lanes: int = 3) -> Tensor:
    random = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Embedding):
            return torch.randint(module.num_embeddings, (steps, lanes), generator=random)
        width = getattr(module, "input_size", None) or getattr(module, "in_features", None)
        if isinstance(width, int):
            return torch.randn(steps, lanes, width, generator=random, dtype=torch.float64)
    raise ModelError(
        "the module does not tell how many features it takes; give check_carry some inputs (T,"
        " B, D)"
    )


def _run(
    net: Carried, x: Tensor, chunks: tuple[int, ...], resets: Tensor | None = None
) -> tuple[Tensor, State]:
    state, start, outputs = net.initial_state(x.shape[1], like=x), 0, list[Tensor]()
    for steps in chunks:
        stop = start + steps
        y, state = net(x[start:stop], state, None if resets is None else resets[start:stop])
        outputs.append(y)
        start = stop
    return torch.cat(outputs), state


def _apart(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item() if a.numel() else 0.0


def _states_apart(a: State, b: State) -> float:
    return max(
        (_apart(p, q) for (_, p), (_, q) in zip(trees.leaves(a), trees.leaves(b), strict=True)),
        default=0.0,
    )


def _whole(net: Carried, x: Tensor, chunks: tuple[int, ...]) -> float:
    with torch.no_grad():
        y, state = _run(net, x, chunks)
        whole, end = _run(net, x, (len(x),))
    return max(_apart(y, whole), _states_apart(state, end))


def _reset(net: Carried, x: Tensor) -> float:
    """Resets the first lane in the middle: outputs as from a start there, gradient zero before it."""
    middle = len(x) // 2
    resets = torch.zeros(x.shape[:2], dtype=torch.bool)
    resets[middle, 0] = True
    leaf = x.clone().requires_grad_() if x.is_floating_point() else x
    y, _ = _run(net, leaf, (len(x),), resets)
    with torch.no_grad():
        fresh, _ = _run(net, x[middle:], (len(x) - middle,))
        plain, _ = _run(net, x, (len(x),))
    crossing = (
        torch.autograd.grad(y[middle:, 0].sum(), leaf)[0][:middle].abs().max().item()
        if leaf.requires_grad
        else 0.0
    )
    return max(_apart(y[middle:, 0], fresh[:, 0]), _apart(y[:, 1:], plain[:, 1:]), crossing)


def _lanes(net: Carried, x: Tensor) -> float:
    other = x.clone()
    other[:, 0] = x[:, 0].flip(0)
    with torch.no_grad():
        return _apart(_run(net, x, (len(x),))[0][:, 1:], _run(net, other, (len(x),))[0][:, 1:])


def _value(net: Carried, x: Tensor) -> float:
    with torch.no_grad():
        _, state = _run(net, x, (len(x),))
        before = trees.map_leaves(torch.clone, state)
        net(x, state)
    return _states_apart(state, before)
