"""The gradient policy of a run: one of ours by name, or a class in the user's own file."""

import inspect
import math
from typing import Any

from throughtime.app.config import DEFAULT_STRIDE, Config
from throughtime.app.user_class import ClassReference, is_reference
from throughtime.errors import ConfigError, ThroughtimeError
from throughtime.gradient import Adaptive, Exact, Policy, Randomized, Truncated, UpdatePolicy
from throughtime.stream import Stream

_POLICIES = {
    "truncated": Truncated,
    "exact": Exact,
    "adaptive": Adaptive,
    "randomized": Randomized,
}


def make_policy(config: Config) -> Policy:
    """The policy that the settings describe.

    Raises:
        ConfigError: no such class, or arguments that it does not take; its own are listed.
    """
    name, arguments = config.gradient, config.policy_arguments()
    kind: Any = _POLICIES.get(name) or ClassReference.parse("gradient", name).load()
    if not hasattr(kind, "plan") and not hasattr(kind, "update"):
        raise ConfigError(
            f"--gradient {name}: its class {kind.__name__} has neither a method plan nor"
            " update; docs/how-to/extending.md shows a policy"
        )
    parameters = inspect.signature(kind).parameters.values()
    if any(p.name == "stride" and p.default is p.empty for p in parameters):
        arguments = {"stride": DEFAULT_STRIDE, **arguments}
    try:
        inspect.signature(kind).bind(**arguments)
        for p in parameters:
            value = arguments.get(p.name, p.default)
            if isinstance(p.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{p.name}={value!r}: expected true or false")
        return kind(**arguments)
    except ThroughtimeError:
        raise
    except (TypeError, ValueError) as error:
        shown = (p.name + f"={p.default!r}" * (p.default is not p.empty) for p in parameters)
        raise ConfigError(
            f"--gradient {name} with {arguments}: {error}. Its arguments are {', '.join(shown)};"
            " write --gradient-arg NAME=VALUE, or the table [gradient] of a TOML file"
        ) from error


def updates_per_epoch(policy: Policy | UpdatePolicy, stream: Stream, ranks: int) -> int:
    """The number of updates in an epoch; an estimate if the data or the policy decide."""
    if isinstance(policy, Exact) and policy.cut_every is None:
        if stream.lanes * ranks == 1:
            return len(stream.recordings)
        return max(1, round(stream.steps / stream.steps_to_common_reset()))
    names = ("cut_every", "stride", "mean_horizon", "min")
    steps = (getattr(policy, name, None) for name in names)
    stride = next((n for n in steps if isinstance(n, int) and n > 0), DEFAULT_STRIDE)
    return math.ceil(stream.steps / stride)


def describe_policy(config: Config) -> str:
    """The policy in words; of a user's the class and arguments, since its file is not executed."""
    if not is_reference(config.gradient):
        policy = make_policy(config)
        describe = getattr(policy, "describe", None)
        return str(describe()) if callable(describe) else repr(policy)
    arguments = (f"{name}={value!r}" for name, value in config.policy_arguments().items())
    return f"{config.gradient.rpartition(':')[2]}({', '.join(arguments)})"
