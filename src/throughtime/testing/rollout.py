"""A check that a recurrent agent trains on what it did: acting and training use the same states.

An agent acts one step at a time and is trained on whole rollouts, with episodes that start in the
middle of them. A state that is reset a step late, belongs to another environment or survives its
episode is invisible in the returns for a long time, and changes every gradient.

Shapes: `T` steps, `B` environments.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from throughtime.carry._laws import Law, difference
from throughtime.errors import DataError
from throughtime.state import tensors
from throughtime.testing.carry import obeyed

# inputs (T, B, ...), the state entering, starts (T, B) -> outputs (T, B, ...), the state after
Play: TypeAlias = Callable[[Tensor, Any, Tensor], tuple[Any, Any]]

CAUSES = {
    "acting": "acting step by step gives other outputs than training on the rollout: a state is"
    " reset at another step, or stored of another step than the one it enters",
    "gradients": "acting and training have other gradients, or a gradient crosses a start: detach"
    " and reset the state at the same steps in both",
    "starts": "an episode that starts within a rollout continues another one: reset the state at"
    " the step where `starts` is true, before that step",
    "environments": "other inputs in one environment change the outputs of another: keep the states"
    " in the order of the environments",
}


def check_rollout(
    policy: Play,
    inputs: Tensor,
    starts: Tensor,
    state: Any,
    *,
    act: Play | None = None,
    tolerance: float = 1e-5,
) -> list[Law]:
    """Check that training on a rollout computes what acting step by step did.

    Four laws: the outputs are equal, also their gradients, an episode that starts in the middle
    gives what it gives alone, and no environment depends on another.

    Args:
        policy: of `(inputs, state, starts)`, gives outputs, one tensor or several, and the state
            after the last step.
        inputs: floating, `(T, B, ...)`, of at least two environments.
        starts: `(T, B)` bool: at which steps an episode starts; some step after the first.
        state: what enters the first step.
        act: plays one step, `(1, B, ...)`, if that is other code than training; under `no_grad` its
            outputs alone are compared. Default: `policy`.
        tolerance: largest difference allowed, of outputs and gradients.

    Returns:
        The laws, each with its largest deviation.

    Raises:
        LawError: a law is broken; the message says which, by how much and the usual cause.
        DataError: the rollout cannot show it: no start after the first step, one environment, or
            outputs that do not depend on the past.

    Cost: T forward passes of one step, a backward pass through them, and one of T steps for each
    step at which an episode starts.

    Example:
        >>> import torch, throughtime as tt
        >>> gru, starts = tt.nn.GRU(3, 8), torch.zeros(9, 2, dtype=torch.bool)
        >>> starts[4, 1] = True
        >>> laws = tt.testing.check_rollout(
        ...     gru, torch.randn(9, 2, 3), starts, torch.zeros(1, 2, 8)
        ... )
        >>> [law.name for law in laws]
        ['acting', 'gradients', 'starts', 'environments']
    """
    middle = starts[1:].any(dim=1).nonzero().flatten() + 1
    if not len(middle) or inputs.shape[1] < 2:
        raise DataError(
            f"starts name no step after the first, or inputs {tuple(inputs.shape)} are of one"
            " environment: give a rollout of two, in which an episode starts, as starts[4, 1] ="
            " True"
        )
    x = inputs.detach().clone().requires_grad_()

    def train(x: Tensor, starts: Tensor) -> Tensor:
        return _joined(policy(x, state, starts)[0])

    outputs, acted, entering = train(x, starts), list[Tensor](), state
    for step in zip(x.split(1), starts.split(1), strict=True):
        y, entering = (act or policy)(step[0], entering, step[1])
        acted.append(_joined(y))
    episode = gradient = 0.0
    for start in middle.tolist():
        lanes = starts[start]
        alone = train(x[start:], starts[start:])
        episode = max(episode, difference(outputs[start:, lanes], alone[:, lanes]))
        (crossing,) = torch.autograd.grad(outputs[start:, lanes].sum(), x, retain_graph=True)
        gradient = max(gradient, crossing[:start, lanes].abs().max().item())
    played = torch.cat(acted)
    if played.requires_grad:  # of a sum that weighs every output differently
        weights = outputs.detach().cos()
        own, acting = (torch.autograd.grad(y, x, weights)[0] for y in (outputs, played))
        gradient = max(gradient, difference(own, acting))
    changed = x.detach().clone()
    changed[:, 0] += 1
    others = difference(outputs[:, 1:], train(changed, starts)[:, 1:])
    deviations = (difference(outputs, played), gradient, episode, others)
    laws = [Law(name, size, tolerance) for name, size in zip(CAUSES, deviations, strict=True)]
    unbroken = train(x, torch.zeros_like(starts))
    if max(episode, difference(outputs, unbroken)) <= tolerance:
        raise DataError(
            "the outputs are the same without any start, so nothing is checked: the state has no"
            " effect in these steps. Give more steps or larger inputs"
        )
    return obeyed(laws, CAUSES)


def _joined(outputs: Any) -> Tensor:
    """Outputs `(T, B, ...)`, one or several, as one tensor `(T, B, N)`."""
    return torch.cat([y[..., None].flatten(2) for y in tensors(outputs)], 2)
