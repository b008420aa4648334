"""How the credit of a run flows back: from its settings to a policy."""

import math
from dataclasses import replace

from throughtime import state as trees
from throughtime.app.config import Config
from throughtime.carry.carried import Carried
from throughtime.gradient import Exact, LossFn, Objective, Truncated
from throughtime.gradient._memory import MemoryBudget
from throughtime.stream import Stream


def policy_of(config: Config) -> Truncated | Exact:
    """The policy that the settings ask for."""
    return (
        Exact(segment=config.segment) if config.exact else Truncated(config.stride, config.horizon)
    )


def settled(
    policy: Truncated | Exact, net: Carried, stream: Stream, loss_fn: LossFn
) -> Truncated | Exact:
    """The policy with pieces of a fixed length, measured on the first steps of the stream, which
    has not moved yet.

    Where a sweep is cut decides how its sums are rounded, and a run that goes on must round as it
    did before: what is measured must not depend on where it goes on.
    """
    if isinstance(policy, Truncated):
        return policy
    device = next(net.parameters()).device
    first = stream.read(0, 1).to(device)
    state = trees.detach(net.initial_state(first.lanes, like=first.inputs))
    steps = min(policy.segment or stream.steps, stream.steps)
    room = MemoryBudget(policy.memory, policy.chunk, policy.offload)
    return replace(
        policy,
        chunk=room.segment_steps(
            net,
            steps,
            lambda n: stream.read(0, min(n, stream.steps)).to(device),
            state,
            Objective(loss_fn),
        ),
    )


def updates_per_epoch(policy: Truncated | Exact, stream: Stream) -> int:
    """How many updates an epoch makes.

    An estimate where it depends on when the lanes' recordings end.
    """
    if isinstance(policy, Truncated):
        return math.ceil(stream.steps / policy.stride)
    if policy.segment is not None:
        return math.ceil(stream.steps / policy.segment)
    return (
        len(stream.recordings)
        if stream.lanes * stream._shard.ranks == 1
        else max(1, round(stream.steps / stream.steps_to_common_reset()))
    )
