"""The gradient policy of a run: one of ours by name, or a class in the user's own file."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict, create_model

from throughtime.app.config import DEFAULT_STRIDE, Config
from throughtime.app.user_class import ClassReference, is_reference
from throughtime.app.values import build
from throughtime.errors import ConfigError, ThroughtimeError
from throughtime.gradient import Adaptive, Exact, Policy, Randomized, Truncated, UpdatePolicy
from throughtime.stream import Stream

_POLICIES: dict[str, Callable[..., Policy]] = {
    "truncated": Truncated,
    "exact": Exact,
    "adaptive": Adaptive,
    "randomized": Randomized,
}


def resolve_gradient(config: Config) -> Config:
    """The config with typed arguments of its gradient policy.

    Raises:
        ConfigError: see `make_policy`.
    """
    make_policy(config)
    typed = _arguments(config, _policy_class(config.gradient))
    return replace(config, gradient_args={name: typed[name] for name in config.gradient_args})


def make_policy(config: Config) -> Policy:
    """The policy that the settings describe.

    Raises:
        ConfigError: no such class, or arguments that it does not take; its own are listed.
    """
    policy_class = _policy_class(config.gradient)
    arguments = _arguments(config, policy_class)
    try:
        return policy_class(**arguments)
    except ThroughtimeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--gradient {config.gradient} refuses {arguments}: {error}") from error


def _policy_class(name: str) -> Callable[..., Policy]:
    if name in _POLICIES:
        return _POLICIES[name]
    policy_class = ClassReference.parse("gradient", name).load()
    if not hasattr(policy_class, "plan") and not hasattr(policy_class, "update"):
        raise ConfigError(
            f"--gradient {name}: its class {policy_class.__name__} has neither a method plan nor"
            " update; docs/how-to/extending.md shows a policy"
        )
    return policy_class


def _arguments(config: Config, policy_class: Callable[..., Policy]) -> dict[str, Any]:
    """The arguments of the policy in their types.

    Raises:
        ConfigError: unknown or missing arguments, or values of the wrong type; all are listed.
    """
    parameters = _parameters(policy_class)
    empty = inspect.Parameter.empty
    fields: dict[str, Any] = {
        name: (
            Any if p.annotation is empty else p.annotation,
            ... if p.default is empty else p.default,
        )
        for name, p in parameters.items()
    }
    arguments = config.policy_arguments()
    if fields.get("stride", "")[1:] == (...,):
        arguments = {"stride": DEFAULT_STRIDE, **arguments}
    checks = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
    try:
        typed = build(create_model("Arguments", __config__=checks, **fields), arguments, flags=())
    except ConfigError as error:
        raise ConfigError(
            f"--gradient {config.gradient}: {error}. Its arguments are"
            f" {', '.join(map(_describe, parameters.values()))}; write --gradient-arg NAME=VALUE,"
            " or the table [gradient] of a TOML file"
        ) from error
    return {name: getattr(typed, name) for name in arguments}


def _parameters(policy_class: Callable[..., Policy]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(policy_class, eval_str=True).parameters
    except NameError as error:
        raise ConfigError(
            f"{policy_class.__qualname__}: the type of an argument is not known ({error})"
        ) from error


def _describe(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return parameter.name + ("" if default is inspect.Parameter.empty else f"={default!r}")


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
